"""Hashes of bits: one flipped bit or two swapped numbers change them; differing ranks are named."""

import pytest
import torch

from megatron_packed.distributed import replica_hashes
from megatron_packed.distributed.replica_hashes import bit_hash, mismatches


@pytest.mark.parametrize(
    "dtype, word", [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)]
)
def test_every_bit_and_every_place_counts(dtype, word, monkeypatch):
    """A flip changes the hash in every chunk, and the size of chunks does not change it."""
    tensor = torch.arange(10.0, dtype=dtype)
    whole = int(bit_hash(tensor))
    monkeypatch.setattr(replica_hashes, "CHUNK", 4)
    seen = {int(bit_hash(tensor))}
    assert seen == {whole}
    words, bits = tensor.view(word), 8 * dtype.itemsize
    for place in range(words.numel()):
        for bit in range(bits):
            flip = torch.tensor(1 << bit, dtype=torch.int64).to(word)
            words[place] ^= flip
            seen.add(int(bit_hash(tensor)))
            words[place] ^= flip
    assert len(seen) == 1 + 10 * bits
    tensor[[1, 5]] = tensor[[5, 1]]  # elements in different chunks
    assert int(bit_hash(tensor)) not in seen


def test_masters_are_rounded_as_weights_are():
    masters = torch.randn(50)
    weights = torch.empty(50, dtype=torch.bfloat16).copy_(masters)
    assert bit_hash(masters, torch.bfloat16) == bit_hash(weights) != bit_hash(masters)


def test_those_that_differ_from_most_are_named():
    same = {"dense": 1, "experts": 5}
    assert mismatches([same] * 4) == [] and mismatches([{"dense": 1}, {"experts": 2}]) == []
    assert mismatches([same, {"experts": 7}, {**same, "experts": 5}, {"dense": 2}, same]) == [
        "dense: other bits on rank 3 than on most of ranks 0, 2, 3, 4",
        "experts: other bits on rank 1 than on most of ranks 0, 1, 2, 4",
    ]
    assert mismatches([{"dense": 1}, {"dense": 2}]) == [
        "dense: different bits on ranks 0, 1, without a majority"
    ]


def test_bits_of_a_nan_may_be_left_out():
    bits = torch.tensor(
        [[0x7FC00001, 0x3F800000], [0x7FC00002, 0x3F800000], [0x3F800000, 0x7FC00001]]
    )
    first, second, third = bits.to(torch.int32).view(torch.float32)
    assert (
        bit_hash(first, one_nan=True)
        == bit_hash(second, one_nan=True)
        != bit_hash(third, one_nan=True)
    )
    assert bit_hash(first) != bit_hash(second)
