"""Messages of a line: one form for those of OpenAI, ShareGPT, LLaMA-Factory and Anthropic's texts.

A message is an object with ``role`` and ``content``. ShareGPT's turns have ``from`` and ``value``,
and other names of roles. A turn of the role ``function_call`` becomes an assistant message with
``tool_calls``. All other fields are read in the same way in both forms.

The content of a message is a string or a list of parts (``{"type": "text", "text": ...}``). The
texts of a list are joined without a separator, so chat templates always get a string. Parts with
thoughts at the beginning of an answer become its ``reasoning_content``. A part of another kind makes
the line unusable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from megatron_packed.data.errors import BadLine, printable
from megatron_packed.data.sources.message_masks import TRAIN, check_listed_mask, unify_masks
from megatron_packed.data.sources.strict_json import JsonObject, expect, type_name
from megatron_packed.data.sources.tool_fields import (
    calls_of_text,
    parse_tool_calls,
    without_nulls,
)

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Names of roles in OpenAI's messages, now and before, and the role that templates get."""
CONTENTS = ("value", "content")
"""Names that the content of a message can have; the first counts. A null answer is an empty answer."""
KNOWN_FIELDS = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "reasoning",
        "thinking",
        TRAIN,
    }
)
"""Fields of messages whose meaning is known: the project reads them, or usual templates print them."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content list that are text."""
_THOUGHT_PARTS = {"thinking": ("thinking",), "reasoning": ("text", "reasoning", "summary")}
"""Types of the parts that are thoughts, of Anthropic and OpenAI, and the fields of their text."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold its thoughts; the first counts."""
_CALL_ROLE = "function_call"
_SHAREGPT_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    _CALL_ROLE: "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_DIALOGUE_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
"""Beginning of a turn in the texts of Anthropic's data of helpful and harmless answers."""
_DIALOGUE_ROLES = {"Human": "user", "Assistant": "assistant"}


def has_sharegpt_names(turns: Any) -> bool:
    """Return True if the first message has ShareGPT's ``from`` in place of ``role``."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and "from" in first and first.get("role") is None


def has_messages(value: Any) -> bool:
    """Return True if a value is a list of messages, in OpenAI's or in ShareGPT's form."""
    return isinstance(value, list) and len(value) > 0 and all(map(is_message, value))


def is_message(value: Any) -> bool:
    """Return True if a value is one message, in OpenAI's or in ShareGPT's form."""
    return isinstance(value, dict) and ("role" in value or {"from", "value"} <= value.keys())


def is_dialogue(value: Any) -> bool:
    """Return True if a value is a text of turns, of which the first begins with ``Human:``."""
    return isinstance(value, str) and value.lstrip().startswith("Human:")


def parse_messages(
    name: str, turns: Any, *, sharegpt: bool = False, listed_mask: Any = None
) -> list[JsonObject]:
    """Return the messages of a list, or of a text of turns, in the form that templates get.

    Args:
        name: name of the list in the line, for messages.
        sharegpt: True if the messages have ShareGPT's names.
        listed_mask: value of the mask beside the messages.
    Raises:
        BadLine: a message is not usable, with its place.
    """
    if is_dialogue(turns):
        turns = _turns_of_dialogue(turns)
    if not expect(name, turns, list):
        raise BadLine("empty_messages")
    masks = check_listed_mask(listed_mask, len(turns))
    messages = []
    for number, (turn, mask) in enumerate(zip(turns, masks)):
        where = f"{name}[{number}]"
        message = _with_role(where, turn, sharegpt)
        unify_masks(where, message, (f"loss_mask[{number}]", mask))
        _check_calls_and_content(where, message)
        messages.append(_with_reasoning(message))
    return messages


def unknown_fields(messages: Iterable[JsonObject]) -> set[str]:
    """Return the names of the fields of parsed messages that are not in `KNOWN_FIELDS`."""
    return set().union(*(message.keys() - KNOWN_FIELDS for message in messages))


def _with_role(where: str, turn: Any, sharegpt: bool) -> JsonObject:
    """Return a copy of a message with a valid role, without null values except the content."""
    present = expect(where, turn, dict).items()
    fields = {name: without_nulls(part) for name, part in present if part is not None}
    if sharegpt:
        return _from_sharegpt(where, turn, fields)
    role = expect(f"{where}.role", fields.get("role"), str)
    if role not in _ROLES:
        raise BadLine("unknown_role", f"{where}.role is {printable(role, 40)!r}")
    fields["role"] = _ROLES[role]
    if "content" in turn:
        fields.setdefault("content", None)
    return fields


def _from_sharegpt(where: str, turn: JsonObject, fields: JsonObject) -> JsonObject:
    """Return a turn of ShareGPT as a message.

    Args:
        fields: fields of the turn that are not null.
    """
    key = "from" if "from" in fields else "role"
    role = expect(f"{where}.{key}", fields.get(key), str)
    if role not in _SHAREGPT_ROLES:
        raise BadLine("unknown_role", f"{where}.{key} is {printable(role, 40)!r}")
    message: JsonObject = {"role": _SHAREGPT_ROLES[role]}
    name = next((name for name in CONTENTS if name in fields), None)
    if role == _CALL_ROLE:
        if name is None:
            raise BadLine("wrong_type", f"{where}.value is a null, not a call of a function")
        message |= {"content": "", "tool_calls": calls_of_text(f"{where}.{name}", fields[name])}
    elif any(name in turn for name in CONTENTS):
        message["content"] = None if name is None else fields[name]
    return message | {
        name: part
        for name, part in fields.items()
        if name not in ("role", "from", *CONTENTS) and name not in message
    }


def _with_reasoning(message: JsonObject) -> JsonObject:
    """Return a message with its thoughts in both fields that templates read.

    Source: transformers 5.24, which does the same before it renders a template.
    """
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _check_calls_and_content(where: str, message: JsonObject) -> None:
    """Parse the tool calls of a message in place, and make one string of its content."""
    answers = message["role"] == "assistant"
    if answers and "tool_calls" not in message and isinstance(message.get(_CALL_ROLE), dict):
        # OpenAI's field for a call before there was tool_calls
        message["tool_calls"] = calls_of_text(f"{where}.{_CALL_ROLE}", message.pop(_CALL_ROLE))
    calls = parse_tool_calls(f"{where}.tool_calls", message.get("tool_calls"))
    if calls is not None:
        message["tool_calls"] = calls
    else:
        message.pop("tool_calls", None)
    if answers:
        _take_thoughts(where, message)
    content = message["content"] = _content(f"{where}.content", message)
    if answers and not content.strip() and calls is None:
        raise BadLine("empty_assistant", where)


def _take_thoughts(where: str, message: JsonObject) -> None:
    """Move the thoughts at the beginning of a content list to ``reasoning_content``, in place.

    Several thoughts are joined by an empty line. Empty texts take their places, so that the places
    of the other parts stay.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return
    thoughts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _THOUGHT_PARTS:
            break
        thoughts.append(_thought(f"{where}.content[{len(thoughts)}]", part))
    if not thoughts:
        return
    message["content"] = [*[""] * len(thoughts), *content[len(thoughts) :]]
    text = "\n\n".join(filter(None, thoughts))
    beside = next((name for name in _THOUGHTS if message.get(name)), None)
    if text and beside is not None and message[beside] != text:
        raise BadLine("wrong_type", f"{where}.content has other thoughts than {where}.{beside}")
    if text:
        message["reasoning_content"] = text


def _thought(where: str, part: JsonObject) -> str:
    """Return the text of a part with thoughts, which may be a list of parts with a text."""
    names = _THOUGHT_PARTS[part["type"]]
    name = next((name for name in names if name in part), names[0])
    value = part.get(name)
    texts: list[str] = []
    for text in value if isinstance(value, list) else [value]:
        text = text.get("text") if isinstance(text, dict) else text
        texts.append(expect(f"{where}.{name}", text, str))
    return "\n\n".join(texts)


def _content(where: str, message: JsonObject) -> str:
    """Return the content of a message as one string."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(_part(f"{where}[{at}]", part) for at, part in enumerate(content))
    answers = message["role"] == "assistant" and ("content" in message or "tool_calls" in message)
    if content is None and answers:
        return ""
    return expect(where, content, str)


def _part(where: str, part: Any) -> str:
    """Return the text of one part of a content list."""
    if isinstance(part, str):
        return part
    kind, text = expect(where, part, dict).get("type"), part.get("text")
    if kind not in _TEXT_PARTS:
        shown = printable(kind, 40) if isinstance(kind, str) else type_name(kind)
        place = ", which only begins an answer" if kind in _THOUGHT_PARTS else ""
        raise BadLine("not_text", f"{where}.type is {shown!r}{place}")
    return expect(f"{where}.text", text, str)


def _turns_of_dialogue(text: str) -> list[dict[str, str]]:
    """Return the messages of a text like ``"\\n\\nHuman: Why?\\n\\nAssistant: Because."``."""
    _, *parts = _DIALOGUE_TURN.split(text)
    return [
        {"role": _DIALOGUE_ROLES[name], "content": content.strip()}
        for name, content in zip(parts[::2], parts[1::2])
    ]
