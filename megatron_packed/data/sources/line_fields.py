"""Renaming of the fields of a line by ``--data-fields``, and a list of the fields that a line has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import (
    ANSWERS,
    EACH,
    LABEL,
    DataFields,
    lists_of,
    pairs_fault,
    without_each,
)
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.data.sources.line_messages import has_messages, is_message
from megatron_packed.data.sources.message_masks import LISTED_MASK
from megatron_packed.data.sources.strict_json import JsonObject, expect

_NO_TEXTS = frozenset({"messages", "conversations", "tools", "history", LABEL})
"""Targets that keep their value. All other targets are texts, or messages."""
_USUAL = {
    "messages": {"conversation", "dialog", "dialogue", "chat", "turns", "message", "messages"},
    "instruction": {"question", "query", "prompt", "input", "instruction", "problem", "user"},
    "input": {"context", "passage", "article", "document", "story"},
    "output": {"answer", "answers", "response", "completion", "output", "solution", "assistant"},
    "text": {"content", "body", "document", "text"},
}
"""Names that people give to the fields of a target, for suggestions."""
_ENDINGS = ("_text", "_content", "_string")
"""Ends of names that say no more than that a field is a text."""
_OPTIONAL = {
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools", "functions"),
}
"""Usual names of the fields of optional targets. The first field that is not empty counts."""
_MASKS = frozenset({LISTED_MASK, "completion_mask", "assistant_masks"})
OPTIONAL_FIELDS = _MASKS.union(*_OPTIONAL.values())
"""Fields of a line that change what its question and answer mean, or what is learned."""
ANSWER_FIELDS = frozenset(_USUAL["output"])
"""Usual names of the field of an answer."""
_INDEX = re.compile(r"-?\d{1,9}")
_MOST_SHOWN = 30
_MOST_NAME = 60
_MOST_FLAG = 1000


def renamed(line: JsonObject, fields: DataFields) -> list[JsonObject]:
    """Return the targets of each document of a line. Fields that no path names are left out.

    A path with ``[*]`` gives one document for each element; other paths give the same value to all
    documents. A list gives the texts of its elements, joined by line ends. A missing or null answer
    gives an empty answer, and so does an empty list of answers. A missing optional field gives no
    target.

    Raises:
        BadLine: a required field is missing, or a field is no text.
    """
    steps = [name.split(EACH)[-1].removeprefix(".") for name in fields.lists]
    return [_targets([line, *elements], fields) for elements in _elements(line, steps)]


def _elements(value: Any, steps: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield each element of a list, each with each element of the list in it, and so on.

    A list that is empty or missing counts as one null element. So a missing answer is found by the
    rules for single answers, and no question is lost without a reason.

    Args:
        steps: path of each list in an element of the list before it.
    """
    if not steps:
        yield ()
        return
    elements = _follow(value, steps[0].split("."))
    if elements is not None:
        expect(printable(steps[0], _MOST_NAME), elements, list)
    for element in elements or [None]:
        for inner in _elements(element, steps[1:]):
            yield (element, *inner)


def _targets(elements: Sequence[Any], fields: DataFields) -> JsonObject:
    """Return the targets of one document.

    Args:
        elements: the line, and the element of each list of `DataFields.lists`.
    """
    required = (*fields.required, LABEL)
    targets: JsonObject = {}
    for target, path in fields.paths:
        *_, inner_path = path.split(EACH)
        names = inner_path.removeprefix(".")
        value = _follow(elements[len(lists_of(path))], names.split(".") if names else [])
        if value is None:
            if target in ANSWERS:
                targets[target] = ""
            elif target in required:
                raise BadLine("missing_key", printable(path, _MOST_NAME))
        else:
            stays = target in _NO_TEXTS or has_messages(value) or is_message(value)
            targets[target] = value if stays else _text(value, path)
    return targets


def columns_of(fields: DataFields, names: Sequence[str], file: object) -> set[str]:
    """Return the columns of a table that the paths name, and others whose loss gets a note.

    Columns ``input`` and ``context`` that no path names are left out, because they may hold images.

    Raises:
        DataError: the table lacks a column.
    """
    columns = set(names) & OPTIONAL_FIELDS - set(_OPTIONAL["input"])
    for target, path in fields.paths:
        column = path if path in names else without_each(path.split(".")[0])
        if column not in names:
            raise absent(target, path, f"{file} has no such column", "its columns are", names)
        columns.add(column)
    return columns


def first_names(fields: DataFields) -> set[str]:
    """Return the names that fields of a line can have, so that the paths may name them."""
    return {
        name
        for _, path in fields.paths
        for name in (without_each(path), without_each(path.split(".")[0]))
    }


def lost_fields(line: JsonObject, fields: DataFields) -> set[str]:
    """Return the `OPTIONAL_FIELDS` that a line has with a value and that no path names."""
    present = {name for name in OPTIONAL_FIELDS if line.get(name) not in (None, "", [], {})}
    return present - first_names(fields)


def has_field(line: JsonObject, path: str) -> bool:
    """Return True if a line has the field of a path with a value that is not null."""
    return _follow(line, without_each(path).split(".")) is not None


def absent(target: str, path: str, where: str, intro: str, names: Sequence[str]) -> DataError:
    """Return the error for a path that no line has.

    Args:
        where: clause that reports what was read.
        intro: beginning of the sentence that lists ``names``.
        names: fields that exist.
    """
    shown = ", ".join(printable(name, _MOST_NAME) for name in names[:_MOST_SHOWN]) or "none"
    suffix = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    suggestions = [
        printable(name, _MOST_NAME) for name in nearest(without_each(path), names[:_MOST_SHOWN])
    ]
    cure = did_you_mean(suggestions, "name one of them")
    return DataError(
        f"{flags.DATA_FIELDS} {target}={path}: {where}; {intro} {shown}{suffix}; {cure}"
    )


def field_names(line: JsonObject) -> list[str]:
    """Return the paths of the fields of a line, for example ``id`` and ``answers.text``."""
    return list(dict.fromkeys(_paths(line, "", 0)))


def suggestion(line: JsonObject) -> str:
    """Return the ``--data-fields`` that a line with unknown fields may need; empty if none fits.

    They name the optional fields that the line has, too, so that the cure loses none of them. A
    line with an answer is not suggested as text, because its question would be trained too.
    """
    paths = {target: path for target in _USUAL if (path := _usual_path(line, target))}
    schemas = [("messages",), ("instruction", "output")]
    if "output" not in paths:
        schemas.append(("text",))
    for targets in schemas:
        if paths.keys() >= set(targets):
            pairs = [(target, paths[target]) for target in targets]
            if targets[-1] == "output" and "input" in paths:
                pairs.insert(1, ("input", paths["input"]))
            if pairs_fault(pairs) is None:
                return data_fields_flag(with_optional(line, pairs))
    return ""


def suggestion_for_prompt(line: JsonObject) -> str:
    """Return the ``--data-fields`` for a line with a ``prompt`` and another name of its answer.

    The targets ``prompt`` and ``completion`` have no optional fields. So a line with such fields is
    suggested as an instruction with an output, if its question and answer are texts.
    """
    answers = [name for name, part in line.items() if _is_usual(name, "output") and _answers(part)]
    answer = answers[0] if answers else _usual_path(line, "output")
    if not answer:
        return ""
    question = "instruction" if isinstance(line.get("instruction"), str) else "prompt"
    pairs = [("instruction", question), ("output", answer)]
    if isinstance(line[question], str) and not isinstance(line.get(answer), list | dict):
        with_others = with_optional(line, pairs)
        if len(with_others) > len(pairs) or question == "instruction":
            return data_fields_flag(with_others)
    return data_fields_flag([("prompt", "prompt"), ("completion", answer)])


def _answers(value: Any) -> bool:
    """Return True if a value can be an answer as a whole."""
    return value is None or isinstance(value, str) or has_messages(value) or is_message(value)


def data_fields_flag(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the ``--data-fields`` with pairs of targets and paths."""
    assignments = ",".join(f"{target}={path}" for target, path in pairs)
    return f"{flags.DATA_FIELDS} {printable(assignments, _MOST_FLAG)}"


def with_optional(line: JsonObject, required: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return pairs of targets and paths, with those of the optional fields that a line has.

    The fields are found in the line and in the object of the first path. Empty fields count,
    because other lines may have a value there; null fields do not.

    Example:
        ``{"query": ..., "response": ..., "system_prompt": ...}`` with ``instruction=query`` and
        ``output=response`` gets ``system=system_prompt``.
    """
    pairs = list(required)
    inside, _, _ = pairs[0][1].rpartition(".")
    places = ("", f"{inside}.") if inside else ("",)
    for target, names in _OPTIONAL.items():
        used_paths = {path for _, path in pairs}
        values = {
            path: _follow(line, without_each(path).split("."))
            for path in (f"{place}{name}" for name in names for place in places)
            if path not in used_paths
        }
        paths = [path for path, value in values.items() if _is_optional(target, value)]
        paths.sort(key=lambda path: not values[path])
        if paths and pairs_fault([*pairs, (target, paths[0])]) is None:
            pairs.insert(1 if target == "input" else len(pairs), (target, paths[0]))
    return pairs


def _is_optional(target: str, value: Any) -> bool:
    """Return True if the schemas can read a value as an optional target."""
    if target == "history":  # pairs of texts, not messages
        return isinstance(value, list) and not has_messages(value)
    return isinstance(value, str | list)


def _usual_path(line: JsonObject, target: str) -> str:
    """Return the path of the first field with a usual name of a target; empty without one.

    The name of a text counts more than the name of an object around it. A list of objects gives
    each of its elements, a list of texts its first element.
    """
    paths = [path.split(".") for path in field_names(line)]
    if target == "messages":
        for parts in paths:
            at = next((at for at, part in enumerate(parts) if _is_usual(part, target)), len(parts))
            turns = _follow(line, parts[: at + 1])
            if at < len(parts) and isinstance(turns, list) and turns:
                return ".".join(parts[: at + 1])
        return ""
    by_leaf = [parts for parts in paths if _is_usual(parts[-1], target)]
    # an input beside a question is a part of the question, not the question itself
    by_leaf.sort(key=lambda parts: target == "instruction" and parts[-1].lower() == "input")
    around = [parts for parts in paths if any(_is_usual(part, target) for part in parts)]
    for parts in (*by_leaf, *around):
        path, value = _with_elements(line, parts)
        if isinstance(value, list) and value:
            path, value = f"{path}.0", value[0]
        if isinstance(value, str):
            return path
    return ""


def _is_usual(name: str, target: str) -> bool:
    """Return True if a name is a usual one of a target, also with an ending like ``_text``."""
    lower = name.lower()
    ending = next((end for end in _ENDINGS if lower.endswith(end)), "")
    return lower in _USUAL[target] or lower.removesuffix(ending) in _USUAL[target]


def _with_elements(line: JsonObject, names: Sequence[str]) -> tuple[str, Any]:
    """Return a path with ``[*]`` after each list of objects, and the first value at the path."""
    parts: list[str] = []
    value: Any = line
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
        enters = isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict)
        value = value[0] if enters else value
        parts.append(f"{name}{EACH if enters else ''}")
    return ".".join(parts), value


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
        dotted_name = ".".join(names)  # a field may have dots in its name
        return (
            value[dotted_name] if dotted_name in value else _follow(value.get(names[0]), names[1:])
        )
    if not isinstance(value, list):
        return None
    if _INDEX.fullmatch(names[0]):
        index = int(names[0])
        inside = -len(value) <= index < len(value)
        return _follow(value[index], names[1:]) if inside else None
    parts = [_follow(element, names) for element in value]
    present = [part for part in parts if part is not None]
    return present if present or not value else None


def _text(value: Any, path: str) -> str:
    if isinstance(value, list):
        return "\n".join(_text(part, path) for part in value if part is not None)
    return expect(printable(path, _MOST_NAME), value, str)
