"""Outcome of each flag of a Megatron-LM command line in this project."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.megatron.differences import differences
from megatron_packed.config.megatron.flags import REFUSAL_OF, TAKEN
from megatron_packed.config.megatron.model_config_file import VARIABLE
from megatron_packed.config.parser.command_line import (
    META_FLAGS,
    Occurrence,
    read_command_line,
    spellings,
)
from megatron_packed.config.parser.help_text import default_text
from megatron_packed.config.parser.parse import parse_with_sources
from megatron_packed.config.run import every_field
from megatron_packed.config.sections.model import ModelConfig


class FlagOutcome(Enum):
    """Meaning of a flag of Megatron-LM in this project."""

    SAME = "same"
    """The flag means the same."""
    ACCEPTED = "accepted"
    """The trained model is the same with or without the flag."""
    DIFFERENT = "different"
    """The flag is taken, and the table Different names its difference."""
    OPEN = "open"
    """The value comes from a variable that is not set."""
    REFUSED = "refused"
    """The flag or its value is refused."""


@dataclass(frozen=True)
class Use:
    """Occurrence of a flag on a line.

    Args:
        reason: sentence for every outcome except SAME.
    """

    flag: str
    texts: tuple[str, ...]
    outcome: FlagOutcome
    reason: str = ""

    @property
    def known(self) -> bool:
        """True if the flag is accepted or refused by name."""
        return self.flag in spellings() or self.flag in TAKEN or self.flag in REFUSAL_OF


@dataclass(frozen=True)
class LineOutcome:
    """Outcome of a line.

    Args:
        uses: all occurrences of flags, in order.
        missing: problems that no given flag has, for example a missing ``--lr``.
    """

    uses: tuple[Use, ...]
    missing: tuple[Problem, ...]

    @property
    def taken(self) -> bool:
        """True if the line trains as it is, once its variables have values."""
        return not self.missing and not self.refused

    @property
    def refused(self) -> list[Use]:
        return [use for use in self.uses if use.outcome is FlagOutcome.REFUSED]


@cache
def _differing() -> dict[str, str]:
    """Return the flags whose given value has another meaning. Another default changes nothing."""
    return {
        flag: f"Megatron-LM: {theirs}; here: {ours}"
        for flag, theirs, ours, _ in differences()
        if flag not in spellings() or spellings()[flag].field.option.megatron is None
    }


def other_defaults(uses: Iterable[Use]) -> Iterator[tuple[str, str]]:
    """Yield flags of the model that are not given and have another default, with a sentence."""
    given_flags = {name for use in uses for name in _names(use.flag)}
    for field in every_field():
        theirs = field.option.megatron
        of_model = field.section == ModelConfig.title
        if theirs is not None and of_model and field.flag not in given_flags:
            sentence = f"Megatron-LM: {theirs[0]}; here: {default_text(field)}; {theirs[1]}"
            yield field.flag, sentence


_SPLIT = ("--split", "969,30,1")
"""Default of Megatron-LM. Without ``--split``, this project trains on all data."""
_VALIDATION = ("--split", "--valid-data-path", "--data-args-path", "--per-split-data-args-path")
"""Flags that decide on the validation data."""


def split_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return Megatron-LM's split if a line validates and does not say on which data."""
    validates = "--data-path" in arguments and "--eval-interval" in arguments
    return _SPLIT if validates and not any(flag in arguments for flag in _VALIDATION) else ()


def line_outcome(arguments: Sequence[str], world_size: int | None = None) -> LineOutcome:
    """Return the outcome of each flag of a line.

    Paths and this machine are not checked.

    Args:
        words: flags and values; variables without a value are ``${NAME}``.
        world_size: number of processes; by default the smallest number for the layout.
    """
    problems: list[Problem] = []
    occurrences = read_command_line(arguments, problems)
    accepted: dict[str, str] = {}
    try:
        accepted = dict(parse_with_sources(arguments, world_size, on_this_machine=False).always)
    except ConfigError as error:
        problems += error.problems
    by_option: dict[str, Problem] = {}
    for problem in problems:
        by_option.setdefault(problem.option, problem)
    uses = tuple(_use(occurrence, by_option, accepted) for occurrence in occurrences)
    given_flags = {name for use in uses for name in _names(use.flag)}
    missing = [problem for problem in by_option.values() if problem.option not in given_flags]
    return LineOutcome(uses, tuple(missing))


def _use(occurrence: Occurrence, problems: dict[str, Problem], accepted: dict[str, str]) -> Use:
    flag, texts = occurrence.flag, occurrence.texts
    if flag in META_FLAGS or flag == "-h":
        return Use(flag, texts, FlagOutcome.REFUSED, "is no flag of Megatron-LM; leave it out")
    problem = next((problems[name] for name in _names(flag) if name in problems), None)
    if problem is not None and _open(flag, texts):
        return Use(flag, texts, FlagOutcome.OPEN, "the value comes from a variable that is not set")
    if problem is not None:
        return Use(flag, texts, FlagOutcome.REFUSED, f"{problem.rule}; {problem.cure}")
    if flag in TAKEN:
        return Use(flag, texts, FlagOutcome.ACCEPTED, accepted.get(flag, TAKEN[flag].reason))
    if flag in _differing():
        return Use(flag, texts, FlagOutcome.DIFFERENT, _differing()[flag])
    return Use(flag, texts, FlagOutcome.SAME)


def _open(flag: str, texts: tuple[str, ...]) -> bool:
    """Return whether a value cannot be checked before its variable is set. A path or another text
    can be checked.
    """
    spelling = spellings().get(flag)
    if spelling is None or not any(VARIABLE.search(text) for text in texts):
        return False
    return spelling.field.kind.base is not str or bool(spelling.field.option.choices)


def _names(flag: str) -> tuple[str, ...]:
    """Return the names by which a problem may call a flag."""
    spelling = spellings().get(flag)
    return (flag,) if spelling is None else (flag, spelling.field.flag)
