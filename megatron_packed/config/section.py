"""Sections: dataclasses that hold options, and the check of a whole section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from dataclasses import Field as DataclassField
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from megatron_packed.config.conditions import Condition
from megatron_packed.config.errors import ConfigError, Problem, as_typed
from megatron_packed.config.options import Field, Option, OptionType, type_of
from megatron_packed.config.relations import Relations
from megatron_packed.config.value_checks import check_value

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Callable[[type], type]:
        return lambda decorated: decorated


SectionType = TypeVar("SectionType", bound="Section")
KERNELS = "kernels"
"""Heading of the options that choose kernels."""
Sound = Callable[..., bool]
"""Function that tells a rule which fields it may use: ``sound("a", "b")`` is True if no problem was
found so far with the fields a and b. Rules between sections pass keys such as
``"model.hidden_size"``.
"""


def section_fields(section: type[Section]) -> tuple[Field, ...]:
    """Return the options of a section in the order of their declaration; they are read once per
    class.
    """
    if "option_fields" not in section.__dict__:
        section.option_fields = _read_fields(section)
    return section.option_fields


def _read_fields(section: type[Section]) -> tuple[Field, ...]:
    hints = get_type_hints(section, include_extras=True)  # looks for none, which takes less time
    options = []
    for dataclass_field in fields(section):
        option: Option = dataclass_field.metadata["option"]
        kind = type_of(hints[dataclass_field.name])
        if option.derived:
            kind = OptionType(base=kind.base, optional=True, many=kind.many)
        required = dataclass_field.default is MISSING
        default = None if required else dataclass_field.default
        options.append(Field(section.title, dataclass_field.name, kind, default, required, option))
    return tuple(options)


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Section:
    """Group of options. Classes that derive from it are dataclasses.

    Their constructor checks all fields and raises ``ConfigError`` with all problems.
    A field with a ``derived`` option may be given as None; it then holds the derived value.
    """

    def __init_subclass__(
        cls, *, title: str = "", group: str = "", only_if: Condition | tuple[Condition, ...] = ()
    ) -> None:
        """Make the class a dataclass, and set what all options that it declares have in common.

        Args:
            title: name of a complete section; empty for a base of sections.
            group: heading in the help.
            only_if: conditions before those of each option.
        """
        cls.title = title
        for declared in vars(cls).values():
            if isinstance(declared, DataclassField):
                shared = declared.metadata["option"].with_common(group, only_if)
                declared.metadata = MappingProxyType({"option": shared})
        # A base of sections needs no methods; each costs time at every start.
        complete = bool(title)
        dataclass(frozen=True, kw_only=True, init=complete, repr=complete, eq=complete)(cls)

    title: ClassVar[str] = ""
    option_fields: ClassVar[tuple[Field, ...]] = ()

    def __post_init__(self) -> None:
        problems = problems_of(self)
        if problems:
            raise ConfigError(problems)

    def derive(self, sound: Sound) -> dict[str, Any]:
        """Return values for the derived fields whose source fields are ``sound``."""
        options = {field.name: field.option for field in section_fields(type(self))}
        return {
            name: option.derive(self)
            for name, option in options.items()
            if option.derive is not None and sound(*option.derived_from)
        }

    def rules(self, sound: Sound) -> Iterator[Problem]:
        """Yield problems between the fields of this section."""
        yield from self.related(sound)

    def related(self, sound: Sound, group: str | None = None) -> Iterator[Problem]:
        """Yield problems of the declared relations between fields, of one group or of all."""
        yield from Relations(self, section_fields(type(self)), sound).problems(group)

    def problem(self, name: str, rule: str, cure: str, *, node_dependent: bool = False) -> Problem:
        """Return a problem of the value of a field; see `Problem`."""
        return Problem(self.flag(name), as_typed(getattr(self, name)), rule, cure, node_dependent)

    def flag(self, name: str) -> str:
        """Return the flag of a field, for messages."""
        return next(f.flag for f in section_fields(type(self)) if f.name == name)


def unchecked(section: type[SectionType], values: Mapping[str, Any]) -> SectionType:
    """Return an unchecked section with ``values`` and defaults, so that all its problems can be
    collected.
    """
    made = object.__new__(section)
    for field in section_fields(section):
        object.__setattr__(made, field.name, values.get(field.name, field.default))
    return made


def value_when_not_given(section: Section, field: Field) -> Any:
    """Return the value that an option of a section has when it is not given."""
    if not field.option.derived:
        return field.default
    without = unchecked(type(section), {**vars(section), field.name: None})
    return without.derive(lambda *names: True).get(field.name)


def problems_of(section: Section, unsound: set[str] | None = None) -> list[Problem]:
    """Check one section: types, choices and bounds of each field, then derived values, then the
    section's own rules.

    Args:
        section: changed in place: derived fields are set and lists become tuples.
        unsound: names of fields that are known to be wrong; wrong fields found now are added.
    """
    wrong_names = set() if unsound is None else unsound
    all_problems = []
    for field in section_fields(type(section)):
        if field.name in wrong_names:
            continue
        value, problems = check_value(field, getattr(section, field.name))
        object.__setattr__(section, field.name, value)
        if problems:
            wrong_names.add(field.name)
            all_problems.extend(problems)

    def sound(*names: str) -> bool:
        return not wrong_names.intersection(names)

    for name, value in section.derive(sound).items():
        if getattr(section, name) is None:
            object.__setattr__(section, name, value)
    # Rules cannot use a derived field whose value could not be derived.
    for field in section_fields(type(section)):
        if field.option.derived and getattr(section, field.name) is None:
            wrong_names.add(field.name)
    all_problems.extend(section.rules(sound))
    return all_problems
