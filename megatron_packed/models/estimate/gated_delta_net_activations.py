"""Activations of a gated delta net, with the Triton kernels of the gated delta rule."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import GATED_DELTA_NET
from megatron_packed.models.estimate.footprint import (
    FP32,
    Footprint,
    Moment,
    Purpose,
    RankSizes,
    Term,
)
from megatron_packed.ops.gated_delta_rule.tables import CHUNK

_GATED_NORM_PROGRAMS = 1024
_VECTORS_OF_KEY_HEADS = 2
"""Inverse norms of q and of k."""
_VECTORS_OF_VALUE_HEADS = 5
"""Decays and beta of the first kernel."""
_GATE_GRADIENTS = 3
_MATRICES = 2
"""Scores and inverse of each chunk."""
_LATE = frozenset({"scan.output", "gated_norm.statistics", "out_proj.input"})
"""Saved tensors that the layer creates after the rule."""


class _Sizes:
    """Sizes of one gated delta net on this rank; attributes named after tensors are in bytes."""

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        b, tokens = rank.element, rank.tokens
        self.projected = tokens * mixer.in_proj.weight.shape[0] * b
        shared = rank.cp.group is not None
        self.rows = tokens * rank.cp.size if shared else tokens
        (self.key_heads, key_dim), _, (self.heads, value_dim) = mixer.conv_shapes
        channels = 2 * self.key_heads * key_dim + self.heads * value_dim
        self.convolved = self.rows * channels * b
        self.y = self.rows * self.heads * value_dim * b
        self.inner = mixer.out_proj.weight.shape[1]
        self.normed = tokens * self.inner * b
        self.norm_heads = self.inner // value_dim
        self.exchange = self.rows * (channels + 2 * self.heads) * b if shared else 0
        """Bytes of the rows that context-parallel ranks exchange, with b and a."""
        self.states = -(-self.rows // CHUNK) * self.heads * key_dim * value_dim * b
        """Bytes of the states at the start of all chunks, and of their gradients."""
        vectors = self.key_heads * _VECTORS_OF_KEY_HEADS + self.heads * _VECTORS_OF_VALUE_HEADS
        matrices = _MATRICES * self.heads * CHUNK * b
        self.scores = self.rows * (FP32 * vectors + matrices)
        self.gate_gradients = FP32 * _GATE_GRADIENTS * self.heads * self.rows


def gated_delta_net_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of a gated delta net."""
    sizes = _Sizes(rank, layer.mixer)
    saved = _saved(rank, sizes)
    moments = (*_forward(rank, sizes), *_backward(rank, sizes, saved))
    return Footprint(name, GATED_DELTA_NET, saved, moments)


def _saved(rank: RankSizes, sizes: _Sizes) -> dict[str, Term]:
    saved = {
        **rank.norm(),
        "in_proj.input": Term(rank.rows_bytes),
        "in_proj.output": Term(sizes.projected),
    }
    if sizes.exchange:
        saved["conv1d.input"] = Term(sizes.exchange)
    # The rule saves its inputs only. These are slices of tensors that other ops save as well.
    saved |= {
        "conv1d.output": Term(sizes.convolved),
        "scan.output": Term(sizes.normed),
        "gated_norm.statistics": Term(FP32 * rank.tokens * sizes.norm_heads),
        "out_proj.input": Term(sizes.normed),
    }
    return rank.dropped(saved)


def _forward(rank: RankSizes, sizes: _Sizes) -> tuple[Moment, ...]:
    end = rank.forward_end().extra
    returned = sizes.y if sizes.exchange else 0
    rule = {
        Purpose.ACTIVATIONS: sizes.y,
        Purpose.GRADIENTS: sizes.scores,
        Purpose.COMMUNICATION: sizes.exchange,
    }
    return (
        Moment("forward of the gated delta rule", rule, _LATE),
        Moment("forward", {**end, Purpose.COMMUNICATION: end[Purpose.COMMUNICATION] + returned}),
    )


def _backward(rank: RankSizes, sizes: _Sizes, saved: dict[str, Term]) -> tuple[Moment, ...]:
    rule = rank.backward_start(
        projected=sizes.projected,
        do=sizes.y,
        convolved=sizes.convolved,
        scores=sizes.scores,
        writes=sizes.y,
        gates=sizes.gate_gradients,
    )
    rule[Purpose.STATES] = 2 * sizes.states
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
        Moment("backward of the gated delta rule", rule, _LATE),
        Moment("backward of the convolution", convolution, _LATE),
        Moment(
            "backward of in_proj",
            rank.backward_start(projected=sizes.projected, x=rank.inside_bytes),
            frozenset(set(saved) - stays),
        ),
        rank.norm_end(saved),
    )
