"""Commands of ``megatron-packed``: their record, and the decorator that makes it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
