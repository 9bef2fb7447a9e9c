"""Activations of a Mamba layer."""

from __future__ import annotations

from typing import Any

import torch
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
from megatron_packed.ops.ssd.api import SSDInputs
from megatron_packed.ops.ssd.triton_tiles import LARGEST_STATE, Plan, plan_of

_FACTORS = 4
"""Numbers in fp32 that our scan computes for each token and head: steps, sums and decays."""
_SUMS = 2
"""Gradients in fp32 that our scan computes for each token and head inside a chunk: of sums and steps."""
_SUMS_OF_STATES = 3
"""As `_SUMS`, for each part of a state: of sums, steps and decays to the end of a chunk."""
_SCAN_SPLIT = 132
"""Number of multiprocessors of an H200. The backward kernels of mamba-ssm split the heads of a group so
that all of them have work.
"""


class _MambaSizes(RecurrentSizes):
    """Sizes of one Mamba layer on this rank; attributes named after tensors are in bytes."""

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        super().__init__(rank, mixer)
        self.chunk = rank.config.mamba_chunk_size
        (_, self.width), (self.groups, self.state), _ = self.conv_shapes
        self.scanned = -(-self.rows // self.chunk) * self.chunk
        """Rows, rounded up to complete chunks."""
        self.states = self.scanned // self.chunk * self.heads * self.width * self.state
        """Number of elements of the chunk states."""
        self.scores = FP32 * self.scanned * self.groups * self.chunk
        own = mixer.backends.ssd in ("auto", "triton")
        self.own = own and rank.element == 2 and self.state <= LARGEST_STATE
        """True if the kernels of this package compute the scan, not those of mamba-ssm."""
        passes = self.passes
        self.entering = FP32 * self.heads * self.width * self.state if passes else 0
        """Bytes of the state that enters a part."""
        self.messages = rank.cp.size * self.entering
        """Bytes of the states that leave all parts."""
        kept = 1 if self.own else rank.cp.size + 1
        self.passed = kept * self.entering
        """Bytes of passed states that the forward pass saves."""
        added = passes and not self.own
        self.wide = FP32 * self.rows * self.heads * self.width if added else 0
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
        partial: int = FP32 * self.heads * self.scanned * blocks
        return partial


def mamba_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of a Mamba layer."""
    mixer: Any = layer.mixer
    sizes = _MambaSizes(rank, mixer)
    passed = {"scan.passed": Term(sizes.passed)} if sizes.passed else {}
    steps = {"scan.steps": Term(2 * FP32 * sizes.heads * sizes.scanned)}
    compute = _own_scan if sizes.own else _scan_of_mamba_ssm
    forward, backward = compute(rank, sizes)
    scan = Recurrence(
        noun="scan",
        norm_groups=max(sizes.inner // mixer.norm.group_size, 1),
        saved=passed if sizes.own else {**steps, **passed},
        forward=forward,
        backward=backward,
    )
    return recurrent_footprint(rank, name, MAMBA, layer, sizes, scan)


def _own_scan(rank: RankSizes, sizes: _MambaSizes) -> tuple[Amounts, Amounts]:
    """Return the additional bytes of forward and backward with the kernels of this package."""
    plan = _plan(sizes)
    state = sizes.heads * sizes.width * sizes.state
    per_token = FP32 * sizes.heads * plan.chunks * plan.length
    segments = FP32 * plan.segments * state
    forward = {
        Purpose.STATES: segments + sizes.messages,
        Purpose.GRADIENTS: _FACTORS * per_token,
    }
    parts = plan.splits if plan.splits > 1 else 0
    parts_of_states = plan.tiles["gradients"].parts
    backward = rank.backward_start(
        projected=sizes.projected,
        dy=sizes.y,
        convolved=sizes.convolved,
        factors=_FACTORS * per_token,
        sums=(_SUMS + _SUMS_OF_STATES * parts_of_states) * plan.blocks * per_token,
        scores=rank.element * plan.chunks * plan.length**2 * sizes.groups * plan.splits,
        parts=2 * FP32 * sizes.rows * sizes.groups * sizes.state * parts,
    )
    # States of chunks and their gradients, and both at the borders of segments.
    chunks = plan.chunks * state * rank.element
    backward[Purpose.STATES] = 2 * chunks + 2 * segments + sizes.messages + sizes.entering
    return forward, backward


def _plan(sizes: _MambaSizes) -> Plan:
    inputs = SSDInputs(
        tokens=sizes.rows,
        heads=sizes.heads,
        head_dim=sizes.width,
        groups=sizes.groups,
        state_dim=sizes.state,
        chunk_size=sizes.chunk,
        row_stride=1,
        dtype=torch.bfloat16,
        device_type="cuda",
    )
    return plan_of(inputs)


def _scan_of_mamba_ssm(rank: RankSizes, sizes: _MambaSizes) -> tuple[Amounts, Amounts]:
    """Return the additional bytes of forward and backward with the kernels of mamba-ssm."""
    forward = {
        # The chunk states are freed before the outputs are formed in fp32.
        Purpose.STATES: max(sizes.states * (FP32 + rank.element), 3 * sizes.wide),
        Purpose.GRADIENTS: sizes.scores,
    }
    return forward, _backward_of_scan(rank, sizes)


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
