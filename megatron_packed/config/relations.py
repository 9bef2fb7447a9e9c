"""Problems of two options of a section that need, exclude or bound each other.

A field declares its relations: ``option(..., needs=Related("load"))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Field, Related
from megatron_packed.config.sections.model_parts.divisors import divisors, nearest_multiples
from megatron_packed.config.value_checks import placeholder


class Relations:
    """Relations of the options of one section.

    Args:
        section: section with its values.
        fields: options of the section.
        sound: see `Sound`.
    """

    def __init__(self, section: Any, fields: Sequence[Field], sound: Any) -> None:
        self._section = section
        self._fields = {field.name: field for field in fields}
        self._sound = sound

    def problems(self, group: str | None = None) -> Iterator[Problem]:
        """Yield the problems of all options, or of those with this heading of the help."""
        for field in self._fields.values():
            if group in (None, field.option.group) and self._value(field.name) is not None:
                if self._is_given(field.name):
                    yield from self._needs(field)
                    yield from self._excludes(field)
                yield from self._bounds(field)

    def _needs(self, field: Field) -> Iterator[Problem]:
        needed = _several(field.option.needs)
        missing = [each for each in needed if not self._is_given(each.name)]
        if missing and self._sound(field.name, *(each.name for each in needed)):
            flags = " and ".join(self._fields[each.name].flag for each in needed)
            others = (self._fields[each.name] for each in missing)
            words = " ".join(f"{other.flag} {placeholder(other)}".rstrip() for other in others)
            rule = _with_reason(f"needs {flags}", missing[0])
            yield self._problem(field, rule, f"add {words}, or leave it out")

    def _excludes(self, field: Field) -> Iterator[Problem]:
        for other in _several(field.option.excludes):
            if self._sound(field.name, other.name) and self._is_given(other.name):
                rule = _with_reason(f"contradicts {self._shown(other.name)}", other)
                yield self._problem(field, rule, other.cure or "leave one of the two flags out")

    def _bounds(self, field: Field) -> Iterator[Problem]:
        value, declared = self._value(field.name), field.option
        if (bound := self._bound(field, declared.multiple_of)) and value % bound:
            rule = f"must be a multiple of {self._shown(declared.multiple_of)}"
            yield self._problem(field, rule, nearest_multiples(value, bound))
        if (bound := self._bound(field, declared.divides)) and bound % value:
            rule = f"must divide {self._shown(declared.divides)}"
            yield self._problem(field, rule, f"choose from {divisors(bound)}")
        bound = self._bound(field, declared.at_most)
        if bound is not None and value > bound:
            cure = f"give {declared.minimum:g} to {bound}"
            other = self._fields[declared.at_most].flag
            rule = f"must be at most {self._shown(declared.at_most)}"
            yield self._problem(field, rule, f"{cure}, or raise {other}")

    def _bound(self, field: Field, name: str) -> Any:
        """Return the number of the option with this name; None if it bounds nothing."""
        return self._value(name) if name and self._sound(field.name, name) else None

    def _problem(self, field: Field, rule: str, cure: str) -> Problem:
        return Problem(field.flag, _text(self._value(field.name)), rule, cure)

    def _shown(self, name: str) -> str:
        text = _text(self._value(name))
        return f"{self._fields[name].flag} ({text})" if text else self._fields[name].flag

    def _value(self, name: str) -> Any:
        return getattr(self._section, name)

    def _is_given(self, name: str) -> bool:
        return self._value(name) not in (None, self._fields[name].default)


def _several(related: Related | tuple[Related, ...]) -> tuple[Related, ...]:
    return (related,) if isinstance(related, Related) else related


def _with_reason(rule: str, related: Related) -> str:
    return f"{rule}: {related.why}" if related.why else rule


def _text(value: Any) -> str:
    """Return a value as the user types it; the text is empty for a switch."""
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
