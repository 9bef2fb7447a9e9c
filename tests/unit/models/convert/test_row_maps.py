"""Positions of rows of Hugging Face tensors, against slices that are written out."""

from types import SimpleNamespace

import pytest
import torch

from megatron_packed.models.convert.families.delta_rows import (
    convolution_in_thirds,
    delta_by_key_head,
    delta_convolution,
    delta_qkv_together,
    delta_sections,
)
from megatron_packed.models.convert.row_maps import (
    Block,
    gated_qkv,
    interleaved,
    qkv,
)
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


def test_the_gates_follow_the_queries_of_their_group():
    """The rows of q are a query head, its gate, the next query head and so on."""
    config = cases.tiny_config("*", num_attention_heads=6, num_query_groups=2, kv_channels=5)
    theirs, whole = joined(gated_qkv(config))
    q, gate = theirs["0"].view(6, 2, 5, 3).unbind(1)
    k, v = (theirs[name].view(2, 5, 3) for name in "12")
    groups = [
        torch.cat([*q[first : first + 3], *gate[first : first + 3], k[group], v[group]])
        for group, first in enumerate((0, 3))
    ]
    assert torch.equal(whole, torch.cat(groups))


KEYS, VALUES, KEY_WIDTH, VALUE_WIDTH = 2, 6, 4, 5
DELTA = SimpleNamespace(
    linear_num_key_heads=KEYS,
    linear_num_value_heads=VALUES,
    linear_key_dim=KEYS * KEY_WIDTH,
    linear_value_dim=VALUES * VALUE_WIDTH,
)
"""Sizes of a gated delta net with odd numbers of heads and widths."""


def test_sections_of_a_gated_delta_net_by_key_head():
    """The rows of Qwen3-Next are split as its own model splits the projected channels."""
    theirs, whole = joined(delta_by_key_head(DELTA))
    values = VALUES // KEYS * VALUE_WIDTH
    qkvz = theirs["0"].view(KEYS, -1, 3).split([KEY_WIDTH, KEY_WIDTH, values, values], dim=1)
    ba = theirs["1"].view(KEYS, -1, 3).split([VALUES // KEYS] * 2, dim=1)
    assert torch.equal(whole, torch.cat([part.flatten(0, 1) for part in (*qkvz, *ba)]))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (delta_sections, [8, 8, 30, 30, 6, 6]),
        (delta_qkv_together, [46, 30, 6, 6]),
        (delta_convolution, [8, 8, 30]),
    ],
)
def test_sections_one_after_another(rows, expected):
    theirs, whole = joined(rows(DELTA))
    assert [len(tensor) for tensor in theirs.values()] == expected
    assert torch.equal(whole, torch.cat(list(theirs.values())))


def test_a_convolution_in_three_equal_parts():
    sizes = SimpleNamespace(**{**vars(DELTA), "linear_value_dim": 5})
    theirs, whole = joined(convolution_in_thirds(sizes))
    assert [len(tensor) for tensor in theirs.values()] == [7, 7, 7]
    assert torch.equal(whole, torch.cat(list(theirs.values())))
