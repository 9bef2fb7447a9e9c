"""Contents of a checkpoint: flat ranges of globally named tensors.

A tensor has one global name, shape and dtype in every parallel layout. A process holds ranges of
the flattened tensor (row major), or the same columns of consecutive rows (`tensor_extent.py`). So a
checkpoint that one layout wrote loads into any other layout. Names contain no rank, except for
state that belongs to one rank (random number generators: ``rng/rank_0/...``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.checkpoint.tensor_extent import Extent

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that a checkpoint supports, with their safetensors names."""

NAMED_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

TENSOR_NAME = re.compile(r"[A-Za-z0-9_./:@+=,-]{1,500}")
"""Pattern of allowed tensor names.

Spaces and control characters are not allowed. Brackets are not allowed because they enclose the
range in the keys of a file.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """Range of elements of the flattened tensor ``name``, with a 1-D contiguous view of them.

    A save reads the view, and a load writes it in place. The view is on CPU or CUDA. The range is
    the `Extent` of ``start``, ``end``, ``rows`` and ``stride``: elements ``[start, end)`` for one
    row, else one such run per row, in the order of the rows.
    """

    name: str
    global_shape: tuple[int, ...]
    start: int
    end: int
    tensor: Tensor
    rows: int = 1
    stride: int = 0

    def __post_init__(self) -> None:
        if not TENSOR_NAME.fullmatch(self.name):
            raise ValueError(
                f"tensor name {self.name!r} is not 1 to 500 characters of letters, digits and _./:@+=,-."
            )
        if self.tensor.dtype not in DTYPE_NAMES:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise ValueError(
                f"tensor {self.name} has dtype {self.tensor.dtype}; a checkpoint supports {supported}."
            )
        problem = self.extent.problem(math.prod(self.global_shape))
        if problem is not None:
            raise ValueError(
                f"the range of tensor {self.name} of shape {self.global_shape} is invalid: {problem}."
            )
        if (
            self.tensor.dim() != 1
            or self.tensor.numel() != self.extent.numel
            or not self.tensor.is_contiguous()
        ):
            raise ValueError(
                f"the view of tensor {self.key} has shape {tuple(self.tensor.shape)} and strides "
                f"{self.tensor.stride()}; the view must be contiguous and 1-D, with {self.extent.numel} elements."
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def extent(self) -> Extent:
        """Elements of the flattened tensor that this shard holds."""
        return Extent(self.start, self.end, self.rows, self.stride)

    @property
    def key(self) -> str:
        """Key of this range in a safetensors file."""
        return shard_key(self.name, self.extent)

    def part(self, first: int, last: int) -> list[TensorShard]:
        """Return shards for elements ``[first, last)`` of this shard, counted in its own order."""
        return shards_of(
            self.name, self.global_shape, self.extent.cut(first, last), self.tensor[first:last]
        )

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorShard:
        """Build a shard of all elements of ``tensor``, which must be contiguous.

        The shard shares the memory of ``tensor``.
        """
        return cls(
            name=name,
            global_shape=tuple(tensor.shape),
            start=0,
            end=tensor.numel(),
            tensor=_flat(name, tensor),
        )


def shards_of(
    name: str, global_shape: tuple[int, ...], extents: Sequence[Extent], tensor: Tensor
) -> list[TensorShard]:
    """Build one shard per extent.

    ``tensor`` (1-D, contiguous) contains the elements of all extents, in the order of ``extents``.
    """
    views = torch.split(tensor, [extent.numel for extent in extents]) if extents else ()
    return [
        TensorShard(name=name, global_shape=global_shape, tensor=view, **extent._asdict())
        for extent, view in zip(extents, views)
    ]


def shard_key(name: str, extent: Extent) -> str:
    """Return the key of a range in a file, e.g. ``"layers.0.norm.weight[0:64]"``."""
    return f"{name}[{extent.text}]"


def byte_view(tensor: Tensor) -> Tensor:
    """Return a uint8 view of the bytes of a 1-D contiguous tensor."""
    return tensor.detach().view(torch.uint8)


def whole_tensors(named_tensors: Mapping[str, Tensor]) -> list[TensorShard]:
    """Build one shard of all elements for each tensor, for a process that needs complete tensors."""
    return [TensorShard.whole(name, tensor) for name, tensor in named_tensors.items()]


def split_replicated(
    named_tensors: Mapping[str, Tensor], rank: int, world_size: int
) -> list[TensorShard]:
    """Return the shards that ``rank`` saves of complete tensors that all ranks hold.

    See `share_out` for the division.
    """
    return share_out(whole_tensors(named_tensors), rank, world_size)


def share_out(shards: Sequence[TensorShard], rank: int, world_size: int) -> list[TensorShard]:
    """Return the part of ``shards`` that ``rank`` saves, if all ranks hold the same shards.

    The shards are concatenated in the order of their names, ``B`` bytes in total. Rank ``r`` of
    ``W`` takes bytes ``[r B / W, (r + 1) B / W)``, with both ends rounded up to complete elements.
    So shares differ by at most one element, and each element has exactly one owner. Rank 0 takes
    empty tensors.

    Example:
        one fp32 tensor of 10 elements, world_size 4: [0:3), [3:5), [5:8), [8:10).
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in [0, world_size {world_size}).")
    total = sum(shard.tensor.nbytes for shard in shards)
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    shares = []
    offset = 0
    for shard in sorted(shards, key=lambda shard: (shard.name, shard.start)):
        size, numel = shard.dtype.itemsize, shard.tensor.numel()
        start = min(max(-(-(first - offset) // size), 0), numel)
        end = min(max(-(-(last - offset) // size), 0), numel)
        offset += shard.tensor.nbytes
        if start < end:
            shares += shard.part(start, end)
        elif numel == 0 and rank == 0:
            shares.append(shard)
    return shares


def _flat(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor {name} of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}); "
            "a checkpoint reads and writes tensors in place, so pass a contiguous tensor."
        )
    return tensor.detach().view(-1)
