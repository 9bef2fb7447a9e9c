"""Definition of options: dataclass fields with their flag, help, limits, and difference from
Megatron.

To add a flag, add a field made with ``option(...)``. Parser, help, configuration file, checks,
serialisation and documentation all read the field. Sections are the dataclasses that hold options,
see ``section.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from megatron_packed.config.conditions import Condition

Default = TypeVar("Default")
Item = TypeVar("Item")
P = ParamSpec("P")
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

Decided = Literal[
    "data",
    "chat",
    "tokenizer",
    "tokenizer name",
    "packs",
    "trained parameters",
    "optimizer state",
]
"""Subject that an option decides: training documents, tokens of conversations and text, the meaning
of token ids, the name of their tokenizer, or contents and order of packs. It may also be the trained
parameters, or data types of the optimizer's state.
"""
Stored = Mapping[str, Mapping[str, Any]]
"""Configuration in a checkpoint, as `serialise.to_dict` makes it; older checkpoints lack newer
options.
"""


def several(items: Item | tuple[Item, ...]) -> tuple[Item, ...]:
    """Return one item, or a tuple of items, as a tuple."""
    return items if isinstance(items, tuple) else (items,)


@dataclass(frozen=True)
class Related:
    """Option that another option of its section needs or excludes.

    Args:
        name: field of this option.
        value: value that this option has; any but its default when empty.
        why: reason, as the end of a rule.
        cure: cure of a problem, if it is not the usual one.
    """

    name: str
    why: str = ""
    _: KW_ONLY
    value: str = ""
    cure: str = ""


@dataclass(frozen=True)
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
        value_notes: for a word of `value_aliases` that asks for something else, the clause that a
            run prints when it takes the choice instead.
        not_built: values of Megatron that are refused by name, each with the cure.
        minimum, maximum: inclusive bounds.
        above, below: exclusive bounds.
        path: use of a value that is a path; the path is checked before a run starts.
        derived: description of the value that replaces ``None``; see `derived_option`.
        derive: function of the section that returns this value, or None if there is none.
        derived_from: fields that the function uses.
        megatron: (Megatron's default, reason why this project's differs), for the documentation.
        training_only: True for a model field that affects how weights are trained, but not the
            function that they compute.
        resume: subject that the option decides for a run that goes on from a checkpoint. A run with
            another value is refused unless it begins a phase; a phase keeps the tokenizer and the
            trained parameters. A tokenizer that was moved may have another ``tokenizer name``.
        phase: True for an option of the model that a new phase may change.
        earlier: function that returns the value of runs before the option existed, from the stored
            configuration of such a run. A run without the flag takes the stored value.
        required_with: option with which this one must be given.
        needs: options without which this one is refused.
        excludes: options beside which this one is refused.
        multiple_of, divides, at_most: name of an option whose number bounds this number.
        zero_is_off: True for a number of which 0 requests nothing.
        only_if: condition, or conditions, without which the option has no effect. A run prints the
            reason of the first condition that does not hold. If an option requests other numbers,
            another backend or another output than the run gives, a rule refuses it instead.
    """

    help: str
    _: KW_ONLY
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
    value_notes: Mapping[str, str] | None = None
    not_built: Mapping[str, str] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    derived: str = ""
    derive: Callable[[Any], Any] | None = None
    derived_from: tuple[str, ...] = ()
    path: PathUse | None = None
    megatron: tuple[str, str] | None = None
    training_only: bool = False
    resume: Decided | None = None
    phase: bool = False
    earlier: Callable[[Stored], Any] | None = None
    required_with: Related | None = None
    needs: Related | tuple[Related, ...] = ()
    excludes: Related | tuple[Related, ...] = ()
    multiple_of: str = ""
    divides: str = ""
    at_most: str = ""
    zero_is_off: bool = False
    only_if: Condition | tuple[Condition, ...] = ()

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions of `only_if`, in order."""
        return several(self.only_if)

    def other_meaning(self, value: object) -> str:
        """Return a clause on a word that is taken as another choice; empty for other values."""
        if not isinstance(value, str) or value not in (self.value_notes or {}):
            return ""
        assert self.value_notes is not None and self.value_aliases is not None
        return f"is taken as {self.value_aliases[value]}: {self.value_notes[value]}"

    def with_common(self, group: str, only_if: Condition | tuple[Condition, ...]) -> Option:
        """Return the option with the group and the conditions of its class, beside its own."""
        both = copy(self)  # `replace` would take a tenth of the start of the command line
        object.__setattr__(both, "group", self.group or group)
        object.__setattr__(both, "only_if", (*several(only_if), *self.conditions))
        return both


def _field_maker(describe: Callable[P, Option], **field_arguments: Any) -> Callable[P, Any]:
    """Return a function that makes a dataclass field from the arguments of `Option`."""

    def make(*args: P.args, **attributes: P.kwargs) -> Any:
        return field(metadata={"option": describe(*args, **attributes)}, **field_arguments)

    return make


def _field_maker_with_default(
    describe: Callable[P, Option],
) -> Callable[Concatenate[Default, P], Default]:
    """Return a function that makes a dataclass field from its default and the arguments of `Option`.

    The declared type of the field is the type of the default.
    """

    def make(default: Default, /, *args: P.args, **attributes: P.kwargs) -> Default:
        return field(default=default, metadata={"option": describe(*args, **attributes)})

    return make


option = _field_maker_with_default(Option)
"""Return a dataclass field with its flag, from the value without the flag and arguments of `Option`."""
required_option = _field_maker(Option)
"""Return a field that must be given, from arguments of `Option`; the annotation is its type."""
derived_option = _field_maker(Option, default=None)
"""Return a field whose section replaces None by a derived value, from arguments of `Option`.

The argument ``derived`` describes that value, and ``derive`` computes it. The annotation without
None is the type of its values.
"""


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

    def flag_for(self, value: object) -> str:
        """Return the flag that sets a value: ``--no-load-optim`` for a switch that is off."""
        switches = self.switches if self.kind.base is bool else {}
        return next((flag for flag, sets in switches.items() if sets is value), self.flag)

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
