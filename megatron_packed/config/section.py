"""Sections: the dataclasses that hold options, and how one is checked whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.options import Field, Option, OptionType, type_of
from megatron_packed.config.value_checks import check_value

SectionType = TypeVar("SectionType", bound="Section")
Sound = Callable[..., bool]  # sound("a", "b"): no problem was found yet with the fields a and b


def section_fields(section: type[Section]) -> tuple[Field, ...]:
    """The options of a section in the order of their declaration; read once per class."""
    if "described" not in section.__dict__:
        section.described = _read_fields(section)
    return section.described


def _read_fields(section: type[Section]) -> tuple[Field, ...]:
    hints = get_type_hints(section)
    found = []
    for declared in fields(section):
        described: Option = declared.metadata["option"]
        kind = type_of(hints[declared.name])
        if described.derived:
            kind = OptionType(base=kind.base, optional=True, many=kind.many)
        required = declared.default is MISSING
        default = None if required else declared.default
        found.append(Field(section.title, declared.name, kind, default, required, described))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of options. Making one checks it whole and raises ``ConfigError`` with every problem
    found.

    Fields whose option is ``derived`` may be given as None and hold the derived value afterwards.
    """

    def __init_subclass__(cls, *, title: str = "", **_: Any) -> None:
        cls.title = title

    title: ClassVar[str] = ""
    described: ClassVar[tuple[Field, ...]] = ()

    def __post_init__(self) -> None:
        found = problems_of(self)
        if found:
            raise ConfigError(found)

    def derive(self, sound: Sound) -> dict[str, Any]:
        """Values for derived fields that are None, as far as the fields they come from are
        ``sound``.
        """
        return {}

    def rules(self, sound: Sound) -> Iterator[Problem]:
        """Problems between the fields of this section."""
        yield from ()

    def flag(self, name: str) -> str:
        """The flag of a field, for messages."""
        return next(f.flag for f in section_fields(type(self)) if f.name == name)


def unchecked(section: type[SectionType], values: Mapping[str, Any]) -> SectionType:
    """A section that holds ``values`` and defaults, right or wrong, so that all problems can be
    collected.
    """
    made = object.__new__(section)
    for described in section_fields(section):
        object.__setattr__(made, described.name, values.get(described.name, described.default))
    return made


def problems_of(section: Section, unsound: set[str] | None = None) -> list[Problem]:
    """Check one section: types, choices and bounds of each field, then derived values, then the
    section's own rules.

    Args:
        section: its derived fields are filled in and lists become tuples, in place, before anybody
        else sees it.
        unsound: names of fields already known to be wrong; the names found here are added.
    """
    wrong = set() if unsound is None else unsound
    found = []
    for described in section_fields(type(section)):
        if described.name in wrong:
            continue
        value, problems = check_value(described, getattr(section, described.name))
        object.__setattr__(section, described.name, value)
        if problems:
            wrong.add(described.name)
            found.extend(problems)

    def sound(*names: str) -> bool:
        return not wrong.intersection(names)

    for name, value in section.derive(sound).items():
        if getattr(section, name) is None:
            object.__setattr__(section, name, value)
    for described in section_fields(
        type(section)
    ):  # a derived field that could not be derived is no basis for rules
        if described.option.derived and getattr(section, described.name) is None:
            wrong.add(described.name)
    found.extend(section.rules(sound))
    return found
