"""Offsets, document numbers and positions compared with loops over tokens."""

import numpy as np
import pytest

from megatron_packed.packed.cu_seqlens_and_seq_idx import (
    aligned,
    cu_seqlens_from_lengths,
    lengths_from_cu_seqlens,
    longest_document,
    position_ids_from_cu_seqlens,
    seq_idx_from_cu_seqlens,
)

PACKS = [
    # (lengths, slots, capacity) with an exact fit, a tail, empty rows, single tokens, one document,
    # and no document.
    ([3, 5], 8, None),
    ([3, 5], 10, None),
    ([3, 5], 10, 2),
    ([3, 5], 10, 4),
    ([3, 5], 8, 4),
    ([1, 1, 1], 3, None),
    ([7], 7, 1),
    ([1], 9, 6),
    ([], 4, None),
    ([], 4, 3),
    ([2, 1, 30, 1, 1, 4], 64, 16),
]


def by_hand(lengths, slots, capacity):
    """Return offsets, document numbers and positions, computed token by token."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    rows = (len(lengths) if capacity is None else capacity) + 2
    ends += [slots] * (rows - len(ends))
    seq_idx, positions = [], []
    for number, length in enumerate([*lengths, slots - sum(lengths)]):
        for position in range(length):
            seq_idx.append(number)
            positions.append(position)
    return ends, seq_idx, positions


@pytest.mark.parametrize(("lengths", "slots", "capacity"), PACKS)
def test_offsets_numbers_and_positions(lengths, slots, capacity):
    ends, seq_idx, positions = by_hand(lengths, slots, capacity)
    cu_seqlens = cu_seqlens_from_lengths(lengths, slots, capacity)
    assert cu_seqlens.dtype == np.int32
    assert cu_seqlens.tolist() == ends
    for array, expected in (
        (seq_idx_from_cu_seqlens(cu_seqlens), seq_idx),
        (position_ids_from_cu_seqlens(cu_seqlens), positions),
    ):
        assert array.dtype == np.int32
        assert array.tolist() == expected


@pytest.mark.parametrize(("lengths", "slots", "capacity"), PACKS)
def test_lengths_come_back(lengths, slots, capacity):
    cu_seqlens = cu_seqlens_from_lengths(lengths, slots, capacity)
    assert lengths_from_cu_seqlens(cu_seqlens, len(lengths)).tolist() == lengths
    assert lengths_from_cu_seqlens(cu_seqlens).sum() == slots


def test_longest_row_counts_the_tail():
    assert longest_document(cu_seqlens_from_lengths([3, 5], 9)) == 5
    assert longest_document(cu_seqlens_from_lengths([3, 5], 30, 8)) == 22


@pytest.mark.parametrize(
    ("lengths", "slots", "capacity", "message"),
    [
        ([4, 0, 2], 8, None, "document 1 has length 0"),
        ([4, -1], 8, None, "document 1 has length -1"),
        ([4, 5], 8, None, "2 documents hold 9 tokens, but the pack has total_tokens = 8"),
        ([1, 1, 1], 8, 2, "3 documents do not fit into a capacity of 2"),
        ([1], 0, None, r"total_tokens \(0\) must be between 1"),
        ([1], 2**31, None, "int32"),
        (np.ones((2, 2), int), 8, None, "one list of integers"),
        ([1.5], 8, None, "must be integers"),
    ],
)
def test_what_does_not_fit_is_refused(lengths, slots, capacity, message):
    with pytest.raises(ValueError, match=message):
        cu_seqlens_from_lengths(lengths, slots, capacity)


def test_lengths_are_summed_beyond_int32():
    with pytest.raises(ValueError, match="4294967294 tokens"):
        cu_seqlens_from_lengths(np.full(2, 2**31 - 1, dtype=np.int32), 8)


def test_documents_at_multiples_of_an_alignment():
    assert aligned([1, 4, 5], 4).tolist() == [4, 4, 8]
    assert aligned([3, 7], 1).tolist() == [3, 7]
    with pytest.raises(ValueError, match="alignment \\(0\\) must be 1 or more"):
        aligned([3], 0)
