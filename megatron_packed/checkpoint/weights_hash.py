"""Hash of weights that does not depend on how ranks or files divide them.

A tensor is read as words of two bytes. Each word is multiplied with a weight that depends on its
position in the unsplit tensor, and the products are summed. So ranks sum what they hold, in any
order, and add their sums. The hash tells weights apart that differ by accident, such as another
step of a run. It does not protect against forged weights.

[Note: weights of words]
The weight of word ``i`` is ``a(i // N) b(i % N)``. All b are odd and different, so a changed bit or
two exchanged words change the sum. They have 25 bits: the sum of N = 2^12 words of 15 bits and a
sign, each with its b, is exact in float64. Each a is an odd number of 64 bits; sums of products with
a keep the low 64 bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_packed.checkpoint.sealed_json import Json
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, TensorShard

_BLOCK = 1 << 12
"""N; see [Note: weights of words]."""
_WORDS = 1 << 20
"""Words that are multiplied at a time: 8 MiB of float64."""
_MASK = (1 << 64) - 1
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)
"""Odd numbers of splitmix64 (Steele et al., 2014), as signed integers."""

Sums = dict[str, Json]
"""Name of a tensor -> its shape, its data type and the sum over its words."""


def sums_of(shards: Iterable[TensorShard]) -> Sums:
    """Return the sums over the ranges that this rank holds."""
    sums: Sums = {}
    for shard in shards:
        none_yet = [list(shard.global_shape), DTYPE_NAMES[shard.dtype], 0]
        entry = sums.setdefault(shard.name, none_yet)
        entry[2] = (entry[2] + _sum(shard)) & _MASK
    return sums


def weights_hash(parts: Sequence[Mapping[str, Json]]) -> str:
    """Return the hash of all tensors, 32 hexadecimal digits.

    Args:
        parts: `sums_of` of each rank; together they hold each element exactly once.
    """
    total: Sums = {}
    for part in parts:
        for name, (shape, dtype, number) in part.items():
            entry = total.setdefault(name, [shape, dtype, 0])
            entry[2] = (entry[2] + number) & _MASK
    return hashlib.sha256(json.dumps(sorted(total.items())).encode()).hexdigest()[:32]


@torch.no_grad()
def _sum(shard: TensorShard) -> int:
    """Return the sum over the words of a shard, modulo 2^64."""
    itemsize = shard.dtype.itemsize
    words = shard.tensor.view(torch.uint8 if itemsize == 1 else torch.int16)
    of_element = max(itemsize // 2, 1)
    start, width, stride = (
        number * of_element for number in (shard.start, shard.end - shard.start, shard.stride)
    )
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, len(words), _WORDS):
        part = words[first : first + _WORDS]
        if shard.rows > 1:
            at = torch.arange(first, first + len(part), device=words.device)
            total += _sum_at(part, start + at // width * stride + at % width)
        else:
            total += _consecutive_sum(part, start + first)
    return int(total) & _MASK


def _consecutive_sum(words: Tensor, first: int) -> Tensor:
    """Return the sum over words at consecutive positions."""
    begin = min(-first % _BLOCK, len(words))
    blocks = (len(words) - begin) // _BLOCK
    end = begin + blocks * _BLOCK
    whole = words[begin:end].view(blocks, _BLOCK)
    sums = (whole.to(torch.float64) @ _in_block(words.device).double()).to(torch.int64)
    block = (first + begin) // _BLOCK
    total = (sums * _of_block(torch.arange(block, block + blocks, device=words.device))).sum()
    for at, part in ((first, words[:begin]), (first + end, words[end:])):
        total += _sum_at(part, torch.arange(at, at + len(part), device=words.device))
    return total


def _sum_at(words: Tensor, at: Tensor) -> Tensor:
    """Return the sum over words at any positions."""
    return (words * _in_block(words.device)[at % _BLOCK] * _of_block(at // _BLOCK)).sum()


def _in_block(device: torch.device) -> Tensor:
    """Return b, ``(N,)``; see [Note: weights of words]."""
    at = torch.arange(_BLOCK, device=device)
    return ((_mixed(at + 1) & (_BLOCK - 1)) * _BLOCK + at) * 2 + 1


def _of_block(blocks: Tensor) -> Tensor:
    """Return a of some blocks; see [Note: weights of words]."""
    return _mixed(blocks + _BLOCK) | 1


def _mixed(numbers: Tensor) -> Tensor:
    """Spread each number's bits over 64 bits; overflow keeps the low bits."""
    for multiplier in _MULTIPLIERS:
        numbers = (numbers ^ (numbers >> 30)) * multiplier
    return numbers ^ (numbers >> 31)
