"""Tests of the schemas of a line, and of the reason for each kind of bad line."""

import json
import time
from collections import Counter

import pytest

from megatron_packed.config.data_fields import DataFields
from megatron_packed.data.errors import REASONS, BadLine
from megatron_packed.data.sources.line_schema import (
    Conversation,
    PromptCompletion,
    Text,
    parse_line,
    schema_name,
)
from support.data_helpers import samples_of
from support.messages import assistant, tool, user

USER = user("q")
ASSISTANT = assistant("a")


def chat(*messages, **fields):
    return json.dumps({"messages": list(messages), **fields}).encode()


BAD = {
    "nul_byte": [
        b'{"text": "a\x00b"}',
    ],
    "invalid_utf8": [
        b'{"text": "a\xff"}',
        b'{"text": "\xed\xa0\x80"}',  # a surrogate encoded as three bytes
        '{"text": "a"}'.encode("utf-16"),
    ],
    "malformed_json": [
        b'{"text": "a"',
        b'{"text": "a"} {}',
        b"text",
        b'{"text": "a\tb"}',  # a raw control character
        b"{'text': 'a'}",
        b'[{"text": "a"},',
    ],
    "too_deep": [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"text": "a", "x": ' + b"[" * 128 + b"]" * 128 + b"}",
    ],
    "nan_literal": [
        b'{"text": NaN}',
        b'{"text": "a", "x": [-Infinity]}',
    ],
    "huge_number": [
        b'{"text": "a", "x": ' + b"1" * 100_000 + b"}",
        b'{"text": "a", "x": 0.' + b"1" * 100_000 + b"}",
        b'{"text": "a", "x": -1e999}',  # Python reads it as -Infinity
    ],
    "duplicate_key": [
        b'{"text": "a", "text": "b"}',
        b'{"text": "a", "x": {"k": 1, "k": 1}}',
    ],
    "lone_surrogate": [
        b'{"text": "\\ud800"}',
        b'{"text": "\\uDC00x"}',
        chat(USER, {**ASSISTANT, "tool_calls": [{"a": "\udcff"}]}),
    ],
    "reserved_character": [
        b'{"text": "\\ufdd1"}',
        '{"text": "\ufdd0"}'.encode(),
    ],
    "not_an_object": [
        b"[]",
        b"null",
        b'"text"',
    ],
    "no_known_field": [
        b"{}",
        b'{"instruction": "a"}',
        b'{"completion": "a"}',
    ],
    "empty_assistant": [
        b'{"instruction": "a", "output": ""}',
        b'{"instruction": "a", "output": null}',
        chat(USER, assistant(None)),
        chat(USER, assistant([])),
        chat(USER, ASSISTANT, USER, assistant("")),
        chat(USER, assistant("")),
        chat(USER, assistant(" \n")),
    ],
    "wrong_type": [
        b'{"instruction": "a", "input": 3, "output": "b"}',
        b'{"instruction": "a", "output": "b", "history": [["x"]]}',
        b'{"conversations": "a"}',
        b'{"conversations": [{"from": "gpt"}]}',
        b'{"conversations": [{"from": "function_call", "value": "f"}]}',
        b'{"text": 1}',
        b'{"text": null}',
        b'{"prompt": ["a"], "completion": "b"}',
        b'{"prompt": "a", "completion": {}}',
        b'{"messages": {}}',
        chat(USER, ASSISTANT, tools={}),
        chat("hi", ASSISTANT),
        chat({"content": "a"}, ASSISTANT),
        chat({"role": 1, "content": "a"}, ASSISTANT),
        chat({"role": "user"}, ASSISTANT),
        chat(user([{"type": "text", "text": None}]), ASSISTANT),
        chat(user([7]), ASSISTANT),
        chat(user(None), ASSISTANT),
        chat(USER, {"role": "assistant"}),
        chat(USER, {**ASSISTANT, "tool_calls": "f"}),
        chat(USER, {**ASSISTANT, "tool_calls": ["f"]}),
        b'{"input_ids": null}',
        b'{"messages": null, "completion": "a"}',
    ],
    "empty_messages": [
        b'{"conversations": []}',
        chat(),
    ],
    "unknown_role": [
        b'{"conversations": [{"from": "calling", "value": "f"}]}',
        chat({"role": "bot", "content": "a"}, ASSISTANT),
        chat({"role": "User", "content": "a"}, ASSISTANT),
    ],
    "no_assistant": [
        b'{"conversations": [{"from": "human", "value": "a"}]}',
        chat(USER),
        chat(USER, ASSISTANT, {"role": "system", "content": "s"}, USER),
    ],
    "empty_text": [
        b'{"text": " \\n"}',
        b'{"input_ids": []}',
    ],
    "missing_completion": [
        b'{"prompt": "a"}',
    ],
    "empty_completion": [
        b'{"prompt": "a", "completion": ""}',
        b'{"prompt": "a", "completion": null}',
    ],
    "not_text": [
        chat(user([{"type": "image_url"}]), ASSISTANT),
        chat(user([{"text": "a"}]), ASSISTANT),
    ],
    "bad_train_flag": [
        chat(USER, {**ASSISTANT, "train": 1}),
        chat({**USER, "train": True}, ASSISTANT),
    ],
    "contradictory_masks": [
        chat(USER, {**ASSISTANT, "loss": False, "weight": 1}),
    ],
    "contradictory_system": [
        chat({**USER, "role": "system"}, ASSISTANT, system="s"),
    ],
    "preference_data": [
        b'{"chosen": "a", "rejected": "b"}',
    ],
}


@pytest.mark.parametrize(
    ("reason", "n"), [(reason, n) for reason, lines in BAD.items() for n in range(len(lines))]
)
def test_a_bad_line_is_refused_with_its_reason(reason, n):
    with pytest.raises(BadLine) as caught:
        parse_line(BAD[reason][n])
    assert caught.value.reason == reason
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"<!DOCTYPE html>", "a web page"),
    ],
)
def test_a_file_that_a_download_left_is_named(data, detail):
    """A pointer of Git LFS and a web page are named, because their cure is another download."""
    with pytest.raises(BadLine, match=detail):
        parse_line(data)


def test_a_repeated_key_among_many_is_found_at_once():
    """An object of 300,000 keys takes less than 20 s of CPU time; comparing all pairs takes hours."""
    keys = ",".join(f'"{number}":1' for number in range(300_000))
    start = time.process_time()
    with pytest.raises(BadLine, match="duplicate_key: 299999"):
        parse_line(f'{{{keys},"299999":1}}'.encode())
    assert time.process_time() - start < 20


def test_every_reason_of_a_line_is_covered():
    elsewhere = {
        "line_too_long",
        "corrupt_stream",
        "corrupt_array",
        "read_error",
        "no_trainable_token",
        "special_token_in_content",
        "rejected_answer",
    }
    elsewhere |= {
        "token_across_boundary",
        "template_error",
        "template_prefix",
        "template_spans",
        "template_limit",
        "not_printed",
        "no_question",
        "question_too_long",
        "token_outside",
        "all_masked",
    }
    preprocessing = {
        "missing_key",
        "tokenizer_failed",
        "tokenizer_limit",
        "not_a_token_number",
        "killed_worker",
    }
    assert BAD.keys() | elsewhere | preprocessing == set(REASONS)


@pytest.mark.shows("Data", "messages", "prompt and completion", "text")
def test_good_lines():
    assert parse_line(b'{"text": "a", "x": ' + b"[" * 127 + b"]" * 127 + b"}") == [Text("a")]
    assert parse_line('{"text": "é \\u0000 \\ud83d\\ude00"}'.encode()) == [Text("é \0 😀")]
    assert parse_line(b'{"prompt": "", "completion": " x"}') == [PromptCompletion("", " x")]
    assert parse_line(chat(USER, ASSISTANT, text="t")) == [Conversation([USER, ASSISTANT], None)]
    call = assistant(None, tool_calls=[{"function": {"name": "f"}}])
    [sample] = parse_line(chat(USER, call, tool("1"), tools=[{"name": "f"}]))
    assert sample.messages[1] == {**call, "content": ""}
    assert sample.tools == [{"name": "f"}]
    assert parse_line(chat(USER, {**ASSISTANT, "train": False}, {**ASSISTANT, "train": True}))


@pytest.mark.shows("Data", "ShareGPT", "Alpaca")
def test_sharegpt_and_alpaca_are_conversations():
    system = {"role": "system", "content": "s"}
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    sharegpt = [
        {"conversations": turns, "system": "s", "tools": ""},
        {"conversations": [{"from": "system", "value": "s"}, *turns], "id": 7},
    ]
    for value in sharegpt:
        [sample] = samples_of(value)
        assert sample == Conversation([system, USER, ASSISTANT], None, "sharegpt")
    [sample] = parse_line(b'{"instruction": "q", "input": "", "output": "a", "text": "q a"}')
    assert sample == Conversation([USER, ASSISTANT], None, "alpaca", "q")
    [sample] = parse_line(
        b'{"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q", "a"]]}'
    )
    assert sample.messages == [
        system,
        USER,
        ASSISTANT,
        user("q\n\ni"),
        ASSISTANT,
    ]
    [sample] = parse_line(b'{"instruction": "q", "context": "i", "response": "a", "category": "c"}')
    assert sample.messages == [user("q\n\ni"), ASSISTANT]
    assert sample.instruction == "q" and schema_name(sample) == "alpaca"


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("user", "human user"),
        ("assistant", "gpt chatgpt model assistant"),
        ("tool", "tool function function_response observation"),
        ("system", "system developer"),
    ],
)
def test_every_name_that_sharegpt_has_for_a_role(role, names):
    for name in names.split():
        turns = [{"from": name, "value": "x"}, {"from": "gpt", "value": "a"}]
        if name == role:  # the turn has ``role`` and ``content`` instead of ``from`` and ``value``
            turns[0] = {"role": name, "content": "x"}
        [sample] = samples_of({"conversations": turns})
        assert sample.messages[0] == {"role": role, "content": "x"}, name


def test_of_fields_of_several_schemas_the_first_decides():
    line = {
        "input_ids": [1],
        "text": "t",
        "instruction": "i",
        "output": "o",
        "prompt": "p",
        "completion": "c",
        "conversations": [{"from": "gpt", "value": "g"}],
        "messages": [ASSISTANT],
    }
    order = []
    while line:
        [sample] = samples_of(line)
        order.append(schema_name(sample))
        for field in {
            "prompt/completion": ("prompt", "completion"),
            "sharegpt": ("conversations",),
            "alpaca": ("instruction", "output"),
        }.get(order[-1], (order[-1],)):
            del line[field]
    assert order == ["messages", "sharegpt", "prompt/completion", "alpaca", "text", "input_ids"]


def test_a_later_system_message_begins_a_new_conversation():
    system = {"role": "system", "content": "s"}
    first, second = parse_line(chat(system, USER, ASSISTANT, system, ASSISTANT))
    assert first.messages == [system, USER, ASSISTANT]
    assert second.messages == [system, ASSISTANT]


def test_the_system_field_is_the_first_message():
    """It is so for every list of messages, and the same text twice is one message."""
    system = {"role": "system", "content": "s"}
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for line in (
        {"messages": [USER, ASSISTANT]},
        {"messages": [{**system, "content": [{"type": "text", "text": "s"}]}, USER, ASSISTANT]},
        {"conversations": turns},
        {"conversations": [{"from": "system", "value": "s"}, *turns]},
        {"prompt": [USER], "completion": [ASSISTANT]},
    ):
        [sample] = samples_of({**line, "system": "s"})
        assert sample.messages == [system, USER, ASSISTANT]
        [same] = samples_of({"system": "", **line})
        assert same.messages[-2:] == [USER, ASSISTANT]


def test_null_fields_are_absent():
    """Tables have every field in every row, and so have JSON lines that were tables before."""
    line = {
        "messages": None,
        "prompt": None,
        "output": None,
        "system": None,
        "loss_mask": None,
        "conversations": [
            {"from": "human", "value": "q", "content": None, "role": None, "tool_calls": None},
            {"from": "gpt", "value": None, "content": "a", "role": None, "train": None},
        ],
    }
    assert samples_of(line) == [Conversation([USER, ASSISTANT], None, "sharegpt")]
    line = {"messages": [USER, {**ASSISTANT, "value": None}], "input_ids": None, "label": None}
    assert samples_of(line) == [Conversation([USER, ASSISTANT])]


def noted(line, fields=None):
    notes = Counter()
    samples_of(line, fields, notes)
    return notes


def test_fields_that_are_not_read_are_noted_once_a_line():
    """A field of another schema is not read; empty fields have nothing to lose."""
    unknown = {**ASSISTANT, "id": 1, "reasoning_content": "r", "weight": 1, "refusal": None}
    line = {"id": 0, "text": "t", "meta": {}, "source": None, "tools": [], "system": "s"}
    expected = {"id", "text", "messages[].id"}
    assert noted({**line, "messages": [USER, unknown, USER, unknown]}) == Counter(
        ("unread_field", name) for name in expected
    )
    turns = [{"from": "gpt", "value": "a", "score": 3}]
    assert noted({"conversations": turns}) == {("unread_field", "messages[].score"): 1}
    line = {"prompt": "p", "completion": "c", "system": "s", "train": False}
    assert noted(line).keys() == {("unread_field", "system"), ("unread_field", "train")}
    line = {"instruction": "i", "context": "c", "output": "o", "tools": "[]", "category": "x"}
    assert noted(line) == {("unread_field", "category"): 1}
    fields = DataFields.from_pairs([("messages", "talk")])
    line = {"id": 0, "talk": [USER, {**ASSISTANT, "mood": "calm"}]}
    assert noted(line, fields) == {("unread_field", "messages[].mood"): 1}


def test_fields_with_a_meaning_that_no_path_names_are_noted():
    """Other fields that no path names are the choice of the user, and empty ones lose nothing."""
    fields = DataFields.from_pairs([("instruction", "input"), ("output", "a")])
    meant = ["system", "system_prompt", "tools", "functions", "history", "context", "loss_mask"]
    line = {"id": 1, "label": 1, "text": "t", "input": "q", "a": "a", **dict.fromkeys(meant, "s")}
    assert noted(line, fields) == {("unread_field", name): 1 for name in meant}
    assert not noted({**line, **dict.fromkeys(meant, "")}, fields)
    fields = DataFields.from_pairs([("prompt", "context.q"), ("completion", "rows[*].a")])
    line = {"context": {"q": "q", "id": 1}, "rows": [{"a": "a"}, {"a": "b"}], "input": "i"}
    assert noted(line, fields) == {("unread_field", "input"): 1}


def test_roles_of_newer_and_older_messages_of_openai():
    messages = [
        {"role": "developer", "content": "s"},
        USER,
        assistant(None, function_call={"name": "f", "arguments": "{}"}),
        {"role": "function", "name": "f", "content": "1"},
        ASSISTANT,
    ]
    [sample] = parse_line(chat(*messages))
    roles = [message["role"] for message in sample.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert sample.messages[3] == {"role": "tool", "name": "f", "content": "1"}


def test_unknown_fields_of_messages_go_to_the_template():
    for line in (
        {"messages": [USER, {**ASSISTANT, "mood": "calm"}]},
        {"conversations": [{"from": "gpt", "value": "a", "mood": "calm"}]},
    ):
        [sample] = samples_of(line)
        assert sample.messages[-1] == {**ASSISTANT, "mood": "calm"}
