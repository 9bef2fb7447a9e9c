"""Registry of all options, by flag and by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_packed.config.options import Field
from megatron_packed.config.run import every_field

META_FLAGS: dict[str, str] = {
    "--config": "Read options from a YAML file; flags override them.",
    "--print-config": "Print all values and their origins, and exit.",
    "--explain": "Print which features are on, off or partly on with these options on this "
    "machine, with reasons, and exit.",
    "--help": "Print the flags of a first run, and exit (also -h).",
    "--help-all": "Print every flag with its default, unit and choices, and exit.",
    "--version": "Print the version, and exit.",
}


@dataclass(frozen=True)
class Spelling:
    """Meaning of one spelling of a flag.

    Args:
        field: the option.
        sets: for a flag that takes no value, the value it sets.
        deprecated: True if users should write `preferred` instead.
    """

    field: Field
    sets: Any = None
    deprecated: bool = False

    @property
    def preferred(self) -> str:
        """Spelling to use instead of a deprecated spelling."""
        shorthand = self.sets is not None and self.field.kind.base is not bool
        return f"{self.field.flag} {self.sets}" if shorthand else self.field.flag


@cache
def spellings() -> Mapping[str, Spelling]:
    """Return every flag that sets an option, with its meaning."""
    by_spelling: dict[str, Spelling] = {}
    for field in every_field():
        short = {"--" + name: value for name, value in (field.option.shorthands or {}).items()}
        old = {*short, *("--" + name for name in field.option.deprecated)}
        for spelling in field.spellings:
            assert spelling not in by_spelling, f"{spelling} names two options"
            sets = field.switches[spelling] if field.kind.base is bool else short.get(spelling)
            by_spelling[spelling] = Spelling(field, sets, spelling in old)
    return by_spelling


def usable_flags() -> list[str]:
    """Return every flag that is accepted; error messages suggest the nearest."""
    from megatron_packed.config.megatron.flags import TAKEN

    return [*spellings(), *META_FLAGS, *TAKEN]


def known_flags() -> set[str]:
    """Return every flag that is accepted or refused by name."""
    from megatron_packed.config.megatron.flags import REFUSAL_OF

    return {*usable_flags(), *REFUSAL_OF}
