"""Tests of --data-fields on single lines: nested names, lists, indexes, and absent fields."""

import json

import pytest

from megatron_packed.config.data_fields import DataFields, pairs_of
from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.line_fields import columns_of, field_names
from megatron_packed.data.sources.line_schema import (
    Conversation,
    PromptCompletion,
    Text,
    parse_line,
)

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def parsed(line: dict, words: str) -> list:
    return parse_line(json.dumps(line).encode(), DataFields.of(pairs_of([words])))


@pytest.mark.parametrize(
    ("field", "path", "answer"),
    [
        ({"a": "x"}, "a", "x"),
        ({"a": {"b": {"c": "x"}}}, "a.b.c", "x"),
        ({"a.b": "x", "a": {"b": "y"}}, "a.b", "x"),
        ({"a": {"b.c": "x"}}, "a.b.c", "x"),
        ({"a": ["x", "y"]}, "a", "x\ny"),
        ({"a": ["x", None, "y"]}, "a", "x\ny"),
        ({"a": ["x", "y"]}, "a.1", "y"),
        ({"a": [{"b": "x"}, {"c": "z"}, {"b": ["y", "w"]}]}, "a.b", "x\ny\nw"),
        ({"a": [{"b": "x"}, {"b": "y"}]}, "a.-1.b", "y"),
        ({"a": {"0": "x"}}, "a.0", "x"),
    ],
)
def test_paths(field: dict, path: str, answer: str) -> None:
    """A dot enters an object, a number selects an element, and other lists are joined."""
    [sample] = parsed({"q": "why", **field}, f"prompt=q,completion={path}")
    assert sample == PromptCompletion("why", answer)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"a": ""}, "empty_completion"),
        ({"a": None}, "empty_completion"),
        ({"a": []}, "empty_completion"),
        ({}, "empty_completion"),
        ({"a": [], "q": None}, "missing_key"),
        ({"a": 3}, "wrong_type"),
        ({"a": ["x", {"y": "z"}]}, "wrong_type"),
    ],
)
def test_a_line_without_a_usable_field(field: dict, reason: str) -> None:
    """A missing answer is an empty answer; a missing prompt makes the line unusable."""
    with pytest.raises(BadLine) as caught:
        parsed({"q": "why", **field}, "prompt=q,completion=a")
    assert caught.value.reason == reason


def test_every_schema_can_have_other_names() -> None:
    """Other fields of the line are not read, even if their names are those of a schema."""
    assert parsed({"body": "t", "messages": []}, "text=body") == [Text("t")]
    talk = [Conversation([SYSTEM, USER, ASSISTANT], [{"name": "f"}])]
    line = {"talk": {"turns": [USER, ASSISTANT]}, "s": "s", "t": [{"name": "f"}]}
    assert parsed(line, "messages=talk.turns,system=s,tools=t") == talk
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for target in ("messages", "conversations"):
        [sample] = parsed({"dialog": turns, "who": "s"}, f"{target}=dialog,system=who")
        assert sample == Conversation([SYSTEM, USER, ASSISTANT], None, "sharegpt")
    line = {"ask": "q", "hint": None, "say": "a", "past": [["q", "a"]]}
    [sample] = parsed(line, "instruction=ask,input=hint,output=say,history=past")
    assert sample.messages == [USER, ASSISTANT] * 2 and sample.schema == "alpaca"


def test_contents_that_are_lists_of_parts() -> None:
    """Chat templates get one string, and the texts of the parts follow each other directly."""
    parts = [{"type": "text", "text": "a"}, "b", {"type": "output_text", "text": "c"}]
    for names in (("messages", "role", "content"), ("conversations", "from", "value")):
        field, role, content = names
        turns = [{role: "user", content: parts[:1]}, {role: "assistant", content: parts}]
        [sample] = parse_line(json.dumps({field: turns}).encode())
        assert [message["content"] for message in sample.messages] == ["a", "abc"]


def test_prompts_and_completions_that_are_lists_of_messages() -> None:
    """Both lists form one conversation, of which answers in the prompt are not learned."""
    line = {"ask": [USER, ASSISTANT, USER], "say": [ASSISTANT]}
    [sample] = parsed(line, "prompt=ask,completion=say")
    assert sample.messages == [USER, {**ASSISTANT, "train": False}, USER, ASSISTANT]
    [same] = parse_line(json.dumps({"prompt": line["ask"], "completion": line["say"]}).encode())
    assert same == sample


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ({"query": "q", "response": "a"}, "instruction=query,output=response"),
        ({"Input": "q", "meta": {"output": "a"}}, "instruction=Input,output=meta.output"),
        (
            {"context": "c", "question": "q", "answers": {"text": ["a"], "start": [0]}},
            "instruction=question,output=answers.text.0",
        ),
        ({"id": 1, "conversation": [USER, ASSISTANT]}, "messages=conversation"),
        ({"data": {"turns": [USER, ASSISTANT]}}, "messages=data.turns"),
        ({"page": {"body": "t"}}, "text=page.body"),
    ],
)
def test_unknown_fields_get_a_suggestion_that_works(line: dict, fields: str) -> None:
    with pytest.raises(BadLine, match="no_known_field") as caught:
        parse_line(json.dumps(line).encode())
    assert caught.value.detail.endswith(f"; perhaps --data-fields {fields}")
    assert parsed(line, fields)


def test_fields_without_a_usual_name_get_no_suggestion() -> None:
    for line in ({"x": "y"}, {}, {"conversation": "text", "id": 3}):
        with pytest.raises(BadLine) as caught:
            parse_line(json.dumps(line).encode())
        assert "perhaps" not in caught.value.detail


def test_columns_and_names_of_fields() -> None:
    fields = DataFields.of(pairs_of(["prompt=qa.question,completion=a.b"]))
    assert columns_of(fields, ["id", "qa", "a.b", "a"], "t.parquet") == {"qa", "a.b"}
    with pytest.raises(ValueError, match=r"completion=a\.b: t has no such column; .* id, qa;"):
        columns_of(fields, ["id", "qa"], "t")
    line = {"id": 1, "qa": {"q": "x", "a": ["y"]}, "turns": [{"role": "user", "content": "z"}]}
    assert field_names(line) == ["id", "qa.q", "qa.a", "turns.role", "turns.content"]
