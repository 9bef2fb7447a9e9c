"""Errors of commands, for a person to read."""

from __future__ import annotations

from pathlib import Path

EXIT_USAGE, EXIT_DATA, EXIT_CHECKPOINT = 2, 3, 4
"""As of ``pretrain_hybrid.py``."""


class UsageError(Exception):
    """A sentence for standard error, and the exit code that goes with it."""

    def __init__(self, text: str, exit_code: int = EXIT_USAGE) -> None:
        self.exit_code = exit_code
        super().__init__(text)


def check_ending(flag: str, path: Path | str | None, ending: str) -> None:
    """
    Raises:
        UsageError: a file is named that would hold something else than its name says.
    """
    if path is not None and Path(path).suffix.lower() != ending:
        raise UsageError(
            f"{flag} {path}: give a name that ends in {ending}, which is what is written."
        )
