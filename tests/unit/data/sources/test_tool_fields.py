"""Tests of tools and calls: JSON texts are parsed, null keys are dropped, bad ones have a place."""

import json
from collections import Counter

import pytest

from megatron_packed.data.sources.line_schema import parse_line
from support.data_helpers import refused, samples_of
from support.messages import assistant, tool, user

USER, ANSWER = user("q"), assistant("a")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}}}}


def parsed(**line):
    [sample] = samples_of({"messages": [USER, ANSWER], **line})
    return sample


def call_of(*, flat=False, **function):
    function = {"name": "f", **function}
    call = function if flat else {"type": "function", "function": function}
    [sample] = parse_line(
        json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    )
    [found] = sample.messages[0]["tool_calls"]
    return found if flat else found["function"]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"city": "Lima", "unit": null}', {"city": "Lima", "unit": None}),
        ("{}", {}),
        (" \n", {}),
        ("[1]", "[1]"),
        ('"Lima"', '"Lima"'),
        ('{"city": "Li', '{"city": "Li'),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": 1e400}', '{"a": 1e400}'),
        ('{"a": "\\ufdd0"}', '{"a": "\\ufdd0"}'),
        ({"city": "Lima", "unit": None}, {"city": "Lima"}),
    ],
)
def test_arguments_are_an_object_or_the_text_that_the_model_wrote(flat, text, arguments):
    """A null in a text stays, because the model wrote it; a null of a table's column is absent."""
    assert call_of(flat=flat, arguments=text) == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize("schema", ["messages", "conversations", "instruction", "prompt"])
def test_tools_have_one_form_in_every_schema(schema):
    line = {
        "messages": {"messages": [USER, ANSWER]},
        "conversations": {"conversations": [{"from": "gpt", "value": "a"}]},
        "instruction": {"instruction": "q", "output": "a"},
        "prompt": {"prompt": [USER], "completion": [ANSWER]},
    }[schema]
    for tools, expected in (
        ([TOOL], [TOOL]),
        (json.dumps([TOOL]), [TOOL]),
        ([json.dumps(TOOL), TOOL], [TOOL, TOOL]),
        (
            [{"name": "f", "strict": None, "in": {"a": 1, "b": None}}],
            [{"name": "f", "in": {"a": 1}}],
        ),
        ('[{"default": null}]', [{"default": None}]),
        ([], None),
        ("[]", None),
        (" ", None),
        ("null", None),
        (None, None),
    ):
        [sample] = samples_of({**line, "tools": tools})
        assert sample.tools == expected


@pytest.mark.parametrize(
    ("tools", "detail"),
    [
        ("[{", "tools is no JSON text of a list (malformed_json"),
        ("{}", "tools is a object, not a list"),
        ({}, "tools is a object, not a list"),
        ([TOOL, 3], "tools[1] is a number, not an object"),
        ([None], "tools[0] is a null, not an object"),
        (["{"], "tools[0] is no JSON text of an object (malformed_json"),
        (["[]"], "tools[0] is a list, not an object"),
        (['{"a": 1, "a": 2}'], "tools[0] is no JSON text of an object (duplicate_key: a)"),
        (['{"a": "\\ud800"}'], "tools[0] is no JSON text of an object (lone_surrogate)"),
    ],
)
def test_bad_tools_have_a_place(tools, detail):
    with refused("wrong_type", detail):
        parsed(tools=tools)


def test_no_calls_and_null_keys_of_messages_are_dropped():
    messages = [
        {**USER, "tool_calls": None, "name": None},
        {**ANSWER, "tool_calls": []},
        {"role": "assistant", "tool_calls": json.dumps([{"id": "1", **TOOL}]), "content": None},
        {"role": "assistant", "tool_calls": [json.dumps(TOOL)]},
        {"role": "assistant", "tool_calls": [{**TOOL, "index": None}], "content": ""},
    ]
    *_, first, second, third = found = parsed(messages=messages).messages
    assert found[:2] == [USER, ANSWER]
    assert first == assistant("", tool_calls=[{"id": "1", **TOOL}])
    assert second == third == assistant("", tool_calls=[TOOL])


def test_turns_of_sharegpt_have_the_fields_of_messages():
    turns = [
        {"from": "human", "value": "q", "name": "Ada"},
        {"from": "gpt", "value": "", "tool_calls": [{"name": "f", "arguments": "{}"}]},
        {"from": "tool", "value": "21", "tool_call_id": "1"},
        {"from": "gpt", "value": "a", "reasoning_content": "r", "train": False},
    ]
    assert parsed(messages=turns).messages == [
        {**USER, "name": "Ada"},
        assistant("", tool_calls=[{"name": "f", "arguments": {}}]),
        tool("21", tool_call_id="1"),
        {**ANSWER, "reasoning_content": "r", "thinking": "r", "train": False},
    ]


ONE = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', [ONE]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [ONE]),
        (
            '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]',
            [ONE, {"type": "function", "function": {"name": "g", "arguments": {}}}],
        ),
        ({"id": "7", "name": "f", "arguments": {"a": 1}}, [{"id": "7", **ONE}]),
        ([ONE], [ONE]),
    ],
)
def test_a_turn_that_calls_a_function(value, calls):
    """LLaMA-Factory writes calls as turns with a role of their own."""
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": value, "loss": 0}]
    expected = assistant("", tool_calls=calls, train=False)
    assert parsed(messages=turns).messages[1] == expected


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("f(1)", "messages[0].value is no JSON text of an object or a list"),
        ("[]", "messages[0].value is an empty list"),
        ("3", "messages[0].value is a number, not an object"),
        ('[{"name": "f"}, {"arguments": {}}]', "messages[0].value[1].name is a null"),
        (None, "messages[0].value is a null"),
    ],
)
def test_a_bad_call_is_refused_with_its_place(value, detail):
    with refused("wrong_type", detail):
        parsed(messages=[{"from": "function_call", "value": value}])


def test_the_field_for_a_call_before_there_were_tool_calls():
    called = {"name": "f", "arguments": '{"a": 1}'}
    message = assistant(None, function_call=called)
    assert parsed(messages=[message]).messages == [assistant("", tool_calls=[ONE])]


@pytest.mark.parametrize("flat", [False, True])
def test_arguments_that_stay_a_text_are_noted_by_function(flat):
    given = [("f", "not json"), ("f", "[1]"), ("g", "{}"), ("g", {"a": "b"}), ("h", "3")]
    functions = [{"name": name, "arguments": text} for name, text in given]
    calls = functions if flat else [{"function": function} for function in functions]
    line = {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}
    notes = Counter()
    samples_of(line, None, notes)
    assert notes == {("text_argument", "f"): 2, ("text_argument", "h"): 1}


def test_null_arguments_that_are_left_out_are_noted():
    """Nulls of a JSON text stay, because the writer of the call wrote them."""
    calls = [
        {"function": {"name": "f", "arguments": {"a": None, "b": 1}}},
        {"function": {"name": "f", "arguments": '{"a": null}'}},
    ]
    line = {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}
    notes = Counter()
    [talk] = samples_of(line, None, notes)
    made = [call["function"]["arguments"] for call in talk.messages[1]["tool_calls"]]
    assert made == [{"b": 1}, {"a": None}]
    assert notes == {("null_argument", "a"): 1}
