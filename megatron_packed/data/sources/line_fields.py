"""Renaming of the fields of a line by ``--data-fields``, and a list of the fields that a line has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import ANSWERS, DataFields
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.data.sources.strict_json import type_name

_LISTS = frozenset({"messages", "conversations", "tools", "history"})
"""Targets that are lists. All other targets are texts."""
_USUAL = {
    "messages": {"conversation", "dialog", "dialogue", "chat", "turns", "message", "messages"},
    "instruction": {"question", "query", "prompt", "input", "instruction", "problem", "user"},
    "output": {"answer", "answers", "response", "completion", "output", "solution", "assistant"},
    "text": {"content", "body", "document", "text"},
}
"""Names that people give to the fields of a target, for suggestions."""
_INDEX = re.compile(r"-?\d{1,9}")
_MOST_SHOWN = 30
_MOST_NAME = 60


def renamed(line: dict[str, Any], fields: DataFields) -> dict[str, Any]:
    """Return the targets of a line. Fields of the line that no path names are left out.

    A list gives the texts of its elements, joined by line ends. A missing or null answer gives an
    empty answer. A missing optional field gives no target.

    Raises:
        BadLine: a required field is missing, or a field is no text.
    """
    required = fields.required
    targets: dict[str, Any] = {}
    for target, path in fields.paths:
        value = _follow(line, path.split("."))
        if value is None:
            if target in ANSWERS:
                targets[target] = ""
            elif target in required:
                raise BadLine("missing_key", printable(path, _MOST_NAME))
        else:
            is_list = target in _LISTS or has_messages(value)
            targets[target] = value if is_list else _text(value, path)
    return targets


def has_messages(value: Any) -> bool:
    """Return True if a value is a list of messages."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and "role" in message for message in value)
    )


def columns_of(fields: DataFields, names: Sequence[str], file: object) -> set[str]:
    """Return the columns of a table that the paths name.

    Raises:
        DataError: the table lacks a column.
    """
    columns = set()
    for target, path in fields.paths:
        column = path if path in names else path.split(".")[0]
        if column not in names:
            raise absent(target, path, f"{file} has no such column", "its columns are", names)
        columns.add(column)
    return columns


def first_names(fields: DataFields) -> set[str]:
    """Return the names that fields of a line can have, so that the paths may name them."""
    return {name for _, path in fields.paths for name in (path, path.split(".")[0])}


def has_field(line: dict[str, Any], path: str) -> bool:
    """Return True if a line has the field of a path with a value that is not null."""
    return _follow(line, path.split(".")) is not None


def absent(target: str, path: str, where: str, intro: str, names: Sequence[str]) -> DataError:
    """Return the error for a path that no line has.

    Args:
        where: clause that reports what was read.
        intro: beginning of the sentence that lists ``names``.
        names: fields that exist.
    """
    shown = ", ".join(printable(name, _MOST_NAME) for name in names[:_MOST_SHOWN]) or "none"
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    found = [printable(name, _MOST_NAME) for name in nearest(path, names[:_MOST_SHOWN])]
    cure = did_you_mean(found, "name one of them")
    return DataError(f"{flags.DATA_FIELDS} {target}={path}: {where}; {intro} {shown}{more}; {cure}")


def field_names(line: dict[str, Any]) -> list[str]:
    """Return the paths of the fields of a line, for example ``id`` and ``answers.text``."""
    return list(dict.fromkeys(_paths(line, "", 0)))


def suggestion(line: dict[str, Any]) -> str:
    """Return the ``--data-fields`` that a line with unknown fields may need; empty if none fits."""
    found = {}
    for target, names in _USUAL.items():
        for path in field_names(line):
            parts = path.split(".")
            at = next((at for at, part in enumerate(parts) if part.lower() in names), None)
            if at is not None:
                end = parts[: at + 1] if target == "messages" else parts
                value = _follow(line, end)
                if target == "messages" and not (isinstance(value, list) and value):
                    continue
                is_list = isinstance(value, list) and target != "messages"
                found[target] = ".".join([*end, "0"] if is_list else end)
                break
    for targets in (("messages",), ("instruction", "output"), ("text",)):
        if found.keys() >= set(targets):
            given = ",".join(f"{target}={found[target]}" for target in targets)
            return f"{flags.DATA_FIELDS} {printable(given)}"
    return ""


def _paths(value: Any, prefix: str, depth: int) -> Iterator[str]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = value[0]
    if not isinstance(value, dict) or not value or depth > 4:
        if prefix:
            yield prefix
        return
    for name, part in value.items():
        yield from _paths(part, f"{prefix}.{name}" if prefix else name, depth + 1)


def _follow(value: Any, names: Sequence[str]) -> Any:
    """Return the value at a path; None if there is none or the value is null.

    A list gives the values of all elements that have the rest of the path, or one element if the
    next name is its number.
    """
    if not names or value is None:
        return value
    if isinstance(value, dict):
        whole = ".".join(names)  # a field may have dots in its name
        return value[whole] if whole in value else _follow(value.get(names[0]), names[1:])
    if not isinstance(value, list):
        return None
    if _INDEX.fullmatch(names[0]):
        index = int(names[0])
        inside = -len(value) <= index < len(value)
        return _follow(value[index], names[1:]) if inside else None
    found = [_follow(element, names) for element in value]
    kept = [part for part in found if part is not None]
    return kept if kept or not value else None


def _text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_text(part, path) for part in value if part is not None)
    raise BadLine(
        "wrong_type", f"{printable(path, _MOST_NAME)} is a {type_name(value)}, not a string"
    )
