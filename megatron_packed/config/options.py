"""Options: dataclass fields that know their flag, their help, their limits and why they differ from
Megatron.

A field made with ``option(...)`` is all it takes to add a flag: parser, help, configuration file,
checks, serialisation and documentation read the field. ``Section`` is the base of the dataclasses
that hold options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_packed.config.errors import MOST_SHOWN, ConfigError, Problem
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest

SectionType = TypeVar("SectionType", bound="Section")
INT32_MAX = 2**31 - 1
MOST_VALUES = 20_000
"""Limit of one option, such as data paths and their weights: each is checked before anything
starts.
"""
PathUse = Literal[
    "input_file",
    "input_data",
    "data_args",
    "input_directory",
    "output_file",
    "output_directory",
    "log_file",
]
Sound = Callable[..., bool]  # sound("a", "b"): no problem was found yet with the fields a and b


@dataclass(frozen=True, kw_only=True)
class Option:
    """What ``option()`` records about a field; see there."""

    help: str
    unit: str = ""
    group: str = ""
    flag: str = ""
    negated: bool = False
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()
    shorthands: Mapping[str, Any] | None = None
    empty_word: str = ""
    bare: Any = None
    choices: tuple[Any, ...] = ()
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


def option(default: Any = MISSING, help: str = "", **metadata: Any) -> Any:
    """A field with its flag.

    Args:
        default: the value when nothing is given; without one the option is required.
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
        derived: what ``None`` stands for; the section fills the value in when it is made.
        path: the value is a path that is read or written, checked before anything starts.
        megatron: (Megatron's default, why ours differs), shown in the documentation.
        training_only: a model field that changes how weights are learned but not what they mean.
    """
    return field(default=default, metadata={"option": Option(help=help, **metadata)})


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


def _kind(annotation: Any) -> OptionType:
    arms = [arm for arm in get_args(annotation) if arm is not type(None)]
    if get_origin(annotation) is tuple:
        return OptionType(base=arms[0], optional=False, many=True)
    if get_origin(annotation) in (Union, type(int | None)):
        inner = _kind(arms[0])
        return OptionType(base=inner.base, optional=True, many=inner.many)
    return OptionType(base=annotation, optional=False, many=False)


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
        kind = _kind(hints[declared.name])
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
        value, problems = _check_value(described, getattr(section, described.name))
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


def _check_value(described: Field, value: Any) -> tuple[Any, list[Problem]]:
    """The value in its own type, and what is wrong with it."""
    kind, flag = described.kind, described.flag
    if value is None:
        if kind.optional:
            return None, []
        missing = f"{described.option.help[0].lower()}{described.option.help[1:]}".rstrip(".")
        return None, [
            Problem(
                flag,
                "",
                f"is required: {missing}",
                f"give {flag} {placeholder(described)}".rstrip(),
            )
        ]
    if kind.many:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            return value, [
                Problem(flag, repr(value), f"must be a list of {kind.word}", "give a list")
            ]
        if len(value) > MOST_VALUES:
            rule = f"has {len(value):,} values, and {MOST_VALUES:,} can be given"
            return value, [Problem(flag, f"{value[0]} ...", rule, "give fewer")]
        checked, wrong = [], []
        for item in value:
            one, problem = _check_one(described, item)
            checked.append(one)
            wrong += [] if problem is None else [problem]
            if len(wrong) == MOST_SHOWN:
                break
        return tuple(checked), wrong
    one, problem = _check_one(described, value)
    return one, [] if problem is None else [problem]


def _check_one(described: Field, value: Any) -> tuple[Any, Problem | None]:
    kind, limits, flag = described.kind, described.option, described.flag
    if kind.base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    shown = str(value) if kind.base in (int, float) else repr(value)
    if not isinstance(value, kind.base) or (isinstance(value, bool) and kind.base is not bool):
        return value, Problem(
            flag, repr(value), f"must be {kind.word}", f"give {flag} {placeholder(described)}"
        )
    if isinstance(value, str) and limits.value_aliases:
        value = limits.value_aliases.get(value, value)
    if limits.not_built and value in limits.not_built:
        return value, Problem(flag, shown, "is not built", limits.not_built[value])
    if limits.choices and value not in limits.choices:
        words = ", ".join(str(choice) for choice in limits.choices)
        meant = nearest(value, limits.choices) if isinstance(value, str) else []
        return value, Problem(
            flag, shown, f"must be one of {words}", did_you_mean(meant, "choose one of them")
        )
    if kind.base is str:
        if not value.strip():
            return value, Problem(
                flag, shown, "must not be empty", "give a value or leave the option out"
            )
        if "\0" in value:
            return value, Problem(flag, shown, "holds a NUL character", "remove it")
        return value, None
    if kind.base is float and not math.isfinite(value):
        return value, Problem(
            flag, shown, "must be a finite number", f"give a number {bounds(limits)}".rstrip()
        )
    if kind.base is int and limits.maximum is None and abs(value) > INT32_MAX:
        return value, Problem(
            flag, shown, f"must fit into 32 bits (at most {INT32_MAX})", "give a smaller number"
        )
    if kind.base in (int, float) and not within(limits, value):
        return value, Problem(
            flag, shown, f"must be {bounds(limits)}", f"give {kind.word} {bounds(limits)}"
        )
    return value, None


def within(limits: Option, value: float) -> bool:
    """Whether a number keeps the bounds."""
    return not (
        (limits.minimum is not None and value < limits.minimum)
        or (limits.above is not None and value <= limits.above)
        or (limits.maximum is not None and value > limits.maximum)
        or (limits.below is not None and value >= limits.below)
    )


def bounds(limits: Option) -> str:
    """The bounds in words: ``>= 1 and <= 65536``."""
    stated = (
        (">=", limits.minimum),
        (">", limits.above),
        ("<=", limits.maximum),
        ("<", limits.below),
    )
    return " and ".join(f"{sign} {limit:.10g}" for sign, limit in stated if limit is not None)


def placeholder(described: Field) -> str:
    """What stands for the value in the help and in cures: ``N``, ``X``, ``PATH``, ``A|B``; empty
    for a switch.
    """
    if described.kind.base is bool:
        return ""
    if described.option.choices:
        word = "|".join(str(choice) for choice in described.option.choices)
        word = word if len(word) <= 60 else "NAME"
    elif described.option.path:
        word = "PATH"
    else:
        word = {int: "N", float: "X", str: "TEXT"}[described.kind.base]
    if not described.kind.many:
        return word
    several = f"{word} [{word} ...]"
    return f"{several} | {described.option.empty_word}" if described.option.empty_word else several
