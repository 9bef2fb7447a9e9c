"""Activations of a gated delta net, with the Triton kernels of the gated delta rule."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import GATED_DELTA_NET
from megatron_packed.models.estimate.footprint import (
    FP32,
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
from megatron_packed.ops.gated_delta_rule.tables import CHUNK

_VECTORS_OF_KEY_HEADS = 2
"""Inverse norms of q and of k."""
_VECTORS_OF_VALUE_HEADS = 5
"""Decays and beta of the first kernel."""
_GATE_GRADIENTS = 3
_MATRICES = 2
"""Scores and inverse of each chunk."""


def gated_delta_net_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of a gated delta net."""
    mixer: Any = layer.mixer
    sizes = RecurrentSizes(rank, mixer)
    (key_heads, key_dim), _, (heads, value_dim) = sizes.conv_shapes
    # With a doubled beta the kernels multiply in fp32; see `precision.tile_dtype`.
    of_tiles = FP32 if mixer.allow_neg_eigval else rank.element
    written = sizes.y * of_tiles // rank.element
    # States at the start of all chunks, and their gradients.
    states = -(-sizes.rows // CHUNK) * heads * key_dim * value_dim * of_tiles
    vectors = key_heads * _VECTORS_OF_KEY_HEADS + heads * _VECTORS_OF_VALUE_HEADS
    matrices = _MATRICES * heads * CHUNK * of_tiles
    scores = sizes.rows * (FP32 * vectors + matrices)
    backward = rank.backward_start(
        projected=sizes.projected,
        do=sizes.y,
        convolved=sizes.convolved,
        writes=written,
        exact_dv=written if of_tiles > rank.element else 0,
        gates=FP32 * _GATE_GRADIENTS * heads * sizes.rows,
    )
    rule = Recurrence(
        noun="gated delta rule",
        norm_groups=sizes.inner // value_dim,
        # The inputs of the rule are slices of tensors that other ops save as well.
        saved={"scan.scores": Term(scores)},
        forward={Purpose.ACTIVATIONS: sizes.y},
        backward={**backward, Purpose.STATES: 2 * states},
    )
    return recurrent_footprint(rank, name, GATED_DELTA_NET, layer, sizes, rule)
