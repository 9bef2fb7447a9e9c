"""Hashes of weights: one flipped bit, or two numbers in each other's place, are seen; ranks that differ are named."""

import pytest
import torch

from megatron_packed.training import replicas
from megatron_packed.training.replicas import mismatches, weight_hash


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 32), (torch.bfloat16, 16)])
def test_every_bit_and_every_place_counts(dtype, bits, monkeypatch):
    """Also behind the first chunk, whose size changes no hash."""
    whole = weight_hash([torch.arange(10.0, dtype=dtype), torch.ones(2, dtype=dtype)])
    monkeypatch.setattr(replicas, "_CHUNK", 4)
    tensors = [torch.arange(10.0, dtype=dtype), torch.ones(2, dtype=dtype)]
    seen = {int(weight_hash(tensors))}
    assert seen == {int(whole)}
    words = [tensor.view(torch.int32 if bits == 32 else torch.int16) for tensor in tensors]
    for word in words:
        for place in range(word.numel()):
            for bit in range(bits):
                flip = torch.tensor(1 << bit, dtype=torch.int64).to(word.dtype)
                word[place] ^= flip
                seen.add(int(weight_hash(tensors)))
                word[place] ^= flip
    assert len(seen) == 1 + 12 * bits
    tensors[0][[1, 5]] = tensors[0][[5, 1]]  # places in other chunks
    tensors.append(tensors.pop(0))
    assert int(weight_hash(tensors)) not in seen and int(weight_hash(tensors[::-1])) not in seen


def test_those_that_differ_from_most_are_named():
    same = {"dense": 1, "experts": 5}
    assert mismatches([same] * 4) == [] and mismatches([{"dense": 1}, {"experts": 2}]) == []
    assert mismatches([same, {"experts": 7}, {**same, "experts": 5}, {"dense": 2}, same]) == [
        "dense: rank 3 of ranks 0, 2, 3, 4", "experts: rank 1 of ranks 0, 1, 2, 4"
    ]  # fmt: skip
