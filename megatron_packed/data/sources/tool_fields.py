"""Tools and tool calls of a line: JSON texts are parsed, and null keys are dropped.

OpenAI writes the ``arguments`` of a call as a JSON text, and data sets store tools as JSON texts.
Chat templates need objects. A template that gets a text prints it with quotes around it, or fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.strict_json import JsonObject, expect, parse_text, type_name


def without_nulls(value: Any, kept: Collection[str] = ()) -> Any:
    """Return a JSON value without the keys whose value is null, at any depth.

    Tables have every key in every row. A tool or a message without a key has null there.

    Args:
        kept: keys that stay with a null value.
    """
    if isinstance(value, dict):
        return {
            name: without_nulls(part, kept)
            for name, part in value.items()
            if part is not None or name in kept
        }
    return [without_nulls(part, kept) for part in value] if isinstance(value, list) else value


def null_arguments(value: Any) -> list[str]:
    """Return the names of the null arguments of all tool calls in a line.

    Arguments that are a JSON text do not count, because their nulls stay.
    """
    names: list[str] = []
    if isinstance(value, dict):
        for name, part in value.items():
            if name == "arguments" and isinstance(part, dict):
                names += [key for key, argument in part.items() if argument is None]
            names += null_arguments(part)
    elif isinstance(value, list):
        for part in value:
            names += null_arguments(part)
    return names


def text_arguments(messages: Iterable[JsonObject]) -> list[str]:
    """Return the name of the function of each call whose arguments are a text.

    Args:
        messages: parsed messages, in which a JSON text of an object is an object.
    """
    names = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"] if isinstance(call.get("function"), dict) else call
            if isinstance(function.get("arguments"), str):
                name = function.get("name")
                names.append(name if isinstance(name, str) else "no name")
    return names


def parse_objects(where: str, value: Any) -> list[JsonObject] | None:
    """Return the objects of a list of tools or tool calls; None if the list is empty or null.

    Args:
        where: place of the value in the line, for messages.
        value: a list of objects, a JSON text of one, or a list of JSON texts of objects. Null
            values inside of a text stay, because its writer wrote them.
    Raises:
        BadLine: the value has another type.
    """
    if isinstance(value, str):
        value = _parsed(where, value, "a list") if value.strip() else None
    if value is None:
        return None
    elements = enumerate(expect(where, value, list))
    return [_object(f"{where}[{number}]", element) for number, element in elements] or None


def parse_tool_calls(where: str, value: Any) -> list[JsonObject] | None:
    """Return the tool calls of a message with parsed arguments; None for no call.

    Raises:
        BadLine: the value is not a list of objects, nor a JSON text of one.
    """
    calls = parse_objects(where, value)
    return None if calls is None else [_with_parsed_arguments(call) for call in calls]


def calls_of_text(where: str, value: Any) -> list[JsonObject]:
    """Return the tool calls that a turn with the role ``function_call`` makes.

    Args:
        value: ``{"name": ..., "arguments": ...}``, a list of such objects, or a JSON text of one.
    Raises:
        BadLine: the value has another form.
    """
    if isinstance(value, str):
        value = _parsed(where, value, "an object or a list")
    listed = value if isinstance(value, list) else [value]
    calls = []
    for number, call in enumerate(listed):
        place = f"{where}[{number}]" if isinstance(value, list) else where
        call = _object(place, call)
        if isinstance(call.get("function"), dict):  # OpenAI's form
            calls.append(call)
            continue
        if not isinstance(call.get("name"), str):
            raise BadLine("wrong_type", f"{place}.name is a {type_name(call.get('name'))}")
        function = {"name": call.pop("name"), "arguments": call.pop("arguments", {})}
        calls.append({**call, "type": "function", "function": function})
    if not calls:
        raise BadLine("wrong_type", f"{where} is an empty list, but must call a function")
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: JsonObject) -> JsonObject:
    """Return a call with an object in place of a JSON text of its arguments.

    Arguments are at ``function.arguments``, or at ``arguments`` in data without OpenAI's outer
    object.
    """
    function = call.get("function")
    if isinstance(function, dict):
        call = {**call, "function": _with_parsed_arguments(function)}
    arguments = call.get("arguments")
    return {**call, "arguments": _arguments(arguments)} if isinstance(arguments, str) else call


def _arguments(text: str) -> Any:
    """Return the object of a JSON text; a blank text is no arguments, and another text stays."""
    if not text.strip():
        return {}
    try:
        value = parse_text(text)
    except BadLine:  # the model that wrote the call made no JSON
        return text
    return value if isinstance(value, dict) else text


def _object(where: str, value: Any) -> JsonObject:
    if isinstance(value, str):
        value = _parsed(where, value, "an object")
    return dict(expect(where, value, dict))


def _parsed(where: str, text: str, kind: str) -> Any:
    try:
        return parse_text(text)
    except BadLine as bad_line:
        raise BadLine("wrong_type", f"{where} is no JSON text of {kind} ({bad_line})") from None
