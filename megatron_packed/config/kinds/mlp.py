"""MLP layers; their options are those of the stack, because experts have them, too."""

from __future__ import annotations

from megatron_packed.config.kinds.layer_kind import (
    ACTIVATION,
    LayerKind,
    LayerPart,
    Shared,
    gated_mlp,
)

KIND = LayerKind(
    symbol="-",
    name="MLP",
    place=4,
    mixes_tokens=False,
    may_have_bias=True,
    has_mlp=True,
    shared=(Shared("ffn_hidden_size"),),
    graph_modules=("mlp",),
    mixer_module="mlp",
    inside_norm=("mlp_norm", "mlp_fc1"),
    parts=(
        LayerPart("mlp_norm", "norm"),
        LayerPart("mlp_fc1", "mixer.fc1"),
        LayerPart("mlp_act", "mixer.mlp_act", ACTIVATION),
        LayerPart("mlp_fc2", "mixer.fc2"),
    ),
    projections=gated_mlp("", "mlp"),
    example="--ffn-hidden-size 512",
)
