"""Command lines of a small valid run with changes, and the problems that a parser finds in them."""

from collections.abc import Mapping, Sequence

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.parser.parse import parse


def argv_of(flags: Mapping[str, str | None], change: str = "") -> list[str]:
    """Return flags with their values, with a change.

    Args:
        change: words to add; a flag takes the place of the original one, and ``~--flag`` leaves it
            out. ``^N`` is the number of processes (`processes_of`).
    """
    added = change.split()
    named = {word.lstrip("~") for word in added}
    kept = [word for flag, value in flags.items() if flag not in named for word in (flag, value)]
    return [*kept, *(word for word in added if word[0] not in "~^")]


def processes_of(change: str) -> int:
    """Return N of the word ``^N`` in a change; 1 without it."""
    return next((int(word[1:]) for word in change.split() if word.startswith("^")), 1)


def problems_of(argv: Sequence[str], world_size: int | None = None) -> tuple[Problem, ...]:
    """Return the problems of a command line; none of a valid one."""
    try:
        parse(argv, world_size)
    except ConfigError as error:
        return error.problems
    return ()
