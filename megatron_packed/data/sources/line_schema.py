"""Conversion of one raw line to samples: strict JSON in one of six schemas.

The fields of each line decide its schema:

- ``messages``: a list of ``{"role": ..., "content": ...}``, as `line_messages` reads them. Only
  assistant messages are trained, except those that a mask excludes (`message_masks`). A ``system``
  field of the line becomes the first message. A system message after the first message begins a new
  conversation, as in Megatron's SFT data, so one line can contain several documents. Fields that a
  chat template may use (``tool_calls``, ``name``, ``tools``) are passed on.
- ``conversations`` (ShareGPT): the same as ``messages``, with ``{"from": ..., "value": ...}`` and
  ShareGPT's role names.
- ``prompt`` and ``completion``: only the completion is trained. If the prompt is a list of messages,
  the line is a conversation of which only the completion is trained: one answer, or messages.
- ``instruction`` and ``output`` (Alpaca; Dolly's ``context`` and ``response`` also work): the user
  message is the instruction, an empty line, and the ``input``. The ``output`` is the answer. The
  ``system`` and ``history`` fields come before the user message.
- ``text``: every token is trained.
- ``input_ids`` or ``token_ids``: tokens, with the targets that `token_lines` describes.

If a line has the fields of several schemas, the first schema of this list is used. If any part of a
line is bad, the complete line is rejected. A line with an empty answer is left out too, also if the
line is a conversation with other answers; `errors.EMPTY` lists the reasons. A null field counts as
absent, except that a null answer is an empty answer. Fields that are not read get a note.

`config.data_fields.DataFields` names other fields for each part of a schema. Preference data is
recognised and refused (`preference_lines`), unless such names choose the part to train on.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_packed.config.data_fields import ANSWERS, LABEL, DataFields
from megatron_packed.data.errors import BadLine, Notes, printable
from megatron_packed.data.sources.line_fields import (
    ANSWER_FIELDS,
    OPTIONAL_FIELDS,
    data_fields_flag,
    lost_fields,
    renamed,
    suggestion,
    suggestion_for_prompt,
    with_optional,
)
from megatron_packed.data.sources.line_messages import (
    has_messages,
    has_sharegpt_names,
    is_message,
    parse_messages,
    unknown_fields,
)
from megatron_packed.data.sources.message_masks import LISTED_MASK, TRAIN
from megatron_packed.data.sources.preference_lines import (
    PREFERENCE_ANSWERS,
    PREFERENCE_FIELDS,
    check_no_preferences,
)
from megatron_packed.data.sources.strict_json import JsonObject, expect, object_of_line
from megatron_packed.data.sources.token_lines import (
    TOKEN_FIELDS,
    TOKEN_ID_FIELDS,
    token_sequence,
)
from megatron_packed.data.sources.token_lines import TokenSequence as TokenSequence
from megatron_packed.data.sources.tool_fields import (
    null_arguments,
    parse_objects,
    text_arguments,
    without_nulls,
)


class Conversation(NamedTuple):
    """Messages of one document, and the tools that its assistant can call."""

    messages: list[JsonObject]
    tools: list[Any] | None = None
    schema: str = "messages"
    instruction: str | None = None
    """Text with which the last user message begins and which shortening never cuts."""


class PromptCompletion(NamedTuple):
    prompt: str
    completion: str


class Text(NamedTuple):
    text: str


LineSample = Conversation | PromptCompletion | Text | TokenSequence
"""Type of one document before tokenisation."""
TEXT_SCHEMA = "text"
TOKEN_SCHEMA = "input_ids"  # noqa: S105 (no password)
PROMPT_SCHEMA = "prompt/completion"
NO_CHAT = (TEXT_SCHEMA, TOKEN_SCHEMA, PROMPT_SCHEMA)
"""Schemas of lines that no chat template renders."""
_CHATS = ("messages", "conversations")
_OF_CHAT = frozenset({"system", "tools", LISTED_MASK})
"""Fields that are read beside a list of messages."""
_OF_ALPACA = frozenset({"instruction", "input", "context", "system", "history", "tools"})
DECIDING = frozenset(
    {*_CHATS, "prompt", "instruction", "text", "chosen", "preferred_output", *TOKEN_ID_FIELDS}
)
"""Fields of which a line needs one to have a schema. The others only add to a schema."""
FIELDS = (
    DECIDING
    | _OF_CHAT
    | _OF_ALPACA
    | TOKEN_FIELDS
    | PREFERENCE_FIELDS
    | ANSWER_FIELDS
    | OPTIONAL_FIELDS
)
"""All fields that a schema reads, that decide how a line is read, or that a cure can name."""


class _Parsed(NamedTuple):
    """Samples of a line, and the fields that they come from."""

    samples: list[LineSample]
    read: Iterable[str]
    """Fields of the line that were read."""
    unknown: Iterable[str] = ()
    """Fields of its messages whose meaning is not known."""


def deciding_among(fields: Iterable[str]) -> set[str]:
    """Return the fields of which a line needs one: all of them if none decides a schema."""
    return {*fields} & DECIDING or {*fields}


def schema_name(sample: LineSample) -> str:
    if isinstance(sample, Conversation):
        return sample.schema
    if isinstance(sample, PromptCompletion):
        return PROMPT_SCHEMA
    return TOKEN_SCHEMA if isinstance(sample, TokenSequence) else TEXT_SCHEMA


def parse_line(
    data: bytes, fields: DataFields | None = None, notes: Notes | None = None
) -> list[LineSample]:
    """Parse one line into its samples, at least one.

    Args:
        fields: names of the fields of the line; None for the names of the schemas.
        notes: receives ``("unread_field", name)`` once for each field with a value that is not
            read. ``messages[].NAME`` is a field of messages. A field that ``fields`` leaves out is
            the choice of the user, and gets a note only if it is one of `OPTIONAL_FIELDS`. Null
            arguments of tool calls and arguments that stay a text get a note, too.
    Raises:
        BadLine: the line cannot be used, with the reason.
    """
    line = object_of_line(data)
    if fields is None:
        if not PREFERENCE_ANSWERS.isdisjoint(line):
            check_no_preferences(line)
        values = [line]
    else:
        values = [_accepted(value) for value in renamed(line, fields)]
    samples: list[LineSample] = []
    unread: set[str] = set()
    for value in values:
        if b"null" in data:
            value = _without_null_fields(value)
        try:
            parsed = _parse(value)
        except BadLine as bad_line:
            raise _with_cure(bad_line, value, fields) from None
        samples += parsed.samples
        unread.update(f"messages[].{name}" for name in parsed.unknown)
        if fields is None:
            unread.update(
                name
                for name, part in value.items()
                if part not in (None, "", [], {}) and name not in parsed.read
            )
    if fields is not None:
        unread |= lost_fields(line, fields)
    if notes is not None:
        notes.update(("unread_field", printable(name, 60)) for name in unread)
        if b"null" in data:
            nulls = null_arguments([line.get("messages"), line.get("conversations")])
            notes.update(("null_argument", printable(name, 60)) for name in nulls)
        for sample in samples:
            if isinstance(sample, Conversation):
                called = text_arguments(sample.messages)
                notes.update(("text_argument", printable(name, 60)) for name in called)
    return samples


def _with_cure(bad_line: BadLine, value: JsonObject, fields: DataFields | None) -> BadLine:
    """Return an error with the flag that reads ShareGPT's roles in ``messages``, if it does."""
    if bad_line.reason != "unknown_role" or "messages" not in value:
        return bad_line
    try:
        parse_messages("messages", value["messages"], sharegpt=True)
    except BadLine:
        return bad_line
    if fields is None:
        pairs = with_optional(value, [("conversations", "messages")])
    else:
        renaming = {"messages": "conversations"}
        pairs = [(renaming.get(name, name), path) for name, path in fields.paths]
    return BadLine(
        bad_line.reason, f"{bad_line.detail}; {data_fields_flag(pairs)} reads such roles"
    )


def _accepted(value: JsonObject) -> JsonObject:
    """Return the targets of a line without its label, which must be true."""
    label = value.pop(LABEL, True)
    if not isinstance(label, bool) and label not in (0, 1):
        shown = printable(repr(label), 40)
        raise BadLine("wrong_type", f"{LABEL} is {shown}, not true or false")
    if not label:
        raise BadLine("rejected_answer")
    return value


def _without_null_fields(value: JsonObject) -> JsonObject:
    """Return a line without null fields, as a row of a table has them, and without null keys of
    tools. A null answer stays.
    """
    fields = {name: part for name, part in value.items() if part is not None or name in ANSWERS}
    if DECIDING.isdisjoint(fields):
        name = next((name for name in value if name in DECIDING), None)
        if name is not None:
            raise BadLine("wrong_type", f"{name} is a null")
    if "tools" in fields:
        fields["tools"] = without_nulls(fields["tools"])
    return fields


def _parse(value: JsonObject) -> _Parsed:
    """Parse a line with the fields of a schema."""
    for name in _CHATS:
        if name in value:
            return _chat(name, value)
    if "prompt" in value:
        return _prompt(value)
    if "instruction" in value and ("output" in value or "response" in value):
        return _alpaca(value)
    if "text" in value:
        text = _string(value, "text")
        if not text.strip():
            raise BadLine("empty_text")
        return _Parsed([Text(text)], {"text"})
    if any(name in value for name in TOKEN_ID_FIELDS):
        return _Parsed([token_sequence(value)], TOKEN_FIELDS)
    raise BadLine("no_known_field", _fields_and_cure(value, suggestion(value)))


def _fields_and_cure(value: JsonObject, cure: str) -> str:
    names = printable(", ".join(value)) or "none"
    return f"fields: {names}{f'; perhaps {cure}' * bool(cure)}"


def _chat(name: str, value: JsonObject) -> _Parsed:
    """Parse a line with a list of messages."""
    is_sharegpt = name == "conversations" or has_sharegpt_names(value[name])
    messages = parse_messages(
        name, value[name], sharegpt=is_sharegpt, listed_mask=value.get(LISTED_MASK)
    )
    schema = "sharegpt" if is_sharegpt else "messages"
    return _conversations(value, messages, schema, {name, *_OF_CHAT})


def _prompt(value: JsonObject) -> _Parsed:
    """Parse a line with a prompt and a completion: texts, or messages.

    A text that completes messages is an answer of the assistant.
    """
    prompt, completion = value["prompt"], value.get("completion")
    if has_messages(prompt) and isinstance(completion, str) and completion.strip():
        completion = {"role": "assistant", "content": completion}
    if has_messages(prompt) and (has_messages(completion) or is_message(completion)):
        messages = []
        for name, part in (("prompt", prompt), ("completion", completion)):
            turns = [part] if is_message(part) else part
            messages.append(parse_messages(name, turns, sharegpt=has_sharegpt_names(turns)))
        for message in messages[0]:
            if message["role"] == "assistant":
                message[TRAIN] = False
        read = {"prompt", "completion", "system", "tools"}
        return _conversations(value, [*messages[0], *messages[1]], "messages", read)
    if "completion" not in value and (isinstance(prompt, str) or has_messages(prompt)):
        raise BadLine("missing_completion", _fields_and_cure(value, suggestion_for_prompt(value)))
    completion = "" if completion is None else _string(value, "completion")
    if has_messages(prompt) and not completion.strip():
        raise BadLine("empty_completion")
    prompt = _string(value, "prompt")
    if not completion:
        raise BadLine("empty_completion")
    return _Parsed([PromptCompletion(prompt, completion)], {"prompt", "completion"})


def _alpaca(value: JsonObject) -> _Parsed:
    """Parse an Alpaca or Dolly line."""
    name = "response" if value.get("output") is None and "response" in value else "output"
    answer = "" if value[name] is None else _string(value, name)
    if not answer.strip():
        raise BadLine("empty_assistant", name)
    instruction = question = _string(value, "instruction")
    for field in ("input", "context"):
        if value.get(field):
            question += "\n\n" + _string(value, field)
    history = value.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise BadLine("wrong_type", "history is not a list of pairs of strings")
    turns = []
    for user, assistant in [*history, (question, answer)]:
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    read = _OF_ALPACA | {name}
    messages = parse_messages("history", turns)
    return _conversations(value, messages, "alpaca", read, instruction or None)


def _conversations(
    value: JsonObject,
    messages: list[JsonObject],
    schema: str,
    read: Iterable[str],
    instruction: str | None = None,
) -> _Parsed:
    """Return the conversations of a line: each system message begins one."""
    tools = parse_objects("tools", value.get("tools"))
    unknown = unknown_fields(messages)
    messages = [*_system_message(value, messages), *messages]
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
    return _Parsed(
        [Conversation(part, tools, schema, instruction) for part in parts], read, unknown
    )


def _system_message(value: JsonObject, messages: list[JsonObject]) -> list[JsonObject]:
    """Return the message of the ``system`` field; no message if the messages begin with it."""
    if not value.get("system"):
        return []
    system = {"role": "system", "content": _string(value, "system")}
    first = messages[0]
    if first["role"] != "system":
        return [system]
    if first["content"] != system["content"]:
        shown = printable(repr(first["content"]), 60)
        raise BadLine(
            "contradictory_system",
            f"system is {printable(repr(system['content']), 60)}, the first message {shown}",
        )
    return []


def _string(value: JsonObject, field: str) -> str:
    return expect(field, value[field], str)
