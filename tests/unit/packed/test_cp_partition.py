"""Rows of every context-parallel rank compared with a loop, and errors for indivisible lengths."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_packed.packed.cp_partition import Partition
from megatron_packed.packed.params import PackedSeqParams


def chunk_by_chunk(offsets, rank, size):
    """Return the slots of a rank with zigzag, computed by a loop."""
    slots = []
    for start, end in pairwise(offsets):
        chunks = np.arange(start, end).reshape(2 * size, -1)
        slots += [*chunks[rank], *chunks[2 * size - 1 - rank]]
    return slots


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_zigzag_chunk_by_chunk(size):
    step = 2 * size
    packed = PackedSeqParams.from_lengths([step, 5 * step, step, 2 * step], 12 * step, capacity=7)
    everything = []
    for rank in range(size):
        partition = Partition(size=size, rank=rank, zigzag=True)
        partition.check(packed)
        order = partition.order(packed)
        mine = partition.own(torch.arange(packed.total_tokens), order).tolist()
        assert mine == chunk_by_chunk(packed.cu_seqlens.tolist(), rank, size)
        everything += mine
        assert order.slots_T.tolist()[: len(everything)] == everything
        assert torch.equal(order.slots_T[order.places_T], torch.arange(packed.total_tokens))
    assert sorted(everything) == list(range(packed.total_tokens))


def test_the_example_of_the_docstring():
    packed = PackedSeqParams.from_lengths([8, 4], 12)
    zigzag, contiguous = Partition(size=2, zigzag=True), Partition(size=2)
    assert zigzag.own(torch.arange(12), zigzag.order(packed)).tolist() == [0, 1, 6, 7, 8, 11]
    assert contiguous.own(torch.arange(12), contiguous.order(packed)).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_zigzag_gives_every_rank_as_many_visible_pairs():
    packed = PackedSeqParams.from_lengths([8, 24, 16], 64)
    pairs = []
    for rank in range(4):
        partition = Partition(size=4, rank=rank, zigzag=True)
        pairs.append(int((partition.own(packed.position_ids, partition.order(packed)) + 1).sum()))
    assert len(set(pairs)) == 1


def test_one_rank_has_all_slots():
    packed = PackedSeqParams.from_lengths([3, 4], 9)
    for zigzag in (False, True):
        partition = Partition(zigzag=zigzag)
        partition.check(packed)
        assert partition.order(packed) is None
        assert partition.own(packed.seq_idx[0], None).tolist() == packed.seq_idx[0].tolist()


@pytest.mark.parametrize(
    ("lengths", "total", "zigzag", "message"),
    [
        (
            [3, 4],
            9,
            False,
            r"9 token slots, which do not divide among cp_size = 2 ranks.* multiple of 2\.",
        ),
        (
            [4, 4],
            9,
            True,
            r"9 token slots, which do not divide among cp_size = 2 ranks.* multiple of 4\.",
        ),
        ([4, 6], 16, True, r"document 1 has 6 token slots.*--pad-packed-seq-alignment 4"),
        ([4, 8], 14, True, "the tail of a pack has 2 token slots"),
    ],
)
def test_what_does_not_divide_is_refused(lengths, total, zigzag, message):
    packed = PackedSeqParams.from_lengths(lengths, total)
    with pytest.raises(ValueError, match=message):
        Partition(size=2, zigzag=zigzag).check(packed)


def test_documents_need_no_padding_without_a_zigzag():
    Partition(size=2).check(PackedSeqParams.from_lengths([3, 5, 1], 10))


def test_padded_documents_pass_the_check_of_a_zigzag():
    Partition(size=2, zigzag=True).check(PackedSeqParams.from_lengths([3, 5, 1], 20, alignment=4))
