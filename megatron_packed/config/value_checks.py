"""Value of a single option: its conversion from text or YAML, and checks of type, choices and bounds."""

from __future__ import annotations

import math
import re
from typing import Any

from megatron_packed.config.errors import MOST_SHOWN, Fault, Problem
from megatron_packed.config.options import Field, Option
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest

MISSING = "is required: "
"""Beginning of the rule of an option that is missing."""
INT32_MAX = 2**31 - 1
MOST_VALUES = 20_000
"""Maximum number of values of one option. Data paths and weights, for example, are checked one by
one before a run starts.
"""


def check_value(field: Field, value: Any) -> tuple[Any, list[Problem]]:
    """Check a value; return it in the option's type, and its problems."""
    kind, flag = field.kind, field.flag
    if value is None:
        if kind.optional:
            return None, []
        missing = f"{field.option.help[0].lower()}{field.option.help[1:]}".rstrip(".")
        return None, [
            Problem(
                flag,
                "",
                f"{MISSING}{missing}",
                f"give {flag} {placeholder(field)}".rstrip(),
            )
        ]
    if kind.many:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            return value, [
                Problem(flag, repr(value), f"must be a list of {kind.word}", "give a list")
            ]
        if len(value) > MOST_VALUES:
            rule = f"has {len(value):,} values, but at most {MOST_VALUES:,} are allowed"
            return value, [Problem(flag, f"{value[0]} ...", rule, "give fewer")]
    checked, problems = [], []
    for item in value if kind.many else [value]:
        checked_value, problem = _check_one(field, item)
        checked.append(checked_value)
        problems += [] if problem is None else [problem]
        if len(problems) == MOST_SHOWN:
            break
    return tuple(checked) if kind.many else checked[0], problems


def _check_one(field: Field, value: Any) -> tuple[Any, Problem | None]:
    kind, limits = field.kind, field.option
    if limits.word and value == limits.word:
        return value, None
    if kind.base is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:  # a file may have a whole number with hundreds of digits
            value = math.inf if value > 0 else -math.inf
    shown = str(value) if type(value) in (int, float) else repr(value)
    if isinstance(value, str) and limits.value_aliases:
        value = limits.value_aliases.get(value, value)
    fault = _fault(field, value)
    return value, Problem(field.flag, shown, *fault) if fault else None


def _fault(field: Field, value: Any) -> Fault | None:
    """Return the rule that a single value breaks, and the cure."""
    kind, limits = field.kind, field.option
    fits = isinstance(value, kind.base) and (kind.base is bool or not isinstance(value, bool))
    if not fits:
        return f"must be {kind.word}", f"give {field.flag} {placeholder(field)}"
    if limits.not_built and value in limits.not_built:
        return "is not supported", limits.not_built[value]
    if limits.choices and value not in limits.choices:
        suggestions = nearest(value, limits.choices) if isinstance(value, str) else []
        rule = f"must be one of {', '.join(map(str, limits.choices))}"
        return rule, did_you_mean(suggestions, "choose one of them")
    if kind.base is str:
        if not value.strip():
            return "must not be empty", "give a value, or leave the option out"
        return ("contains a NUL character", "remove it") if "\0" in value else None
    if kind.base is float and not math.isfinite(value):
        return "must be a finite number", f"give a number {bounds(limits)}".rstrip()
    if kind.base is int and limits.maximum is None and abs(value) > INT32_MAX:
        return f"must fit into 32 bits (at most {INT32_MAX})", "give a smaller number"
    if kind.base is not bool and not within_bounds(limits, value):
        return f"must be {bounds(limits)}", f"give {kind.word} {bounds(limits)}"
    return None


def within_bounds(limits: Option, value: float) -> bool:
    return not (
        (limits.minimum is not None and value < limits.minimum)
        or (limits.above is not None and value <= limits.above)
        or (limits.maximum is not None and value > limits.maximum)
        or (limits.below is not None and value >= limits.below)
    )


def bounds(limits: Option) -> str:
    """Return the bounds as text: ``>= 1 and <= 65536``."""
    stated = (
        (">=", limits.minimum),
        (">", limits.above),
        ("<=", limits.maximum),
        ("<", limits.below),
    )
    return " and ".join(f"{sign} {limit:.10g}" for sign, limit in stated if limit is not None)


def placeholder(field: Field) -> str:
    """Return the placeholder of a value in help and cures: ``N``, ``X``, ``PATH`` or ``A|B``; empty
    for a switch.
    """
    if field.kind.base is bool:
        return ""
    if field.option.choices:
        word = "|".join(str(choice) for choice in field.option.choices)
        word = word if len(word) <= 60 else "NAME"
    elif field.option.path:
        word = "PATH"
    else:
        word = {int: "N", float: "X", str: "TEXT"}[field.kind.base]
        word = f"{word}|{field.option.word}" if field.option.word else word
    if not field.kind.many:
        return word
    several = f"{word} [{word} ...]"
    return f"{several} | {field.option.empty_word}" if field.option.empty_word else several


_WHOLE = re.compile(r"[+-]?[0-9]+")


class WrongValueError(Exception):
    """Error for a text that is not a valid value of the option; see `Problem` for the arguments."""

    def __init__(self, option: str, value: str, rule: str, cure: str) -> None:
        self.problem = Problem(option, value, rule, cure)
        super().__init__(str(self.problem))


def from_text(field: Field, text: str) -> Any:
    """Return the value that ``text`` spells; bounds and choices are checked later.

    Raises:
        WrongValueError: the text is not a number.
    """
    base = field.kind.base
    if field.option.word and text.strip() == field.option.word:
        return field.option.word
    if base is int:
        if _WHOLE.fullmatch(text.strip()):
            # int() refuses texts of more than 4,300 digits. Use 10**30 instead, which is also out
            # of bounds.
            return int(text) if len(text) < 4000 else 10**30
        cure = _whole_cure(field, text)
        raise WrongValueError(field.flag, repr(text), "must be a whole number", cure)
    if base is float:
        try:
            return float(text)
        except ValueError:
            word = field.option.word
            example = word or field.default or 0.001
            cure = f"give {field.flag} {placeholder(field)}, for example {example}"
            rule = f"must be a number or {word}" if word else "must be a number"
            raise WrongValueError(field.flag, repr(text), rule, cure) from None
    return text


def from_yaml(field: Field, value: Any) -> Any:
    """Return the value that a YAML file or a keyword of a call from Python gives.

    A text is converted to a number as on the command line, because YAML reads 1e-4 as text.

    Raises:
        WrongValueError: the value has another type.
    """
    kind = field.kind
    if value is None:
        if kind.optional:
            return None
        cure = "remove the key, or give a value"
        raise WrongValueError(field.flag, "null", f"must be {kind.word}", cure)
    if kind.many:
        if value == field.option.empty_word != "":
            return ()
        items = value if isinstance(value, list) else [value]
        return tuple(_one_from_yaml(field, item) for item in items)
    return _one_from_yaml(field, value)


def _one_from_yaml(field: Field, value: Any) -> Any:
    base = field.kind.base
    if isinstance(value, str) and base in (int, float):
        return from_text(field, value)
    if base is str and not isinstance(value, str):
        rule = f"must be text, but is read as {type(value).__name__}"
        raise WrongValueError(field.flag, repr(value), rule, "put it into quotes")
    if base is bool and not isinstance(value, bool):
        raise WrongValueError(
            field.flag, repr(value), "must be true or false", "write true or false"
        )
    return value


def _whole_cure(field: Field, text: str) -> str:
    try:
        number = float(text)
        if number.is_integer() and abs(number) < 10**15:
            return f"write {int(number)}"
    except (ValueError, OverflowError):
        pass
    return f"give {field.flag} {placeholder(field)}"
