"""Conversion of one raw line to samples: strict JSON in one of five schemas.

The fields of each line decide its schema:

- ``messages``: a list of ``{"role": ..., "content": ...}``. Only assistant messages are trained,
  except those with ``"train": false``. A system message after the first message begins a new
  conversation, as in Megatron's SFT data, so one line can contain several documents. Fields that a
  chat template may use (``tool_calls``, ``name``, ``tools``) are passed on.
- ``conversations`` (ShareGPT): the same as ``messages``, with ``{"from": ..., "value": ...}`` and
  ShareGPT's role names. A ``system`` field of the line becomes the first message.
- ``prompt`` and ``completion``: only the completion is trained.
- ``instruction`` and ``output`` (Alpaca; Dolly's ``context`` and ``response`` also work): the user
  message is the instruction, an empty line, and the ``input``. The ``output`` is the answer. The
  ``system`` and ``history`` fields come before the user message.
- ``text``: every token is trained.

If a line has the fields of several schemas, the first schema of this list is used. If any part of a
line is bad, the complete line is rejected.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_packed.data.errors import BadLine, printable

ROLES = ("system", "user", "assistant", "tool")
_MAX_NUMBER_CHARS = 4000
_MAX_DEPTH = 128
"""Deepest allowed nesting of objects and lists. Python's own limit differs between versions."""
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\\u[fF][dD][dD][0-2]|\xef\xb7[\x90-\x92]")
"""Matches a surrogate escape, or a reserved character, escaped or raw."""
_RESERVED = re.compile("[\ufdd0-\ufdd2]")


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    schema: str = "messages"


class PromptCompletion(NamedTuple):
    prompt: str
    completion: str


class Text(NamedTuple):
    text: str


Sample = Conversation | PromptCompletion | Text
"""Type of one document before tokenisation."""
TEXT_SCHEMA = "text"
FIELDS = frozenset(
    {
        "messages",
        "conversations",
        "tools",
        "prompt",
        "completion",
        "instruction",
        "output",
        "response",
        "input",
        "context",
        "system",
        "history",
        "text",
    }
)
"""All fields that a schema reads. Other fields of a line are ignored."""
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}


def schema_name(sample: Sample) -> str:
    """Return the name of the schema of a sample, for reports."""
    if isinstance(sample, Conversation):
        return sample.schema
    return "prompt/completion" if isinstance(sample, PromptCompletion) else TEXT_SCHEMA


def parse_line(data: bytes) -> list[Sample]:
    """Parse one line into its samples, at least one.

    Raises:
        BadLine: the line cannot be used, with the reason.
    """
    value = parse_object(data)
    if "messages" in value:
        return _conversations(value, "messages")
    if "conversations" in value:
        return _conversations(_from_sharegpt(value), "sharegpt")
    if "prompt" in value:
        return [_prompt_completion(value)]
    if "instruction" in value and ("output" in value or "response" in value):
        return _conversations(_from_alpaca(value), "alpaca")
    if "text" in value:
        text = _string(value, "text")
        if not text.strip():
            raise BadLine("empty_text")
        return [Text(text)]
    raise BadLine("no_known_field", f"fields: {printable(', '.join(value)) or 'none'}")


# ----------------------------------------------------------------------------------------------------------------
# JSON


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse one line strictly as a JSON object.

    Raises:
        BadLine: the line is no JSON object, or JSON readers could interpret it differently.
    """
    value = _parse_json(data)
    if not isinstance(value, dict):
        raise BadLine("not_an_object", f"the line is a JSON {_type_name(value)}")
    return value


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
        raise BadLine("malformed_json", str(error)) from None
    if data.count(b"{") + data.count(b"[") > _MAX_DEPTH:
        _check_depth(value)
    # Surrogates and reserved characters are rare, so a fast search of the raw bytes decides whether
    # the strings are checked.
    if (b"\\u" in data or b"\xef\xb7" in data) and _SUSPECT.search(data):
        _check_characters(value)
    return value


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


def _check_characters(value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadLine("lone_surrogate") from None
    if _RESERVED.search(text):
        raise BadLine("reserved_character")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadLine("duplicate_key", printable(twice))
    return value


def _no_constant(name: str) -> Any:
    raise BadLine("nan_literal", name)


def _integer(digits: str) -> int:
    _check_digits(digits)
    return int(digits)


def _float(digits: str) -> float:
    _check_digits(digits)
    return float(digits)


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


# -------------------------------------------------------------------------------------------------------------
# schemas


def _from_sharegpt(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a ShareGPT line to the ``messages`` schema."""
    turns = value["conversations"]
    if not isinstance(turns, list):
        raise BadLine("wrong_type", f"conversations is a {_type_name(turns)}, not a list")
    messages = _system_message(value)
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadLine(
                "wrong_type", f"conversations[{number}] is a {_type_name(turn)}, not an object"
            )
        role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if isinstance(role, str):
            if role not in _SHAREGPT_ROLES:
                raise BadLine(
                    "unknown_role", f"conversations[{number}].from is {printable(role, 40)!r}"
                )
            role = _SHAREGPT_ROLES[role]
        messages.append({"role": role, "content": content})
    return {"messages": messages, "tools": value.get("tools") or None}


def _from_alpaca(value: dict[str, Any]) -> dict[str, Any]:
    """Convert an Alpaca or Dolly line to the ``messages`` schema."""
    name = "output" if "output" in value else "response"
    answer = _string(value, name)
    if not answer.strip():
        raise BadLine("empty_assistant", name)
    question = _string(value, "instruction")
    for name in ("input", "context"):
        if value.get(name):
            question += "\n\n" + _string(value, name)
    messages = _system_message(value)
    history = value.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise BadLine("wrong_type", "history is not a list of pairs of strings")
    for user, assistant in [*history, (question, answer)]:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"messages": messages}


def _system_message(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _string(value, "system")}] if value.get("system") else []


def _conversations(value: dict[str, Any], schema: str) -> list[Sample]:
    messages = value["messages"]
    if not isinstance(messages, list):
        raise BadLine("wrong_type", f"messages is a {_type_name(messages)}, not a list")
    if not messages:
        raise BadLine("empty_messages")
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadLine("wrong_type", f"tools is a {_type_name(tools)}, not a list")
    for number, message in enumerate(messages):
        _check_message(f"messages[{number}]", message)
    starts = [
        0,
        *(n for n, message in enumerate(messages) if n and message["role"] == "system"),
        len(messages),
    ]
    parts = [messages[start:end] for start, end in pairwise(starts)]
    for part in parts:
        if not any(message["role"] == "assistant" for message in part):
            raise BadLine(
                "no_assistant",
                f"{len(part)} messages"
                if len(parts) == 1
                else "a system message begins a new conversation, and one of the conversations has none",
            )
    return [Conversation(part, tools, schema) for part in parts]


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise BadLine("wrong_type", f"{where} is a {_type_name(message)}, not an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise BadLine("wrong_type", f"{where}.role is a {_type_name(role)}, not a string")
    if role not in ROLES:
        raise BadLine("unknown_role", f"{where}.role is {printable(role, 40)!r}")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not (
        isinstance(tool_calls, list) and all(isinstance(c, dict) for c in tool_calls)
    ):
        raise BadLine("wrong_type", f"{where}.tool_calls is not a list of objects")
    content = message.get("content")
    if content is None and role == "assistant" and tool_calls:
        message["content"] = ""
    elif not isinstance(content, str):
        raise BadLine("wrong_type", f"{where}.content is a {_type_name(content)}, not a string")
    elif role == "assistant" and not content.strip() and not tool_calls:
        raise BadLine("empty_assistant", where)
    train = message.get("train")
    if train is not None and (not isinstance(train, bool) or (train and role != "assistant")):
        raise BadLine("bad_train_flag", f"{where}.train is {printable(repr(train), 40)}")


def _prompt_completion(value: dict[str, Any]) -> PromptCompletion:
    prompt = _string(value, "prompt")
    if "completion" not in value:
        raise BadLine("missing_completion")
    completion = _string(value, "completion")
    if not completion:
        raise BadLine("empty_completion")
    return PromptCompletion(prompt, completion)


def _string(value: dict[str, Any], field: str) -> str:
    text = value[field]
    if not isinstance(text, str):
        raise BadLine("wrong_type", f"{field} is a {_type_name(text)}, not a string")
    return text


def _type_name(value: Any) -> str:
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
