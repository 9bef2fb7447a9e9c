"""Conversion of the text of a flag, or of a value of a YAML file, to the value of an option."""

from __future__ import annotations

import re
from typing import Any

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Field
from megatron_packed.config.value_checks import placeholder

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
