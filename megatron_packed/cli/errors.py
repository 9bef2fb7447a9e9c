"""Errors that a command prints for the user."""

from __future__ import annotations

from pathlib import Path

EXIT_USAGE, EXIT_DATA, EXIT_CHECKPOINT = 2, 3, 4
"""Exit codes, the same as those of ``pretrain_hybrid.py``."""


class UsageError(Exception):
    """Error with a sentence for standard error and an exit code."""

    def __init__(self, text: str, exit_code: int = EXIT_USAGE) -> None:
        self.exit_code = exit_code
        super().__init__(text)


def check_ending(flag: str, path: Path | str | None, ending: str) -> None:
    """Check that the name of an output file has the right ending.

    Raises:
        UsageError: the ending does not match the format of the file.
    """
    if path is not None and Path(path).suffix.lower() != ending:
        raise UsageError(
            f"{flag} {path}: give a name that ends in {ending}, the format of the file."
        )
