"""Hash of weights that does not depend on how ranks or files divide them.

Each element is mixed with its position in the unsplit tensor, and the numbers of all elements are
summed. So ranks hash what they hold, in any order, and add their sums. The hash tells weights apart
by accident, such as another step of a run. It does not protect against forged weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_packed.checkpoint.sealed_json import Json
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, TensorShard

_ELEMENTS = 1 << 22
"""Elements that are mixed at a time: a few tensors of 32 MiB."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1
_OF_BITS, _OF_POSITION, *_MULTIPLIERS = (
    -7046029254386353131,
    -4417276706812531889,
    -4658895280553007687,
    -7723592293110705685,
)
"""Odd numbers of splitmix64 (Steele et al., 2014) and MurmurHash3, as signed integers."""

Sums = dict[str, Json]
"""Name of a tensor -> its shape, its data type and the sum of its elements' numbers."""


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
    bits, total = shard.tensor.view(_BITS[shard.dtype.itemsize]), 0
    width = shard.end - shard.start
    for first in range(0, len(bits), _ELEMENTS):
        part = bits[first : first + _ELEMENTS].to(torch.int64)
        at = torch.arange(first, first + len(part), device=part.device)
        if shard.rows > 1:
            at = at // width * shard.stride + at % width
        total += int(_mixed(part * _OF_BITS + (at + shard.start) * _OF_POSITION).sum())
    return total & _MASK


def _mixed(numbers: Tensor) -> Tensor:
    """Spread each number's bits over the whole number; overflow keeps the low 64 bits."""
    for multiplier in _MULTIPLIERS:
        numbers = (numbers ^ (numbers >> 32)) * multiplier
    return numbers ^ (numbers >> 32)
