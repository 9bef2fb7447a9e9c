"""Dense feed-forward networks as a kind of layer; the mixer is in `layers.mlp`."""

from __future__ import annotations

from megatron_packed.config.kinds.mlp import KIND
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import ProjectedLayer
from megatron_packed.layers.kinds.mixer_kind import NO_STATE, MegatronNames, MixerKind, Place
from megatron_packed.layers.mlp import MLP
from megatron_packed.layers.parameters import Fill, normal, residual_normal, zeros

MLP_FILLS: dict[str, Fill] = {
    "fc1.weight": normal,
    "fc1.bias": zeros,
    "fc2.weight": residual_normal,
    "fc2.bias": zeros,
}


def _build(config: ModelConfig, build: Build, place: Place) -> MLP:
    return MLP(
        config.hidden_size,
        config.ffn_hidden_size,
        kind=config.activation,
        bias=config.add_bias_linear,
        build=build,
    )


MIXER = MixerKind(
    kind=KIND,
    build=_build,
    layer=ProjectedLayer,
    state=NO_STATE,
    fills=MLP_FILLS,
    megatron=MegatronNames(
        modules={
            "norm.": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
            "mixer.fc1.": ("mlp.linear_fc1.",),
            "mixer.fc2.": ("mlp.linear_fc2.",),
        }
    ),
)
