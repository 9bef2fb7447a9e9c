"""Options: dataclass fields that know their flag, their help, their limits and why they differ from
Megatron.

A field made with ``option(...)`` is all it takes to add a flag: parser, help, configuration file,
checks, serialisation and documentation read the field. The dataclasses that hold options are
sections, see ``section.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

Default = TypeVar("Default")
Value = bool | int | float | str
"""One value of an option; an option may also hold a tuple of them, or None."""
PathUse = Literal[
    "input_file",
    "input_data",
    "data_args",
    "input_directory",
    "output_file",
    "output_directory",
    "log_file",
]


@dataclass(frozen=True, kw_only=True)
class Option:
    """Description of a field, as ``option()`` and its two companions record it.

    Args:
        help: one sentence: what it does.
        unit: unit of the value, shown in the help.
        group: heading within the section, for the help.
        flag: spelling without the dashes when it is not the field name with ``-`` for ``_``.
        negated: the flag turns the field off (Megatron's ``--disable-bias-linear``).
        aliases, deprecated: other spellings; a deprecated one gives a warning line.
        shorthands: deprecated flags without a value, each with the value that it stands for.
        empty_word: of an option with several values: the word for none of them (``auto``).
        bare: the value when the flag is given without one.
        choices: the only values; ``value_aliases``: other words for some of them; ``not_built``:
            values of Megatron that are refused by name, each with what to use instead.
        minimum, above, maximum, below: bounds, inclusive and exclusive.
        path: the value is a path that is read or written, checked before anything starts.
        derived: the value that ``None`` stands for, in words; see `derived_option`.
        megatron: (Megatron's default, why ours differs), shown in the documentation.
        training_only: a model field that changes how weights are learned but not what they mean.
    """

    help: str
    unit: str = ""
    group: str = ""
    flag: str = ""
    negated: bool = False
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()
    shorthands: Mapping[str, Value] | None = None
    empty_word: str = ""
    bare: tuple[int, ...] | None = None
    choices: tuple[str, ...] = ()
    value_aliases: Mapping[str, str] | None = None
    not_built: Mapping[str, str] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    derived: str = ""
    path: PathUse | None = None
    megatron: tuple[str, str] | None = None
    training_only: bool = False


def option(
    default: Default,
    help: str,
    *,
    unit: str = "",
    group: str = "",
    flag: str = "",
    negated: bool = False,
    aliases: tuple[str, ...] = (),
    deprecated: tuple[str, ...] = (),
    shorthands: Mapping[str, Value] | None = None,
    empty_word: str = "",
    bare: tuple[int, ...] | None = None,
    choices: tuple[str, ...] = (),
    value_aliases: Mapping[str, str] | None = None,
    not_built: Mapping[str, str] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    path: PathUse | None = None,
    megatron: tuple[str, str] | None = None,
    training_only: bool = False,
) -> Default:
    """Return a dataclass field with its flag; `Option` describes the arguments.

    The field's type is that of the default, its value when nothing is given.
    """
    described = Option(
        help=help,
        unit=unit,
        group=group,
        flag=flag,
        negated=negated,
        aliases=aliases,
        deprecated=deprecated,
        shorthands=shorthands,
        empty_word=empty_word,
        bare=bare,
        choices=choices,
        value_aliases=value_aliases,
        not_built=not_built,
        minimum=minimum,
        above=above,
        maximum=maximum,
        below=below,
        path=path,
        megatron=megatron,
        training_only=training_only,
    )
    return field(default=default, metadata={"option": described})


def required_option(
    help: str,
    *,
    unit: str = "",
    group: str = "",
    deprecated: tuple[str, ...] = (),
    minimum: float | None = None,
) -> Any:
    """Return a field without a default; see `option`. Its type is the annotation's."""
    described = Option(help=help, unit=unit, group=group, deprecated=deprecated, minimum=minimum)
    return field(metadata={"option": described})


def derived_option(
    help: str,
    *,
    derived: str,
    unit: str = "",
    group: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
) -> Any:
    """Return a field whose None the section replaces when it is made; see `option`.

    Its type is the annotation's, without None.

    Args:
        derived: the value that ``None`` stands for, in words.
    """
    described = Option(
        help=help, unit=unit, group=group, choices=choices, minimum=minimum, derived=derived
    )
    return field(default=None, metadata={"option": described})


@dataclass(frozen=True)
class OptionType:
    """The type of an option: one of int, float, bool, str; perhaps None, perhaps several."""

    base: type
    optional: bool
    many: bool

    @property
    def word(self) -> str:
        return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[
            self.base
        ]


@dataclass(frozen=True)
class Field:
    """One option of one section, as everything that is generated from it sees it."""

    section: str
    name: str
    kind: OptionType
    default: Any
    required: bool
    option: Option

    @property
    def flag(self) -> str:
        """The spelling shown to people, e.g. ``--disable-bias-linear``."""
        return "--" + (self.option.flag or self.name.replace("_", "-"))

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def switches(self) -> dict[str, bool]:
        """For a boolean, every spelling that takes no value and what it sets; the spelling shown
        comes first.
        """
        plain = self.name.replace("_", "-")
        spelled = {self.flag: not self.option.negated}
        for other in (*self.option.aliases, *self.option.deprecated):
            spelled.setdefault("--" + other, not self.option.negated)
        spelled.setdefault("--" + plain, True)
        spelled.setdefault("--no-" + plain, False)
        return spelled

    @property
    def spellings(self) -> tuple[str, ...]:
        if self.kind.base is bool:
            return tuple(self.switches)
        short = ("--" + other for other in self.option.shorthands or ())
        return (
            self.flag,
            *short,
            *("--" + other for other in (*self.option.aliases, *self.option.deprecated)),
        )


def type_of(annotation: Any) -> OptionType:
    arms = [arm for arm in get_args(annotation) if arm is not type(None)]
    if get_origin(annotation) is tuple:
        return OptionType(base=arms[0], optional=False, many=True)
    if get_origin(annotation) in (Union, type(int | None)):
        inner = type_of(arms[0])
        return OptionType(base=inner.base, optional=True, many=inner.many)
    return OptionType(base=annotation, optional=False, many=False)
