"""Problems of a configuration, each with its rule and its cure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MOST_SHOWN = 20
"""Maximum number of problems that a report lists."""
Fault = tuple[str, str]
"""Rule and cure of a problem, whose option and value the caller knows; see `Problem`."""
_LONGEST_VALUE, _LONGEST_SENTENCE = 200, 1000


@dataclass(frozen=True)
class Problem:
    """Problem of a configuration that the user can fix.

    Args:
        option: the flag as the user types it, e.g. ``--hidden-size``, or the wrong key or file.
        value: the given value as text; empty if a value is missing.
        rule: the rule that the value breaks, with the values of the other options involved.
        cure: what the user can do to fix the problem.
        node_dependent: True if other machines of the same run may not have this problem, for
            example with a path.
    """

    option: str
    value: str
    rule: str
    cure: str
    node_dependent: bool = False

    def __str__(self) -> str:
        return f"{self.option} {self.value}".rstrip() + f": {self.rule}; {self.cure}."


Problems = Iterator[Problem]
"""Problems that a rule finds, one after the other."""


class ConfigError(ValueError):
    """Error that lists all problems of a configuration at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def format_problems(problems: Iterable[Problem]) -> str:
    """Return the report that rank 0 prints: one numbered block per problem with option, value, rule
    and cure.
    """
    listed = list(problems)
    noun = "problem" if len(listed) == 1 else "problems"
    lines = [f"{len(listed):,} {noun} in the configuration; nothing was started."]
    for number, problem in enumerate(listed[:MOST_SHOWN], 1):
        option, value = (
            printable(text, _LONGEST_VALUE) for text in (problem.option, problem.value)
        )
        lines.append(f"{number:3}. {option} {value}".rstrip())
        lines.append(f"     rule: {printable(problem.rule, _LONGEST_SENTENCE)}")
        lines.append(f"     cure: {printable(problem.cure, _LONGEST_SENTENCE)}")
    if len(listed) > MOST_SHOWN:
        lines.append(f"     and {len(listed) - MOST_SHOWN:,} more")
    return "\n".join(lines) + "\n"


def printable(text: str, limit: int = 200) -> str:
    """Return ``text`` for a message or a log, cut at ``limit`` characters. Control characters are
    escaped, so that a text cannot imitate a line of output.
    """
    return escaped(text if len(text) <= limit else text[:limit] + "...", keep="")


def escaped(text: str, keep: str = "\n") -> str:
    """Return ``text`` with escaped control characters, except those in ``keep``.

    Names of files and of fields come from others, and could rewrite lines of a terminal.

    Example:
        ``escaped("a\\x1b[31mb")`` is ``"a\\\\x1b[31mb"``, whose escape is 4 characters.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def as_typed(value: Any) -> str:
    """Return a value as the user types it; the text is empty for a switch."""
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
