"""Activations of a gated delta net."""

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

_LATE = frozenset({"scan.output", "gated_norm.statistics", "out_proj.input"})
"""Saved tensors that the layer creates after the rule."""


class _DeltaNetSizes:
    """Sizes of one gated delta net on this rank; attributes named after tensors are in bytes."""

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        b, tokens = rank.element, rank.tokens
        shared = rank.cp.group is not None
        rows = tokens * rank.cp.size if shared else tokens
        (key_heads, key_dim), _, (heads, value_dim) = mixer.qkv_shapes
        channels = 2 * key_heads * key_dim + heads * value_dim
        self.projected = tokens * mixer.in_proj.weight.shape[0] * b
        self.convolved = rows * channels * b
        self.exchange = rows * (channels + 2 * heads) * b if shared else 0
        """Bytes of the rows that context-parallel ranks exchange, including the gates."""
        self.o = rows * heads * value_dim * b
        self.normed = tokens * mixer.out_proj.weight.shape[1] * b
        self.statistics = FP32 * tokens * mixer.out_proj.weight.shape[1] // value_dim
        gates, norms = 4 * heads, 2 * key_heads
        self.scores = rows * (2 * heads * CHUNK * b + FP32 * (gates + norms))
        """Bytes of the products of keys and queries inside the chunks, and of the gates."""
        # The kernels keep the states between the whole chunks of a document only.
        self.states = -(-rows // CHUNK) * heads * key_dim * value_dim * b
        self.gate_gradients = 2 * FP32 * rows * heads


def delta_net_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of a gated delta net."""
    sizes = _DeltaNetSizes(rank, layer.mixer)
    saved = _saved(rank, sizes)
    moments = (*_forward(rank, sizes), *_backward(rank, sizes, saved))
    return Footprint(name, GATED_DELTA_NET, saved, moments)


def _saved(rank: RankSizes, sizes: _DeltaNetSizes) -> dict[str, Term]:
    saved = {
        **rank.norm(),
        "in_proj.input": Term(rank.rows_bytes),
        "in_proj.output": Term(sizes.projected),
    }
    if sizes.exchange:
        saved["conv1d.input"] = Term(sizes.exchange)
    saved |= {
        "conv1d.output": Term(sizes.convolved),
        "scan.output": Term(sizes.normed),
        "gated_norm.statistics": Term(sizes.statistics),
        "out_proj.input": Term(sizes.normed),
    }
    return rank.dropped(saved)


def _forward(rank: RankSizes, sizes: _DeltaNetSizes) -> tuple[Moment, ...]:
    end = rank.forward_end().extra
    returned = sizes.o if sizes.exchange else 0
    rule = {
        Purpose.ACTIVATIONS: sizes.o,
        Purpose.GRADIENTS: sizes.scores,
        Purpose.COMMUNICATION: sizes.exchange,
    }
    return (
        Moment("forward of the gated delta rule", rule, _LATE),
        Moment("forward", {**end, Purpose.COMMUNICATION: end[Purpose.COMMUNICATION] + returned}),
    )


def _backward(rank: RankSizes, sizes: _DeltaNetSizes, saved: dict[str, Term]) -> tuple[Moment, ...]:
    rule = rank.backward_start(
        projected=sizes.projected,
        do=sizes.o,
        convolved=sizes.convolved,
        scores=sizes.scores,
        writes=2 * sizes.o,  # what each token writes to the state, and the gradient of it
        gates=sizes.gate_gradients,
    )
    # The states of all chunks and their gradients exist together.
    rule[Purpose.STATES] = 2 * sizes.states
    convolution = rank.backward_start(projected=sizes.projected, convolved=sizes.convolved)
    convolution[Purpose.COMMUNICATION] += 2 * sizes.exchange
    stays = {"norm.input", "norm.statistics", "in_proj.input", "dropout.mask"}
    return (
        Moment(
            "backward of the gated norm",
            rank.backward_start(normed=sizes.normed, o=sizes.normed, projected=sizes.projected),
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
