"""Contents of a checkpoint: flat ranges of globally named tensors.

A tensor has one global name, shape and dtype, whatever the parallel layout; a process holds any
flat ranges of it (row major), or the same columns of consecutive rows as one (`tensor_extent.py`).
So a checkpoint written by one layout loads into any other, and no name mentions a rank, except
where the state itself belongs to a rank (random number generators: ``rng/rank_0/...``).
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
"""Dtypes a checkpoint can hold and their safetensors names."""

NAMED_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

TENSOR_NAME = re.compile(r"[A-Za-z0-9_./:@+=,-]{1,500}")
"""Names of tensors: no brackets (they enclose the range in a file's keys), no spaces, no control
characters.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """Elements ``[start, end)`` of the flattened tensor ``name``; ``tensor`` is a 1-D contiguous
    view of them.

    When saved the view is read, when loaded it is written in place. CPU or CUDA. With ``rows``
    above 1 the elements are those of an `Extent`, row after row in the view.
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
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise ValueError(
                f"tensor {self.name} has dtype {self.tensor.dtype}; a checkpoint holds {known}."
            )
        problem = self.extent.problem(math.prod(self.global_shape))
        if problem is not None:
            raise ValueError(
                f"range of tensor {self.name} of shape {self.global_shape}: {problem}."
            )
        if (
            self.tensor.dim() != 1
            or self.tensor.numel() != self.extent.numel
            or not self.tensor.is_contiguous()
        ):
            raise ValueError(
                f"view of tensor {self.key} has shape {tuple(self.tensor.shape)} and strides {self.tensor.stride()}; "
                f"it must be contiguous, 1-D, {self.extent.numel} elements."
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def extent(self) -> Extent:
        """The elements that it holds."""
        return Extent(self.start, self.end, self.rows, self.stride)

    @property
    def key(self) -> str:
        """Key of this range in a safetensors file."""
        return shard_key(self.name, self.extent)

    def part(self, first: int, last: int) -> list[TensorShard]:
        """Its own elements ``[first, last)``, counted in its order."""
        return shards_of(
            self.name, self.global_shape, self.extent.cut(first, last), self.tensor[first:last]
        )

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorShard:
        """All of ``tensor`` (contiguous, any shape; the shard shares its memory)."""
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
    """A shard for each extent; ``tensor`` (1-D, contiguous) has their elements one extent after the
    other.
    """
    views = tensor.split([extent.numel for extent in extents]) if extents else ()
    return [
        TensorShard(name=name, global_shape=global_shape, tensor=view, **extent._asdict())
        for extent, view in zip(extents, views)
    ]


def shard_key(name: str, extent: Extent) -> str:
    """``("layers.0.norm.weight", Extent(0, 64))`` -> ``"layers.0.norm.weight[0:64]"``."""
    return f"{name}[{extent.text}]"


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a 1-D contiguous tensor, as uint8, sharing memory."""
    return tensor.detach().view(torch.uint8)


def whole_tensors(named_tensors: Mapping[str, Tensor]) -> list[TensorShard]:
    """One shard per tensor: what a process wants back from a checkpoint when it holds the tensors
    whole.
    """
    return [TensorShard.whole(name, tensor) for name, tensor in named_tensors.items()]


def split_replicated(
    named_tensors: Mapping[str, Tensor], rank: int, world_size: int
) -> list[TensorShard]:
    """As ``share_out``, of whole tensors that all ranks hold."""
    return share_out(whole_tensors(named_tensors), rank, world_size)


def share_out(shards: Sequence[TensorShard], rank: int, world_size: int) -> list[TensorShard]:
    """The share of ``rank`` of what all ``world_size`` ranks hold alike: equal contiguous parts of
    its bytes.

    The shards are laid end to end in the order of their names; rank r takes bytes ``[r B / W, (r +
    1) B / W)``, moved up to whole elements, so the shares differ by at most one element and each
    element has exactly one owner. Empty tensors belong to rank 0.

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
            "a checkpoint reads and writes tensors in place, so pass a contiguous one."
        )
    return tensor.detach().view(-1)
