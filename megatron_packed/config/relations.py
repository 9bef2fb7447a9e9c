"""Problems of two options of a section that need, exclude or bound each other.

A field declares its relations: ``option(..., needs=Related("load"))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_packed.config.errors import Problem, as_typed
from megatron_packed.config.options import Field, Related, several
from megatron_packed.config.sections.model_parts.divisors import divisors, nearest_multiples
from megatron_packed.config.value_checks import placeholder


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

    def problems(self, group: str | None = None) -> Iterator[Problem]:
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

    def _needs(self, field: Field) -> Iterator[Problem]:
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

    def _excludes(self, field: Field) -> Iterator[Problem]:
        for other in several(field.option.excludes):
            if self._sound(field.name, other.name) and self._is_given(other):
                shown = self._flag(other) if other.value else self._shown(other.name)
                rule = _with_reason(f"contradicts {shown}", other)
                yield self._section.problem(
                    field.name, rule, other.cure or "leave one of the two flags out"
                )

    def _bounds(self, field: Field) -> Iterator[Problem]:
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
