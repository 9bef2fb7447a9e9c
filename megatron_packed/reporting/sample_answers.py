"""Answers to sample prompts: their field in the log, and their lines on the console."""

from __future__ import annotations

from collections.abc import Sequence

Sample = dict[str, str]
"""Texts ``prompt`` and ``answer``, and ``expected`` if the file of prompts has an answer."""
SAMPLES = "samples"
"""Field of the log: a list of `Sample`."""
_MOST_SHOWN = 4
"""Largest number of answers that the console shows at a time."""
_WIDTH = 100
"""Largest number of characters of a prompt or an answer on the console."""


def console_lines(iteration: int, samples: Sequence[Sample]) -> list[str]:
    """Return short lines with the first answers."""
    lines = [
        f"answer at step {iteration}: {_short(sample['prompt'])} -> {_short(sample['answer'])}"
        for sample in samples[:_MOST_SHOWN]
    ]
    omitted = len(samples) - _MOST_SHOWN
    return [*lines, f"and {omitted} more answers in the log"] if omitted > 0 else lines


def _short(text: str) -> str:
    """Return a text as one line, without its middle if it is long."""
    line = " ".join(text.split())
    half = _WIDTH // 2 - 2
    return line if len(line) <= _WIDTH else f"{line[:half]} ... {line[-half:]}"
