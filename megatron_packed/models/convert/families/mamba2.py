"""Mamba-2: a model of Mamba-2 layers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.decoder import (
    MAMBA_NORM,
    mamba_norm_epsilon,
)
from megatron_packed.models.convert.families.family import (
    LIBRARY,
    Family,
    Fields,
)
from megatron_packed.models.convert.families.nemotron_h import NEMOTRON_H
from megatron_packed.models.convert.families.symbols import MAMBA


def expand(model: ModelConfig) -> int:
    """Return the inner width of Mamba layers as a multiple of the hidden size, rounded down."""
    return model.d_inner // model.hidden_size


def mamba_unfit(model: ModelConfig) -> Iterator[str]:
    """Yield the inner width of Mamba layers if it is no multiple of the hidden size."""
    if model.d_inner % model.hidden_size:
        yield (
            f"{flags.MAMBA_NUM_HEADS} {model.mamba_num_heads} (the family has a multiple of the hidden "
            "size as inner width)"
        )


def _rules(fields: Fields) -> Iterator[str]:
    """Check the option that changes weights when transformers loads them.

    ``rescale_prenorm_residual`` concerns initial weights, but transformers 5.24 also divides loaded
    weights of ``out_proj`` by the root of the number of layers.
    """
    if fields.get("rescale_prenorm_residual", False):
        yield (
            "rescale_prenorm_residual is True, with which transformers divides the loaded weights of "
            "out_proj; set it to false, if the model was trained without this division"
        )


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    spelled=lambda fields: fields,
    blocks=(MAMBA,),
    fixed={"": {"normalization": "RMSNorm"}},
    options={
        "": {
            "hidden_size": "hidden_size",
            "vocab_size": "vocab_size",
            "layer_norm_epsilon": "norm_epsilon",
            "num_heads": "mamba_num_heads",
            "head_dim": "mamba_head_dim",
            "n_groups": "mamba_num_groups",
            "state_size": "mamba_state_dim",
            "chunk_size": "mamba_chunk_size",
            "use_conv_bias": "mamba_conv_bias",
        },
    },
    must_be={
        "": {
            "conv_kernel": ModelConfig.mamba_d_conv,
            "use_bias": False,
            "hidden_act": "silu",
            "time_step_limit": [0.0, math.inf],
        }
    },
    no_effect=LIBRARY
    + """expand max_position_embeddings norm_before_gate num_hidden_layers residual_in_fp32 rms_norm
    tie_word_embeddings time_step_floor time_step_max time_step_min time_step_rank""",
    rules=_rules,
    derive=lambda fields, pattern: mamba_norm_epsilon(fields["layer_norm_epsilon"], pattern),
    derived=MAMBA_NORM,
    derived_from="rescale_prenorm_residual",
    written=lambda model: {"expand": expand(model)},
    unfit=mamba_unfit,
    outside=NEMOTRON_H.outside,
    layer=NEMOTRON_H.layer,
    names={MAMBA: NEMOTRON_H.names[MAMBA]},
)
