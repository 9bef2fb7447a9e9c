"""Sections: dataclasses that hold options, the check of a whole section, and the relations of its options.

Two options of a section may need, exclude or bound each other. A field declares its relations:
``option(..., needs=Related("load"))``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from dataclasses import Field as DataclassField
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from megatron_packed.config.conditions import Condition
from megatron_packed.config.errors import ConfigError, Problem, Problems, as_typed
from megatron_packed.config.options import Field, Option, OptionType, Related, several, type_of
from megatron_packed.config.sections.model_parts.divisors import divisors, nearest_multiples
from megatron_packed.config.value_checks import check_value, placeholder

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

    def rules(self, sound: Sound) -> Problems:
        """Yield problems between the fields of this section."""
        yield from self.related(sound)

    def related(self, sound: Sound, group: str | None = None) -> Problems:
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


class Relations:
    """Relations of the options of one section.

    Args:
        section: section with its values.
        fields: options of the section.
        sound: see `Sound`.
    """

    def __init__(self, section: Any, fields: Sequence[Field], sound: Callable[..., bool]) -> None:
        self._section = section
        self._fields = {field.name: field for field in fields}
        self._sound = sound

    def problems(self, group: str | None = None) -> Problems:
        """Yield the problems of all options, or of those with this heading of the help."""
        for field in self._fields.values():
            if group not in (None, field.option.group):
                continue
            other = field.option.required_with
            if self._is_given(Related(field.name)):
                yield from self._needs(field)
                yield from self._excludes(field)
            elif (
                other is not None and self._sound(field.name, other.name) and self._is_given(other)
            ):
                cure = f"give {self._flag_with_placeholder(field.name)}"
                yield Problem(field.flag, "", f"is required with {self._flag(other)}", cure)
            if self._value(field.name) is not None:
                yield from self._bounds(field)

    def _needs(self, field: Field) -> Problems:
        needed = several(field.option.needs)
        missing = [each for each in needed if not self._is_given(each)]
        if missing and self._sound(field.name, *(each.name for each in needed)):
            flags = " and ".join(map(self._flag, needed))
            missing_flags = " ".join(
                self._flag(each) if each.value else self._flag_with_placeholder(each.name)
                for each in missing
            )
            rule = _with_reason(f"needs {flags}", missing[0])
            cure = missing[0].cure or f"add {missing_flags}, or leave it out"
            yield self._section.problem(field.name, rule, cure)

    def _excludes(self, field: Field) -> Problems:
        for other in several(field.option.excludes):
            if self._sound(field.name, other.name) and self._is_given(other):
                shown = self._flag(other) if other.value else self._shown(other.name)
                rule = _with_reason(f"contradicts {shown}", other)
                yield self._section.problem(
                    field.name, rule, other.cure or "leave one of the two flags out"
                )

    def _bounds(self, field: Field) -> Problems:
        value, declared = self._value(field.name), field.option
        if (bound := self._bound(field, declared.multiple_of)) and value % bound:
            rule = f"must be a multiple of {self._shown(declared.multiple_of)}"
            yield self._section.problem(field.name, rule, nearest_multiples(value, bound))
        if (bound := self._bound(field, declared.divides)) and bound % value:
            rule = f"must divide {self._shown(declared.divides)}"
            yield self._section.problem(field.name, rule, f"choose from {divisors(bound)}")
        bound = self._bound(field, declared.at_most)
        if bound is not None and value > bound:
            cure = f"give {declared.minimum:g} to {bound}"
            other = self._fields[declared.at_most].flag
            rule = f"must be at most {self._shown(declared.at_most)}"
            yield self._section.problem(field.name, rule, f"{cure}, or raise {other}")

    def _bound(self, field: Field, name: str) -> Any:
        """Return the number of the option with this name; None if it bounds nothing."""
        return self._value(name) if name and self._sound(field.name, name) else None

    def _shown(self, name: str) -> str:
        value, flag = self._value(name), self._fields[name].flag
        if isinstance(value, (bool, str)):
            return f"{flag} {as_typed(value)}".rstrip()
        return f"{flag} ({as_typed(value)})"

    def _value(self, name: str) -> Any:
        return getattr(self._section, name)

    def _flag(self, related: Related) -> str:
        return f"{self._fields[related.name].flag} {related.value}".rstrip()

    def _flag_with_placeholder(self, name: str) -> str:
        return f"{self._fields[name].flag} {placeholder(self._fields[name])}".rstrip()

    def _is_given(self, related: Related) -> bool:
        value = self._value(related.name)
        if related.value:
            return bool(value == related.value)
        return value not in (None, self._fields[related.name].default)


def _with_reason(rule: str, related: Related) -> str:
    return f"{rule}: {related.why}" if related.why else rule
