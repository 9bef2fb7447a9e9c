"""Activations of a Mamba layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import MAMBA
from megatron_packed.models.estimate.footprint import (
    FP32,
    Amounts,
    Footprint,
    Moment,
    Purpose,
    RankSizes,
    Term,
)

_GATED_NORM_PROGRAMS = 1024
_SCAN_SPLIT = 132
"""Number of multiprocessors of an H200. The scan's backward kernels split the heads of a group so
that all of them have work.
"""
_LATE = frozenset({"scan.output", "gated_norm.statistics", "out_proj.input"})
"""Saved tensors that the layer creates after the scan."""


class _MambaSizes:
    """Sizes of one Mamba layer on this rank; attributes named after tensors are in bytes."""

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        b, tokens, config = rank.element, rank.tokens, rank.config
        self.chunk = config.mamba_chunk_size
        self.width = config.mamba_head_dim
        self.state = config.mamba_state_dim
        self.inner = mixer.out_proj.weight.shape[1]
        self.projected = tokens * mixer.in_proj.weight.shape[0] * b
        shared = rank.cp.group is not None
        self.rows = tokens * rank.cp.size if shared else tokens
        self.heads: int = mixer.conv_shapes[0][0]
        self.groups: int = mixer.conv_shapes[1][0]
        channels = self.heads * self.width + 2 * self.groups * self.state
        self.scanned = -(-self.rows // self.chunk) * self.chunk
        """Rows, rounded up to complete chunks."""
        self.convolved = self.rows * channels * b
        self.y = self.rows * self.heads * self.width * b
        self.normed = tokens * self.inner * b
        self.norm_groups = max(self.inner // mixer.norm.group_size, 1)
        self.exchange = self.rows * (channels + self.heads) * b if shared else 0
        """Bytes of the rows that context-parallel ranks exchange, including dt."""
        self.states = self.scanned // self.chunk * self.heads * self.width * self.state
        """Number of elements of the chunk states."""
        self.scores = FP32 * self.scanned * self.groups * self.chunk

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
    sizes = _MambaSizes(rank, layer.mixer)
    saved = _saved(rank, sizes)
    moments = (*_forward(rank, sizes), *_backward(rank, sizes, saved))
    return Footprint(name, MAMBA, saved, moments)


def _saved(rank: RankSizes, sizes: _MambaSizes) -> dict[str, Term]:
    saved = {
        **rank.norm(),
        "in_proj.input": Term(rank.rows_bytes),
        "in_proj.output": Term(sizes.projected),
    }
    if sizes.exchange:
        saved["conv1d.input"] = Term(sizes.exchange)
    saved |= {
        "conv1d.output": Term(sizes.convolved),
        "scan.steps": Term(2 * FP32 * sizes.heads * sizes.scanned),
        "scan.output": Term(sizes.normed),
        "gated_norm.statistics": Term(FP32 * rank.tokens * sizes.norm_groups),
        "out_proj.input": Term(sizes.normed),
    }
    return rank.dropped(saved)


def _forward(rank: RankSizes, sizes: _MambaSizes) -> tuple[Moment, ...]:
    end = rank.forward_end().extra
    returned = sizes.y if sizes.exchange else 0
    scan = {
        Purpose.STATES: sizes.states * (FP32 + rank.element),
        Purpose.GRADIENTS: sizes.scores,
        Purpose.COMMUNICATION: sizes.exchange,
    }
    return (
        Moment("forward of the scan", scan, _LATE),
        Moment("forward", {**end, Purpose.COMMUNICATION: end[Purpose.COMMUNICATION] + returned}),
    )


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
    scan[Purpose.STATES] = sizes.states * (2 * FP32 + 2 * rank.element)
    return scan


def _backward(rank: RankSizes, sizes: _MambaSizes, saved: dict[str, Term]) -> tuple[Moment, ...]:
    convolution = rank.backward_start(projected=sizes.projected, convolved=sizes.convolved)
    convolution[Purpose.COMMUNICATION] += 2 * sizes.exchange
    stays = {"norm.input", "norm.statistics", "in_proj.input", "dropout.mask"}
    return (
        Moment(
            "backward of the gated norm",
            rank.backward_start(
                normed=sizes.normed,
                y=sizes.normed,
                projected=sizes.projected,
                parts=FP32 * min(_GATED_NORM_PROGRAMS, rank.tokens) * sizes.inner,
            ),
            frozenset({"out_proj.input"}),
        ),
        Moment("backward of the scan", _backward_of_scan(rank, sizes), _LATE),
        Moment("backward of the convolution", convolution, _LATE | {"scan.steps"}),
        Moment(
            "backward of in_proj",
            rank.backward_start(projected=sizes.projected, x=rank.inside_bytes),
            frozenset(set(saved) - stays),
        ),
        rank.norm_end(saved),
    )
