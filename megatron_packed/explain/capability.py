"""One row about a capability of a run, and lines of text beside a column. Nothing here imports torch."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

ON, PARTIAL, OFF = "on", "partial", "off"
WIDTH = 118
"""Largest number of characters of a line in a terminal."""


class Capability(NamedTuple):
    """Feature of a run, whether the run has it, the reason, and a better setting."""

    name: str
    state: str
    """``on``, ``partial`` or ``off``."""
    reason: str
    advice: str = ""
    """Setting that would improve the state; empty if there is none."""


def on_or_off(name: str, active: bool, on: str, off: str, advice: str = "") -> Capability:
    """Return a capability with the reason of its state; ``advice`` is for a run without it."""
    return Capability(name, ON, on) if active else Capability(name, OFF, off, advice)


def beside(head: str, text: str) -> list[str]:
    """Return ``head`` and ``text`` to the right of it, in lines of at most `WIDTH` characters."""
    indent = " " * len(head)
    lines = textwrap.wrap(
        text, max(WIDTH - len(head), 40), break_long_words=False, break_on_hyphens=False
    )
    first, *others = lines or [""]
    return [(head + first).rstrip(), *(indent + line for line in others)]
