"""Definition of options: dataclass fields with their flag, help, limits, and difference from
Megatron.

To add a flag, add a field made with ``option(...)``. Parser, help, configuration file, checks,
serialisation and documentation all read the field. Sections are the dataclasses that hold options,
see ``section.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

Default = TypeVar("Default")
Value = bool | int | float | str
"""Value of an option; an option may also hold a tuple of values, or None."""
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
    """Description of an option, stored in its dataclass field by ``option()``,
    ``required_option()`` or ``derived_option()``.

    Args:
        help: effect of the option, in one or a few sentences.
        unit: unit of the value, shown in the help.
        group: heading within the section, for the help.
        flag: spelling without the dashes, if it differs from the field name with ``-`` for ``_``.
        negated: True if the flag turns the field off (Megatron's ``--disable-bias-linear``).
        aliases, deprecated: other spellings; a deprecated spelling prints a warning.
        shorthands: deprecated flags without a value, each with the value that it sets.
        empty_word: for an option with several values, the word for an empty list (``auto``).
        word: for an option with a number, a word that may be given in its place (``best``).
        bare: the value of the flag when it is given without a value.
        choices: the allowed values.
        value_aliases: other words for some of the choices.
        not_built: values of Megatron that are refused by name, each with the cure.
        minimum, maximum: inclusive bounds.
        above, below: exclusive bounds.
        path: use of a value that is a path; the path is checked before a run starts.
        derived: description of the value that replaces ``None``; see `derived_option`.
        megatron: (Megatron's default, reason why this project's differs), for the documentation.
        training_only: True for a model field that affects how weights are trained, but not the
            function that they compute.
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
    word: str = ""
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
    word: str = "",
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

    The declared type of the field is the type of ``default``. ``default`` is also the value when
    the flag is not given.
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
        word=word,
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
    """Return a field that must be given; see `option`. The type of its values is the type of the
    annotation."""
    described = Option(help=help, unit=unit, group=group, deprecated=deprecated, minimum=minimum)
    return field(metadata={"option": described})


def derived_option(
    help: str,
    *,
    derived: str,
    unit: str = "",
    group: str = "",
    choices: tuple[str, ...] = (),
    value_aliases: Mapping[str, str] | None = None,
    not_built: Mapping[str, str] | None = None,
    minimum: float | None = None,
    megatron: tuple[str, str] | None = None,
) -> Any:
    """Return a field whose section replaces None by a derived value; see `option`.

    The type of its values is the type of the annotation, without None.

    Args:
        derived: description of the value that replaces ``None``.
    """
    described = Option(
        help=help,
        unit=unit,
        group=group,
        choices=choices,
        value_aliases=value_aliases,
        not_built=not_built,
        minimum=minimum,
        derived=derived,
        megatron=megatron,
    )
    return field(default=None, metadata={"option": described})


@dataclass(frozen=True)
class OptionType:
    """Type of an option: int, float, bool or str, optionally None, optionally several values."""

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
    """Option of a section, as the parser, the help and the documentation use it."""

    section: str
    name: str
    kind: OptionType
    default: Any
    required: bool
    option: Option

    @cached_property  # each check of a value reads it
    def flag(self) -> str:
        """Spelling that is shown to users, e.g. ``--disable-bias-linear``."""
        return "--" + (self.option.flag or self.name.replace("_", "-"))

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def switches(self) -> dict[str, bool]:
        """Spellings of a boolean option that take no value, each with the value that it sets. The
        first is the spelling shown to users.
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
