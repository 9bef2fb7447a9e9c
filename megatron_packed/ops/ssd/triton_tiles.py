"""Sizes of the Triton kernels' programs, and the division of a pack into segments.

They depend only on shapes and dtypes. There is no tuning, so equal inputs give equal bits in each run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from megatron_packed.ops.ssd.api import SSDInputs

_PROGRAMS = 256
"""Programs of a launch along the pack that fill a GPU: three for each of an H200's 132 processors."""
_GRADIENT_PROGRAMS = 128
"""Programs of the launch of gradients that fill a GPU."""


class Tiles(NamedTuple):
    """Sizes of a program."""

    warps: int
    stages: int
    """Steps of the program's loop whose tiles are on their way or in shared memory at a time."""
    registers: int | None = None
    """Most registers of a thread, so that more programs run on a processor at a time."""


class Plan(NamedTuple):
    """Sizes that all kernels of a call share."""

    length: int
    """Tokens of a chunk, L."""
    chunks: int
    """Chunks of the pack, Q."""
    block_p: int
    """Channels of a head in one program."""
    blocks: int
    """Programs that share the channels of a head, X."""
    block_s: int
    """Power of 2 that is at least the state size."""
    chunks_per_segment: int
    segments: int
    """Segments of the pack, Z. The last one may be shorter."""
    splits: int
    """Programs that share the heads of a group in the launch of gradients."""
    precision: str
    """Precision of products of fp32 tiles; it has no effect on products of bf16 tiles."""


TILES = {
    torch.bfloat16: {
        "sums": Tiles(4, 3),
        "states": Tiles(4, 3),
        "outputs": Tiles(4, 2),
        "inputs": Tiles(4, 2),
        "gradients": Tiles(8, 2),
    },
    torch.float32: {
        "sums": Tiles(4, 1),
        "states": Tiles(4, 1),
        "outputs": Tiles(4, 1),
        "inputs": Tiles(4, 1),
        "gradients": Tiles(8, 1),
    },
}
"""Sizes of each kernel by dtype."""
LENGTHS = {torch.bfloat16: 64, torch.float32: 32}
"""Tokens of a chunk by dtype."""
_BLOCK_P = {torch.bfloat16: 64, torch.float32: 32}


def plan_of(inputs: SSDInputs) -> Plan:
    """Return the sizes for inputs of this shape and dtype."""
    length = LENGTHS[inputs.dtype]
    chunks = triton.cdiv(inputs.tokens, length)
    block_p = min(_BLOCK_P[inputs.dtype], block_of(inputs.head_dim))
    blocks = triton.cdiv(inputs.head_dim, block_p)
    wanted = triton.cdiv(_PROGRAMS, inputs.heads * blocks)
    chunks_per_segment = triton.cdiv(chunks, min(wanted, chunks))
    return Plan(
        length=length,
        chunks=chunks,
        block_p=block_p,
        blocks=blocks,
        block_s=block_of(inputs.state_dim),
        chunks_per_segment=chunks_per_segment,
        segments=triton.cdiv(chunks, chunks_per_segment),
        splits=_splits(inputs.heads // inputs.groups, chunks * inputs.groups),
        precision="tf32x3" if inputs.dtype == torch.float32 else "tf32",
    )


def _splits(heads_per_group: int, programs: int) -> int:
    """Return the smallest divisor of the heads of a group that gives enough programs."""
    for splits in range(1, heads_per_group):
        if heads_per_group % splits == 0 and programs * splits >= _GRADIENT_PROGRAMS:
            return splits
    return heads_per_group


def block_of(size: int) -> int:
    """Return the smallest power of 2 that is at least ``size`` and at least 16."""
    block: int = max(triton.next_power_of_2(size), 16)
    return block
