"""Sizes of the Triton kernels' programs, and the division of a pack into segments.

They depend only on shapes. There is no tuning, so equal inputs give equal bits in each run.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_packed.ops.ssd.api import SSDInputs

LENGTH = 64
"""Tokens of a chunk, L."""
_SMALLEST_BLOCK = 64
"""Smallest side of a tile: tensor cores of Hopper multiply 64 rows at a time."""
_PROGRAMS = 256
"""Programs of a launch along the pack that fill a GPU: about two for each of an H200's 132 processors."""
_GRADIENT_PROGRAMS = 128
"""Programs of the launch of gradients that fill a GPU."""


class ProgramSize(NamedTuple):
    """Sizes of a program."""

    warps: int
    stages: int
    """Steps of the program's loop whose tiles are on their way or in shared memory at a time."""
    registers: int | None = None
    """Most registers of a thread, so that more programs run on a processor at a time."""
    parts: int = 1
    """Parts of a state in walks and gradients, each in a program of its own."""
    descriptors: bool = False
    """The copy engine (TMA) loads complete tiles, and no thread computes their addresses."""


_UP_TO_128 = {
    "sums": ProgramSize(4, 3, registers=168),
    "states": ProgramSize(4, 4),
    "outputs": ProgramSize(4, 2, descriptors=True),
    "inputs": ProgramSize(4, 2, descriptors=True),
    "tokens": ProgramSize(4, 3, registers=168),
    "gradients": ProgramSize(4, 2),
}
TILES = {
    64: _UP_TO_128,
    128: _UP_TO_128,
    256: {
        "sums": ProgramSize(4, 3, parts=4),
        "states": ProgramSize(4, 3, parts=4),
        "outputs": ProgramSize(4, 1, descriptors=True),
        "inputs": ProgramSize(4, 2, descriptors=True),
        "tokens": ProgramSize(4, 3),
        "gradients": ProgramSize(4, 2, parts=2),
    },
}
"""Sizes of each kernel, by the block of the state."""


class Plan(NamedTuple):
    """Sizes that all kernels of a call share."""

    tiles: dict[str, ProgramSize]
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
    full: bool
    """All tiles are complete, so that no load or store needs a mask."""

    def constants(self, kernel: str, x_TNP: Tensor, B_TGS: Tensor) -> dict[str, int | None]:
        """Return the constants of a kernel's launch that several kernels have."""
        (heads, head_dim), (groups, state_dim) = x_TNP.shape[1:], B_TGS.shape[1:]
        size = self.tiles[kernel]
        return {
            "P": head_dim,
            "S": state_dim,
            "BLOCK_P": self.block_p,
            "HEADS": heads,
            "HEADS_PER_GROUP": heads // groups,
            "L": self.length,
            "STAGES": size.stages,
            "num_warps": size.warps,
            "maxnreg": size.registers,
        }


def plan_of(inputs: SSDInputs) -> Plan:
    """Return the sizes for inputs of this shape."""
    chunks = -(-inputs.tokens // LENGTH)
    blocks = -(-inputs.head_dim // _SMALLEST_BLOCK)
    block_s = max(1 << (inputs.state_dim - 1).bit_length(), _SMALLEST_BLOCK)
    wanted = -(-_PROGRAMS // (inputs.heads * blocks))
    chunks_per_segment = -(-chunks // min(wanted, chunks))
    return Plan(
        tiles=TILES[block_s],
        length=LENGTH,
        chunks=chunks,
        block_p=_SMALLEST_BLOCK,
        blocks=blocks,
        block_s=block_s,
        chunks_per_segment=chunks_per_segment,
        segments=-(-chunks // chunks_per_segment),
        splits=_splits(inputs.heads // inputs.groups, chunks * inputs.groups),
        full=inputs.tokens % LENGTH == 0
        and inputs.head_dim % _SMALLEST_BLOCK == 0
        and inputs.state_dim == block_s,
    )


def _splits(heads_per_group: int, programs: int) -> int:
    """Return the smallest divisor of the heads of a group that gives enough programs."""
    for splits in range(1, heads_per_group):
        if heads_per_group % splits == 0 and programs * splits >= _GRADIENT_PROGRAMS:
            return splits
    return heads_per_group
