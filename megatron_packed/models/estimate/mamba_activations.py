"""Activations of a Mamba layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import MAMBA
from megatron_packed.models.estimate.footprint import (
    FP32,
    Amounts,
    Footprint,
    Purpose,
    RankSizes,
    Term,
)
from megatron_packed.models.estimate.recurrent_activations import (
    Recurrence,
    RecurrentSizes,
    recurrent_footprint,
)

_SCAN_SPLIT = 132
"""Number of multiprocessors of an H200. The scan's backward kernels split the heads of a group so
that all of them have work.
"""


class _MambaSizes(RecurrentSizes):
    """Sizes of one Mamba layer on this rank; attributes named after tensors are in bytes."""

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        super().__init__(rank, mixer)
        self.chunk = rank.config.mamba_chunk_size
        (_, self.width), (self.groups, self.state), _ = mixer.conv_shapes
        self.scanned = -(-self.rows // self.chunk) * self.chunk
        """Rows, rounded up to complete chunks."""
        self.states = self.scanned // self.chunk * self.heads * self.width * self.state
        """Number of elements of the chunk states."""
        self.scores = FP32 * self.scanned * self.groups * self.chunk
        passes = mixer.passing is not None
        state = FP32 * self.heads * self.width * self.state
        self.passed = (rank.cp.size + 1) * state if passes else 0
        """Bytes of the states that leave all parts, and of the state that enters this part."""
        self.wide = FP32 * self.rows * self.heads * self.width if passes else 0
        """Bytes of outputs in fp32, to which the term of the entering state is added."""

    @property
    def parts(self) -> int:
        """Number of partial sums of the gradients of B and C, and one for their total."""
        per_group = max(self.heads // self.groups, 1)
        programs = -(-self.scanned // self.chunk * self.heads // _SCAN_SPLIT)
        splits = -(-per_group // max(min(programs, per_group), 1))
        return 1 if splits == 1 else splits + 1

    @property
    def partial(self) -> int:
        """Bytes of partial sums that the scan's backward kernels write for each head."""
        blocks = -(-self.width // 32) + 2 * -(-self.state // 32) + -(-self.chunk // 32)
        return FP32 * self.heads * self.scanned * blocks


def mamba_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of a Mamba layer."""
    mixer: Any = layer.mixer
    sizes = _MambaSizes(rank, mixer)
    scan = Recurrence(
        noun="scan",
        norm_groups=max(sizes.inner // mixer.norm.group_size, 1),
        saved={
            "scan.steps": Term(2 * FP32 * sizes.heads * sizes.scanned),
            **({"scan.passed": Term(sizes.passed)} if sizes.passed else {}),
        },
        forward={
            # The chunk states are freed before the outputs are formed in fp32.
            Purpose.STATES: max(sizes.states * (FP32 + rank.element), 3 * sizes.wide),
            Purpose.GRADIENTS: sizes.scores,
        },
        backward=_backward_of_scan(rank, sizes),
    )
    return recurrent_footprint(rank, name, MAMBA, sizes, scan)


def _backward_of_scan(rank: RankSizes, sizes: _MambaSizes) -> Amounts:
    scan = rank.backward_start(
        projected=sizes.projected,
        dy=sizes.y,
        convolved=sizes.convolved,
        scores=sizes.scores * (1 + sizes.parts),
        parts=2 * FP32 * sizes.rows * sizes.groups * sizes.state * sizes.parts,
        partial=sizes.partial,
    )
    # The states and their gradients exist both in fp32 and in the kernels' dtype.
    scan[Purpose.STATES] = max(sizes.states * (2 * FP32 + 2 * rank.element), 4 * sizes.wide)
    return scan
