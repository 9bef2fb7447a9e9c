"""Flags of Hugging Face trainers (Trainer, TRL, axolotl, Unsloth) and what to give in their place.

The parser refuses each of these flags with the flag of this project, or with the reason why there
is none. ``trainer_flags.json`` has the answers; its ``convert`` names a function of
``trainer_values.py``. `docs/coming_from_trainers.md` has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_packed.config import trainer_values as values
from megatron_packed.config.errors import Problem
from megatron_packed.config.table_rows import table_rows

ANOTHER = "is a flag of another trainer"
FLAG = re.compile(r"--[a-z][a-z0-9-]*[a-z0-9]")
_VALUE = "{value}"


@dataclass(frozen=True, kw_only=True)
class TrainerFlags:
    """Flags of other trainers with the same answer."""

    names: list[str]
    """The flags, without dashes and with underscores."""
    cure: str
    """Text of the cure, in which ``{value}`` stands for the converted value."""
    rule: str = ANOTHER
    """Clause that says what is wrong with the flag."""
    convert: Callable[[str], str | None]
    """Function that returns the value for this project, or None if the value needs no flag."""
    blank: str = "N"
    """Text in place of the value if no value is given."""
    without: str = "leave it out"
    """Cure for values that need no flag."""


TRAINER_FLAGS = tuple(
    TrainerFlags(**{**row, "convert": getattr(values, row["convert"]) if "convert" in row else str})
    for row in table_rows("trainer_flags.json")
)


@cache
def _by_name() -> dict[str, TrainerFlags]:
    return {name: group for group in TRAINER_FLAGS for name in group.names}


def answer(name: str, texts: Sequence[str], shown: str | None = None) -> Problem | None:
    """Return the refusal of another trainer's flag, with its cure; None for other flags.

    Args:
        name: the flag or the key, with or without dashes.
        texts: its values.
        shown: text that names the flag in the problem; ``name`` when not given.
    Example:
        ``answer("num_train_epochs", ["3"])`` has the cure ``give --train-epochs 3``.
    """
    group = _by_name().get(name.lstrip("-").lower().replace("-", "_"))
    if group is None:
        return None
    value = " ".join(texts)
    return Problem(shown or name, value, group.rule, trainer_cure(group, value))


def trainer_cure(group: TrainerFlags, value: str) -> str:
    """Return the cure for a value; an empty value leaves a placeholder."""
    if not value:
        return group.cure.replace(_VALUE, group.blank)
    converted = group.convert(value)
    return group.without if converted is None else group.cure.replace(_VALUE, converted)
