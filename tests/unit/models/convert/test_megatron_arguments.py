"""Options of a Megatron checkpoint that change its model without another tensor are refused."""

from pathlib import Path

import pytest

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.parser.command_line import known_flags
from megatron_packed.models.convert.megatron.arguments import model_of_arguments
from support import megatron_checkpoint as theirs

CHANGES = {
    "activation_func_clamp_value": 7.0,
    "apply_residual_connection_post_layernorm": True,
    "experimental_attention_variant": "dsa",
    "export_qk_l2_norm": True,
    "fp32_residual_connection": True,
    "glu_linear_offset": 1.0,
    "heterogeneous_layers_config_path": "layers.json",
    "moe_apply_probs_on_input": True,
    "moe_input_jitter_eps": 0.01,
    "moe_mlp_glu_interleave_size": 32,
    "moe_router_force_biased": 1.0,
    "moe_shared_expert_glu_interleave_size": 32,
    "mrope_section": [1, 1, 2],
    "multi_latent_attention": True,
    "no_rope_freq": 4,
    "openai_gelu": True,
    "qk_clip": True,
    "qk_l2_norm": True,
    "quick_geglu": True,
    "rotary_interleaved": True,
    "rotary_seq_len_interpolation_factor": 2,
    "softmax_type": "off-by-one",
    "use_mup": True,
}
"""Values with which the same tensors are another model. The flags are refused by training, too."""


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_changes_the_model_is_refused_by_name(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert flag in known_flags()
    with pytest.raises(CheckpointError, match=f"its model has {flag} .*which is not supported"):
        model_of_arguments({**theirs.ARGS, name: CHANGES[name]}, 128, Path("theirs"))


def test_options_that_round_differently_are_taken() -> None:
    plain = model_of_arguments(theirs.ARGS, 128, Path("theirs"))
    same = {"apply_query_key_layer_scaling": True, "use_fused_weighted_squared_relu": True}
    assert model_of_arguments({**theirs.ARGS, **same}, 128, Path("theirs")) == plain
