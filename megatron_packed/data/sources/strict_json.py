"""Strict parsing of one line as a JSON object.

A line that two JSON readers could read differently is refused: repeated keys, NaN, lone surrogates,
deep nesting, huge numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, TypeVar

from megatron_packed.data.errors import BadLine, printable

JsonObject = dict[str, Any]
"""Object of JSON: its keys, and values of any type of JSON."""
_MAX_NUMBER_CHARS = 4000
_MAX_DEPTH = 128
"""Deepest allowed nesting of objects and lists. Python's own limit differs between versions."""
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\\u[fF][dD][dD][0-2]|\xef\xb7[\x90-\x92]")
"""Matches a surrogate escape, or a reserved character, escaped or raw."""
GENERATION_START, GENERATION_END, BROKEN = "\ufdd0", "\ufdd1", "\ufdd2"
"""Characters reserved to mark text while chat templates are rendered; see `chat_template`."""
_RESERVED = re.compile(f"[{GENERATION_START}-{BROKEN}]")


def object_of_line(data: bytes) -> JsonObject:
    """Parse one line strictly as a JSON object.

    Raises:
        BadLine: the line is no JSON object, or JSON readers could interpret it differently.
    """
    value = _parse_json(data)
    if not isinstance(value, dict):
        raise BadLine("not_an_object", f"the line is a JSON {type_name(value)}")
    return value


def parse_text(text: str) -> Any:
    """Parse a JSON text that a field of a line holds, as strictly as the line.

    Raises:
        BadLine: the text is no JSON, or JSON readers could interpret it differently.
    """
    return _parse_json(text.encode("utf-8"))


def _parse_json(data: bytes) -> Any:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadLine("invalid_utf8", "the line begins with the byte order mark of UTF-16")
    if b"\x00" in data:
        raise BadLine("nul_byte")
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine("invalid_utf8", f"byte {error.start} of the line") from None
    except RecursionError:
        raise BadLine("too_deep") from None
    except ValueError as error:  # JSONDecodeError, or int() of too many digits
        raise BadLine("malformed_json", _other_format(data) or str(error)) from None
    if data.count(b"{") + data.count(b"[") > _MAX_DEPTH:
        _check_depth(value)
    # Surrogates and reserved characters are rare, so a fast search of the raw bytes decides whether
    # the strings are checked.
    if (b"\\u" in data or b"\xef\xb7" in data) and _SUSPECT.search(data):
        check_characters(value)
    return value


def _other_format(data: bytes) -> str:
    """Return what a line that is no JSON belongs to; empty for a usual line."""
    start = data[:64].lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "the file is a pointer of Git LFS; `git lfs pull` downloads its data"
    if start.startswith((b"<!doctype html", b"<html")):
        return "the file is a web page; download the data itself"
    return ""


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, list | dict)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    if any(isinstance(item, list | dict) for item in level):
        raise BadLine("too_deep", f"more than {_MAX_DEPTH} levels")


def check_characters(value: Any) -> None:
    """Check the characters of all strings in a JSON value.

    Raises:
        BadLine: a string has half of a surrogate pair, or a reserved character.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadLine("lone_surrogate") from None
    if _RESERVED.search(text):
        raise BadLine("reserved_character")


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise BadLine("duplicate_key", printable(twice))
    return value


def _no_constant(name: str) -> Any:
    raise BadLine("nan_literal", name)


def _integer(digits: str) -> int:
    _check_digits(digits)
    return int(digits)


def _float(digits: str) -> float:
    _check_digits(digits)
    number = float(digits)
    if math.isinf(number):  # a template would print it as Infinity, other readers refuse it
        raise BadLine("huge_number", printable(digits, 40))
    return number


def _check_digits(digits: str) -> None:
    # int() of a million digits takes minutes on Python versions that do not limit the digits
    if len(digits) > _MAX_NUMBER_CHARS:
        raise BadLine("huge_number", f"{len(digits)} characters")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=_no_constant,
    parse_int=_integer,
    parse_float=_float,
)


_NOUNS: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
_T = TypeVar("_T")


def expect(where: str, value: Any, kind: type[_T]) -> _T:
    """Return a value that must be a string, a list or an object.

    Args:
        where: place of the value in the line, for the message.
    Raises:
        BadLine: the value has another type.
    """
    if not isinstance(value, kind):
        raise BadLine("wrong_type", f"{where} is a {type_name(value)}, not {_NOUNS[kind]}")
    return value


def type_name(value: Any) -> str:
    """Return the name that JSON has for the type of a value."""
    if value is None:
        return "null"
    names = {
        dict: "object",
        list: "list",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
    }
    return names.get(type(value), type(value).__name__)
