"""Tests of lines of tokens: what labels and masks learn, and lines that contradict themselves."""

import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.line_schema import TokenSequence, schema_name
from megatron_packed.data.tokenizers.bpe_training import train_bpe
from support.data_helpers import refused, samples_of


def parsed(**line):
    [sample] = samples_of(line)
    return sample


@pytest.mark.parametrize("name", ["input_ids", "token_ids"])
@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({}, None),
        ({"labels": None, "attention_mask": [1, 1, 1]}, None),
        ({"labels": [-100, 8, 9]}, [0, 1, 1]),
        ({"loss_mask": [0, 0, 1]}, [0, 0, 1]),
        ({"completion_mask": [False, True, True]}, [0, 1, 1]),
        ({"assistant_masks": [0, 1, 0], "labels": [-100, 8, -100]}, [0, 1, 0]),
    ],
)
def test_targets(name, fields, targets):
    sample = parsed(**{name: [7, 8, 9], **fields})
    assert sample == TokenSequence([7, 8, 9], targets) and schema_name(sample) == "input_ids"


def test_padding_is_left_out():
    assert parsed(input_ids=[0, 7, 8, 0], attention_mask=[0, 1, 1, 0]) == ([7, 8], None)
    labels = [-100, -100, 8, -100]
    assert parsed(input_ids=[0, 7, 8, 0], attention_mask=[0, 1, 1, 0], labels=labels) == (
        [7, 8],
        [0, 1],
    )


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ({"input_ids": "7"}, "wrong_type", "input_ids is a string, not a list"),
        ({"input_ids": [7, "8"]}, "wrong_type", "input_ids[1] is a string"),
        ({"input_ids": [[7]]}, "wrong_type", "input_ids[0] is a list"),
        ({"input_ids": [True]}, "wrong_type", "input_ids[0] is a boolean"),
        ({"input_ids": [7, -1]}, "wrong_type", "input_ids[1] is -1, no token number"),
        ({"input_ids": [2**31]}, "wrong_type", "input_ids[0] is 2147483648, no token number"),
        ({"input_ids": []}, "empty_text", "input_ids"),
        ({"input_ids": [7], "attention_mask": [0]}, "empty_text", "attention_mask is 0"),
        (
            {"input_ids": [7, 8], "labels": [7]},
            "wrong_type",
            "labels has 1 numbers, but the line has 2",
        ),
        ({"input_ids": [7, 8], "labels": [8, 9]}, "wrong_type", "labels[0] is 8, but the token at"),
        ({"input_ids": [7], "loss_mask": [2]}, "bad_train_flag", "loss_mask[0] is 2"),
        (
            {"input_ids": [7, 8], "labels": [7, 8], "completion_mask": [0, 1]},
            "contradictory_masks",
            "labels and completion_mask differ at token 0",
        ),
    ],
)
def test_bad_tokens_are_refused(line, reason, detail):
    with refused(reason, detail):
        parsed(**line)


def test_no_vocabulary_is_learned_from_tokens(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [7, 8]}\n')
    with pytest.raises(DataError, match="no vocabulary can be learned; give the tokenizer"):
        train_bpe([path], 300, tmp_path)
