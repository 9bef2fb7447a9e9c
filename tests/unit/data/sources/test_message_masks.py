"""Tests of masks of messages: every spelling of several trainers means ``train``."""

import pytest

from support.data_helpers import refused, samples_of

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
LEARNED = [
    {"train": True},
    *(
        {name: value}
        for name in ("weight", "loss", "trainable", "loss_mask")
        for value in (1, True)
    ),
    {"weight": 1.0},
    *({name: value} for name in ("masked", "mask") for value in (0, False)),
]
LEFT_OUT = [
    {"train": False},
    *(
        {name: value}
        for name in ("weight", "loss", "trainable", "loss_mask")
        for value in (0, False)
    ),
    {"weight": 0.0},
    *({name: value} for name in ("masked", "mask") for value in (1, True)),
    {"train": False, "weight": 0, "masked": True, "loss": None},
]


def trained(*masks, form="messages", **beside):
    """Return ``train`` of the answers of a line, of which each has one of the masks."""
    messages = [message for mask in masks for message in (USER, {**ANSWER, **mask})]
    if form == "conversations":
        messages = [
            {"from": message["role"], "value": message["content"]}
            | {name: part for name, part in message.items() if name not in ("role", "content")}
            for message in messages
        ]
    [sample] = samples_of({form: messages, **beside})
    assert all(message.keys() <= {"role", "content", "train"} for message in sample.messages)
    assert all("train" not in message for message in sample.messages[::2])
    return [message.get("train") for message in sample.messages[1::2]]


@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_every_spelling_of_a_mask(form):
    """The masks are removed, because a template could print them."""
    assert trained(*LEARNED, form=form) == [True] * len(LEARNED)
    assert trained(*LEFT_OUT, form=form) == [False] * len(LEFT_OUT)
    nulls = [{name: None} for mask in LEARNED for name in mask]
    assert trained({}, *nulls, form=form) == [None] * (len(nulls) + 1)


@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_a_list_beside_the_messages(form):
    assert trained({}, {}, {}, form=form, loss_mask=[0, 1, 0, 0, None, None]) == [True, False, None]
    assert trained({"weight": 0}, {}, form=form, loss_mask=[0, 0, False, True]) == [False, True]
    assert trained({"loss": False}, form=form, loss_mask=None) == [False]


def test_the_list_has_a_value_for_each_turn_of_the_line_and_none_for_the_system_field():
    assert trained({}, loss_mask=[0, 0]) == [False]
    line = {"system": "s", "messages": [USER, ANSWER], "loss_mask": [0, 0]}
    [sample] = samples_of(line)
    assert sample.messages[-1] == {**ANSWER, "train": False}


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (
            {"messages": [USER, {**ANSWER, "train": True, "weight": 0}]},
            "contradictory_masks",
            "messages[1].train is true, but messages[1].weight is 0",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "a", "loss": 1, "masked": 1}]},
            "contradictory_masks",
            "conversations[0].loss is 1, but conversations[0].masked is 1",
        ),
        (
            {"messages": [ANSWER, {**ANSWER, "mask": False}], "loss_mask": [1, 0]},
            "contradictory_masks",
            "messages[1].mask is false, but loss_mask[1] is 0",
        ),
        (
            {"messages": [USER, ANSWER], "loss_mask": [1, 1]},
            "bad_train_flag",
            "loss_mask[0] is 1, but the message is of the user",
        ),
        (
            {"messages": [{**USER, "masked": False}, ANSWER]},
            "bad_train_flag",
            "messages[0].masked is false, but the message is of the user",
        ),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "bad_train_flag", "weight is 0.5"),
        ({"messages": [USER, {**ANSWER, "loss": "no"}]}, "bad_train_flag", 'loss is "no"'),
        ({"messages": [USER, {**ANSWER, "mask": [0, 1]}]}, "bad_train_flag", "mask is [0, 1]"),
        ({"messages": [USER, {**ANSWER, "train": 0}]}, "bad_train_flag", "train is 0"),
        (
            {"messages": [USER, ANSWER], "loss_mask": [0, 2]},
            "bad_train_flag",
            "loss_mask[1] is 2",
        ),
        (
            {"messages": [USER, ANSWER], "loss_mask": [1]},
            "bad_train_flag",
            "loss_mask has 1 values, but the line has 2 messages",
        ),
        ({"messages": [USER, ANSWER], "loss_mask": 1}, "wrong_type", "loss_mask is a number"),
        (
            {"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0}]}]},
            "bad_train_flag",
            "messages[1].train_detail learns parts",
        ),
    ],
)
def test_masks_that_cannot_be_followed_are_refused(line, reason, detail):
    with refused(reason, detail):
        samples_of(line)


def test_answers_of_a_prompt_are_not_learned_whatever_their_masks_say():
    prompt = [USER, {**ANSWER, "weight": 1}, USER]
    line = {"prompt": prompt, "completion": [{**ANSWER, "weight": 1}]}
    [sample] = samples_of(line)
    assert [message.get("train") for message in sample.messages] == [None, False, None, True]
