"""Positions of rows of Hugging Face tensors, against slices that are written out."""

import torch

from megatron_packed.models.convert.row_maps import Block, interleaved, qkv
from megatron_packed.models.convert.weight_rows import HuggingFaceTensor, Weight
from support import hybrid_cases as cases


def joined(parts, width=3):
    """Return the tensors of ``parts``, numbered row by row, and the parameter made of them."""
    theirs, last = {}, 0
    for number, part in enumerate(parts):
        rows = torch.arange(last, last + part.rows)
        theirs[str(number)] = rows[:, None].expand(-1, width).contiguous().float()
        last += part.rows
    tensors = tuple(
        HuggingFaceTensor(str(number), (part.rows, width), part.moves)
        for number, part in enumerate(parts)
    )
    weight = Weight(name="w", shape=(last + 2, width), dtype=torch.float32, parts=tensors)
    whole = weight.join(theirs.__getitem__)
    assert whole[last:].abs().max() == 0  # rows of padding
    back = weight.split(whole)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())
    return theirs, whole[:last]


def test_rows_of_a_block():
    matrix = torch.arange(24.0).view(12, 2)
    found = Block(1, 2, groups=3, stride=4).view(matrix)
    assert found[..., 0].flatten().tolist() == [2 * row for row in (1, 2, 5, 6, 9, 10)]


def test_tensors_alternate_group_by_group():
    theirs, whole = joined(interleaved(2, (3, 1)))
    first, second = theirs.values()
    expected = torch.cat([first[:3], second[:1], first[3:], second[1:]])
    assert torch.equal(whole, expected)


def test_a_key_value_head_follows_its_query_heads():
    config = cases.tiny_config("*", num_attention_heads=6, num_query_groups=2, kv_channels=2)
    theirs, whole = joined(qkv(config))
    q, k, v = (theirs[name].view(2, -1, 3) for name in "012")
    assert torch.equal(whole, torch.cat([q, k, v], dim=1).flatten(0, 1))
