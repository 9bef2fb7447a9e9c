"""Conversion of one raw line to samples: strict JSON in one of five schemas.

The fields of each line decide its schema:

- ``messages``: a list of ``{"role": ..., "content": ...}``. Only assistant messages are trained,
  except those with ``"train": false``. A system message after the first message begins a new
  conversation, as in Megatron's SFT data, so one line can contain several documents. Fields that a
  chat template may use (``tool_calls``, ``name``, ``tools``) are passed on.
- ``conversations`` (ShareGPT): the same as ``messages``, with ``{"from": ..., "value": ...}`` and
  ShareGPT's role names. A ``system`` field of the line becomes the first message.
- ``prompt`` and ``completion``: only the completion is trained. If both are lists of messages, the
  line is a conversation of which only the messages of the completion are trained.
- ``instruction`` and ``output`` (Alpaca; Dolly's ``context`` and ``response`` also work): the user
  message is the instruction, an empty line, and the ``input``. The ``output`` is the answer. The
  ``system`` and ``history`` fields come before the user message.
- ``text``: every token is trained.

If a line has the fields of several schemas, the first schema of this list is used. If any part of a
line is bad, the complete line is rejected. A line with an empty answer is left out too, also if the
line is a conversation with other answers; `errors.EMPTY` lists the reasons.

The content of a message is a string or a list of parts (``{"type": "text", "text": ...}``). The
texts of a list are joined without a separator, so chat templates always get a string. A part of
another kind makes the line unusable.

`config.data_fields.DataFields` names other fields for each part of a schema.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from megatron_packed.config.data_fields import DataFields
from megatron_packed.data.errors import BadLine, printable
from megatron_packed.data.sources.line_fields import has_messages, renamed, suggestion
from megatron_packed.data.sources.strict_json import parse_object, type_name

ROLES = ("system", "user", "assistant", "tool")


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
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content list that are text."""
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


def parse_line(data: bytes, fields: DataFields | None = None) -> list[Sample]:
    """Parse one line into its samples, at least one.

    Args:
        fields: names of the fields of the line; None for the names of the schemas.
    Raises:
        BadLine: the line cannot be used, with the reason.
    """
    value = parse_object(data)
    if fields is not None:
        value = renamed(value, fields)
    if "messages" in value and not _is_sharegpt(value["messages"]):
        if fields is not None and isinstance(value["messages"], list):
            value["messages"] = [*_system_message(value), *value["messages"]]
        return _conversations(value, "messages")
    if "messages" in value or "conversations" in value:
        return _conversations(_from_sharegpt(value), "sharegpt")
    if "prompt" in value:
        if has_messages(value["prompt"]) and has_messages(value.get("completion")):
            return _conversations(_from_lists(value), "messages")
        return [_prompt_completion(value)]
    if "instruction" in value and ("output" in value or "response" in value):
        return _conversations(_from_alpaca(value), "alpaca")
    if "text" in value:
        text = _string(value, "text")
        if not text.strip():
            raise BadLine("empty_text")
        return [Text(text)]
    perhaps = suggestion(value)
    names = printable(", ".join(value)) or "none"
    raise BadLine("no_known_field", f"fields: {names}{f'; perhaps {perhaps}' * bool(perhaps)}")


def _is_sharegpt(turns: Any) -> bool:
    """Return True if the first message has ShareGPT's ``from`` in place of ``role``."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and "from" in first and "role" not in first


def _from_sharegpt(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a ShareGPT line to the ``messages`` schema."""
    turns = value["messages"] if "messages" in value else value["conversations"]
    if not isinstance(turns, list):
        raise BadLine("wrong_type", f"conversations is a {type_name(turns)}, not a list")
    messages = _system_message(value)
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadLine(
                "wrong_type", f"conversations[{number}] is a {type_name(turn)}, not an object"
            )
        role = turn.get("from", turn.get("role"))
        if isinstance(role, str):
            if role not in _SHAREGPT_ROLES:
                raise BadLine(
                    "unknown_role", f"conversations[{number}].from is {printable(role, 40)!r}"
                )
            role = _SHAREGPT_ROLES[role]
        message = {"role": role}
        for name in ("value", "content"):
            if name in turn:
                message.setdefault("content", turn[name])
        messages.append(message)
    return {"messages": messages, "tools": value.get("tools") or None}


def _from_alpaca(value: dict[str, Any]) -> dict[str, Any]:
    """Convert an Alpaca or Dolly line to the ``messages`` schema."""
    name = "response" if value.get("output") is None and "response" in value else "output"
    answer = "" if value[name] is None else _string(value, name)
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


def _from_lists(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a prompt and a completion that are lists of messages to the ``messages`` schema."""
    prompt = [
        {**message, "train": False} if message["role"] == "assistant" else message
        for message in value["prompt"]
    ]
    return {"messages": [*prompt, *value["completion"]], "tools": value.get("tools")}


def _system_message(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _string(value, "system")}] if value.get("system") else []


def _conversations(value: dict[str, Any], schema: str) -> list[Sample]:
    messages = value["messages"]
    if not isinstance(messages, list):
        raise BadLine("wrong_type", f"messages is a {type_name(messages)}, not a list")
    if not messages:
        raise BadLine("empty_messages")
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadLine("wrong_type", f"tools is a {type_name(tools)}, not a list")
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
        raise BadLine("wrong_type", f"{where} is a {type_name(message)}, not an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise BadLine("wrong_type", f"{where}.role is a {type_name(role)}, not a string")
    if role not in ROLES:
        raise BadLine("unknown_role", f"{where}.role is {printable(role, 40)!r}")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not (
        isinstance(tool_calls, list) and all(isinstance(c, dict) for c in tool_calls)
    ):
        raise BadLine("wrong_type", f"{where}.tool_calls is not a list of objects")
    content = message["content"] = _content(f"{where}.content", message)
    if role == "assistant" and not content.strip() and not tool_calls:
        raise BadLine("empty_assistant", where)
    train = message.get("train")
    if train is not None and (not isinstance(train, bool) or (train and role != "assistant")):
        raise BadLine("bad_train_flag", f"{where}.train is {printable(repr(train), 40)}")


def _content(where: str, message: dict[str, Any]) -> str:
    """Return the content of a message as one string."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(f"{where}[{at}]", part) for at, part in enumerate(content))
    answers = message["role"] == "assistant" and ("content" in message or message.get("tool_calls"))
    if content is None and answers:
        return ""
    raise BadLine("wrong_type", f"{where} is a {type_name(content)}, not a string")


def _part(where: str, part: Any) -> str:
    """Return the text of one part of a content list."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadLine("wrong_type", f"{where} is a {type_name(part)}, not an object")
    kind, text = part.get("type"), part.get("text")
    if kind not in _TEXT_PARTS:
        shown = printable(kind, 40) if isinstance(kind, str) else type_name(kind)
        raise BadLine("not_text", f"{where}.type is {shown!r}")
    if not isinstance(text, str):
        raise BadLine("wrong_type", f"{where}.text is a {type_name(text)}, not a string")
    return text


def _prompt_completion(value: dict[str, Any]) -> PromptCompletion:
    prompt = _string(value, "prompt")
    if "completion" not in value:
        raise BadLine("missing_completion")
    completion = "" if value["completion"] is None else _string(value, "completion")
    if not completion:
        raise BadLine("empty_completion")
    return PromptCompletion(prompt, completion)


def _string(value: dict[str, Any], field: str) -> str:
    text = value[field]
    if not isinstance(text, str):
        raise BadLine("wrong_type", f"{field} is a {type_name(text)}, not a string")
    return text
