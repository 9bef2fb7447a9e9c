"""Errors that a command prints for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def input_failures() -> Iterator[None]:
    """Report data that cannot be used, and a checkpoint that cannot be loaded, with their exit codes.

    Raises:
        UsageError: the block raised such an error.
    """
    from megatron_packed.checkpoint.errors import CheckpointError
    from megatron_packed.data.errors import DataError

    try:
        yield
    except DataError as error:
        raise UsageError(f"data error: {error}", EXIT_DATA) from None
    except CheckpointError as error:
        raise UsageError(f"checkpoint error: {error}", EXIT_CHECKPOINT) from None


@contextmanager
def file_failures(path: Path | None = None) -> Iterator[None]:
    """Report a file that cannot be read or written, or has wrong contents.

    Args:
        path: file to name if the error names none.
    Raises:
        UsageError: the block raised `OSError` or `ValueError`.
    """
    try:
        yield
    except OSError as error:
        sentence = f"{error.filename or path}: {error.strerror}; correct the path."
        raise UsageError(sentence) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
