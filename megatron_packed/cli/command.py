"""Commands of ``megatron-packed``: their record and the decorator that makes it, errors, output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_packed.config.errors import escaped

EXIT_USAGE, EXIT_DATA, EXIT_CHECKPOINT = 2, 3, 4
"""Exit codes, the same as those of ``pretrain_hybrid.py``."""
RunCommand = Callable[[argparse.Namespace, Sequence[str]], int]
"""Function of (options of the command, flags of a run) that returns the exit code."""


@dataclass(frozen=True)
class Command:
    """Command of ``megatron-packed``.

    Args:
        name: word after ``megatron-packed``.
        help: line in the list of commands.
        description: text of its ``--help``.
        add_arguments: function that adds the options of the command to a parser.
        run: the command itself. It may raise `UsageError`.
        takes_run_flags: False if the command refuses the flags of a run.
    """

    name: str
    help: str
    description: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: RunCommand
    takes_run_flags: bool


def command(
    name: str,
    help_line: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    *,
    takes_run_flags: bool = True,
) -> Callable[[RunCommand], Command]:
    """Return a decorator that makes a `Command` of a function. Its description is the docstring of
    the module.
    """

    def make(run: RunCommand) -> Command:
        description = sys.modules[run.__module__].__doc__
        return Command(name, help_line, description, add_arguments, run, takes_run_flags)

    return make


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


def show(text: str) -> None:
    """Print text on standard output. Control characters, for example of file names, are escaped."""
    print(escaped(text))


def show_aside(text: str) -> None:
    """Print text on standard error, as `show`, without waiting for more."""
    print(escaped(text), file=sys.stderr, flush=True)
