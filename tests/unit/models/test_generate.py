"""Greedy generation of text."""

import pytest
import torch

from megatron_packed.models.generate import generate
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases


def test_every_token_is_the_likeliest_after_its_prefix():
    model = cases.tiny_model("M*-E", position_embedding_type="rope", hidden_dropout=0.3)
    model.train()
    new = generate(model, [5, 9, 2], 6)
    assert len(new) == 6 and model.training
    model.eval()
    tokens = torch.tensor([5, 9, 2, *new], dtype=torch.int32)
    logits = model.logits(tokens, PackedSeqParams.from_lengths([9], 9))
    # One pass over the complete text predicts the same tokens as the passes over its prefixes.
    assert logits[2:8].argmax(-1).tolist() == new


def test_it_stops_after_the_end_of_document():
    model = cases.tiny_model("M*-")
    new = generate(model, [5, 9, 2], 6)
    assert generate(model, [5, 9, 2], 6, ends={new[2]}) == new[: new.index(new[2]) + 1]
    assert generate(model, [5, 9, 2], 0) == []


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="The prompt is empty"):
        generate(cases.tiny_model("-"), [], 3)
