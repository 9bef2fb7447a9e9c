"""Tests of preference data: it is refused by name, and the printed flag trains on the good side."""

import re

import pytest

from megatron_packed.config.data_fields import DataFields, pairs_fault, pairs_of
from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.line_schema import (
    Conversation,
    PromptCompletion,
    Text,
    parse_line,
)
from support.data_helpers import samples_of
from support.messages import assistant, system, user

USER, GOOD = user("q"), assistant("good")
BAD = assistant("bad")
SYSTEM = system("s")
TALK = [Conversation([USER, GOOD])]
ALPACA = [Conversation([USER, GOOD], None, "alpaca", "q")]
HUMAN = "\n\nHuman: q\n\nAssistant: "
PAIRS = [
    ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, TALK),
    (
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]},
        TALK,
    ),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, TALK),
    ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, ALPACA),
    ({"prompt": "q", "chosen": "good", "rejected": "bad"}, [PromptCompletion("q", "good")]),
    ({"question": "q", "chosen": "good", "rejected": "bad"}, ALPACA),
    ({"input": "q", "chosen": "good", "rejected": "bad"}, ALPACA),
    (
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad", "system": "s"},
        [Conversation([SYSTEM, USER, GOOD], None, "alpaca", "q")],
    ),
    ({"chosen": HUMAN + "good", "rejected": HUMAN + "bad"}, TALK),
    (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        TALK,
    ),
    ({"messages": [USER, GOOD], "rejected_response": "bad"}, TALK),
    (
        {"query": "q", "chosen": "good", "rejected": "bad", "system_prompt": "s"},
        [Conversation([SYSTEM, USER, GOOD], None, "alpaca", "q")],
    ),
    (
        {
            "input": {"messages": [USER]},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        TALK,
    ),
]
LABELLED = [
    ({"prompt": "q", "completion": "good"}, [PromptCompletion("q", "good")]),
    ({"prompt": [USER], "completion": [GOOD]}, TALK),
    ({"messages": [USER, GOOD], "system": "s"}, [Conversation([SYSTEM, USER, GOOD])]),
    (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]},
        [Conversation([USER, GOOD], None, "sharegpt")],
    ),
    ({"instruction": "q", "output": "good", "history": []}, ALPACA),
    ({"instruction": "q", "context": "", "response": "good"}, ALPACA),
]


def refusal(line) -> str:
    with pytest.raises(BadLine) as caught:
        samples_of(line)
    assert caught.value.reason == "preference_data"
    return caught.value.detail


def learned(line, detail):
    """Return the samples with the ``--data-fields`` that a refusal names."""
    words = re.search(r"--data-fields (\S+) trains on", detail)[1]
    assert pairs_fault(pairs_of([words])) is None
    return samples_of(line, DataFields.from_pairs(pairs_of([words])))


@pytest.mark.parametrize(("line", "expected"), PAIRS)
def test_pairs_name_the_loss_and_the_fields_of_the_chosen_side(line, expected):
    detail = refusal(line)
    assert "the DPO loss is not built" in detail and detail.endswith("trains on the chosen side")
    assert learned(line, detail) == expected


@pytest.mark.parametrize("name", ["label", "kto_tag"])
@pytest.mark.parametrize(("line", "expected"), LABELLED)
def test_labels_name_the_loss_and_the_fields_of_accepted_answers(line, expected, name):
    detail = refusal({**line, name: False})
    assert "the KTO loss is not built" in detail
    assert learned({**line, name: True}, detail) == expected
    with pytest.raises(BadLine, match="rejected_answer"):
        learned({**line, name: False}, detail)


def test_fields_that_the_flag_leaves_out_are_named():
    line = {"prompt": "q", "chosen": "good", "rejected": "bad", "system": "s", "tools": []}
    assert refusal(line).endswith("trains on the chosen side, without system")
    line = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "functions": [{"name": "f"}]}
    assert refusal(line).endswith("trains on the chosen side, without functions")
    line = {"chosen": "good", "rejected": "bad"}
    assert "instruction=FIELD,output=chosen" in refusal(line)


def test_other_labels_and_numbers_are_no_preferences():
    for more in ({"label": 1}, {"label": "spam"}, {"chosen": 1, "rejected": 0}, {"chosen": "a"}):
        assert samples_of({"prompt": "q", "completion": "c", **more})
    assert parse_line(b'{"text": "t", "label": true}') == [Text("t")]


def test_texts_of_turns_are_messages():
    """Anthropic's texts begin each turn with its speaker; a speaker inside of a line is text."""
    text = (
        "\n\nHuman: one\nHuman: two\n\nAssistant: three \n\nmore\n\nHuman: four\n\nAssistant: five"
    )
    fields = DataFields.from_pairs([("messages", "chosen")])
    line = {"chosen": text, "rejected": text}
    [sample] = samples_of(line, fields)
    assert [(message["role"], message["content"]) for message in sample.messages] == [
        ("user", "one\nHuman: two"),
        ("assistant", "three \n\nmore"),
        ("user", "four"),
        ("assistant", "five"),
    ]
    for text, reason in (
        ("\n\nHuman: q\n\nAssistant:", "empty_assistant"),
        ("\n\nHuman: q", "no_assistant"),
        ("q", "wrong_type"),
    ):
        with pytest.raises(BadLine, match=reason):
            samples_of({"chosen": text}, fields)
