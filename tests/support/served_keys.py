"""Keys of config.json that vLLM and SGLang read for each family that a new config.json can have.

The keys were copied from the files named below on 2026-11-28, from the commit of vllm-project/vllm
or sgl-project/sglang that is named with each. They are attributes of ``config``, ``hf_config`` or
``hf_text_config`` in the code that builds a model or its caches. A key of the vision model, of
quantisation, of LoRA or of a draft model is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

VLLM, SGLANG = "vLLM", "SGLang"
_HEADS = "num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings "
_MLP = "intermediate_size hidden_act "
_DELTA = """linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
    linear_conv_kernel_dim hidden_act rms_norm_eps """
_LLAMA = f"{_HEADS} {_MLP} attention_bias mlp_bias rope_theta pad_token_id "
_BAMBA = """mamba_d_state mamba_d_conv mamba_expand mamba_conv_bias mamba_proj_bias mamba_n_groups
    mamba_n_heads mamba_d_head rms_norm_eps hidden_act """
_NEMOTRON_MAMBA = """ssm_state_size conv_kernel mamba_num_heads mamba_head_dim use_conv_bias
    use_bias n_groups mamba_hidden_act """
_NEMOTRON_EXPERTS = """routed_scaling_factor n_routed_experts n_shared_experts moe_latent_size
    moe_shared_expert_intermediate_size num_experts_per_tok moe_intermediate_size norm_topk_prob
    n_group topk_group mlp_hidden_act """
_QWEN_EXPERTS = """num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    shared_expert_intermediate_size """
_GRANITE = "embedding_multiplier residual_multiplier logits_scaling layer_types num_local_experts "


class Served(NamedTuple):
    """Keys that one library reads for one family."""

    family: str
    library: str
    source: str
    """File of the library, and the first digits of the commit from which the keys were copied."""
    keys: str
    """Keys, separated by spaces, that a model of any pattern needs."""
    of_symbols: Mapping[str, str] = {}
    """Further keys, by the symbol of the layers that read them."""
    own: Mapping[str, Any] | None = None
    """Defaults of the library's own configuration class, of keys that config.json may lack. None if
    the library takes the class of transformers.
    """


_VLLM, _SGLANG = "vllm/model_executor/models/", "python/sglang/srt/models/"
SERVED = (
    Served("llama", VLLM, _VLLM + "llama.py 0035bdf2", _LLAMA),
    Served("llama", SGLANG, _SGLANG + "llama.py 00239548", _LLAMA),
    Served("mistral", VLLM, _VLLM + "llama.py 0035bdf2", _LLAMA + "sliding_window"),
    Served("mistral", SGLANG, _SGLANG + "mistral.py 00b08c49, llama.py 00239548", _LLAMA),
    Served(
        "mixtral",
        VLLM,
        _VLLM + "mixtral.py 005df92d",
        f"{_HEADS} rope_theta sliding_window num_local_experts num_experts_per_tok intermediate_size",
    ),
    Served(
        "mixtral",
        SGLANG,
        _SGLANG + "mixtral.py 02356cee",
        f"{_HEADS} rope_theta sliding_window num_local_experts num_experts_per_tok intermediate_size",
    ),
    Served(
        "qwen2",
        VLLM,
        _VLLM + "qwen2.py 013a2792",
        f"{_HEADS} {_MLP} rope_theta pad_token_id max_window_layers",
    ),
    Served("qwen2", SGLANG, _SGLANG + "qwen2.py 0005b7e1", f"{_HEADS} {_MLP} rope_theta"),
    Served(
        "qwen3", VLLM, _VLLM + "qwen3.py 002456df", f"{_HEADS} {_MLP} rope_theta attention_bias"
    ),
    Served(
        "qwen3", SGLANG, _SGLANG + "qwen3.py 01b5f572", f"{_HEADS} {_MLP} rope_theta attention_bias"
    ),
    Served(
        "qwen3_moe",
        VLLM,
        _VLLM + "qwen3_moe.py 002456df",
        f"{_HEADS} rope_theta attention_bias decoder_sparse_step mlp_only_layers num_experts "
        "num_experts_per_tok moe_intermediate_size norm_topk_prob",
    ),
    Served(
        "qwen3_moe",
        SGLANG,
        _SGLANG + "qwen3_moe.py 008af3a6",
        f"{_HEADS} rope_theta num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob",
    ),
    # vLLM has a configuration class of its own. All keys must be in config.json.
    Served(
        "qwen3_next",
        VLLM,
        _VLLM + "qwen3_next.py 002d6073",
        f"{_QWEN_EXPERTS} layer_types hidden_act decoder_sparse_step rms_norm_eps",
        {"*": _HEADS + "rope_theta partial_rotary_factor", "G": _DELTA},
        own={},
    ),
    Served(
        "qwen3_next",
        SGLANG,
        "python/sglang/srt/configs/qwen3_next.py 041bacd3, "
        + _SGLANG
        + "qwen3_next.py 0201bc80, qwen2_moe.py",
        f"{_QWEN_EXPERTS} full_attention_interval hidden_act mlp_only_layers decoder_sparse_step",
        {"*": _HEADS + "rope_theta partial_rotary_factor", "G": _DELTA},
        own={"mlp_only_layers": [], "decoder_sparse_step": 1, "rope_scaling": None},
    ),
    Served(
        "qwen3_5_text",
        VLLM,
        _VLLM + "qwen3_5.py 00def4f8",
        f"{_MLP} layer_types rms_norm_eps",
        {"*": _HEADS + "rope_parameters", "G": _DELTA},
        own={},
    ),
    Served(
        "qwen3_5_moe_text",
        VLLM,
        _VLLM + "qwen3_5.py 00def4f8, qwen3_next.py 002d6073",
        f"{_QWEN_EXPERTS} layer_types hidden_act rms_norm_eps",
        {"*": _HEADS + "rope_parameters", "G": _DELTA},
        own={},
    ),
    Served(
        "qwen3_5_text",
        SGLANG,
        "python/sglang/srt/configs/qwen3_5.py 0f6f0002, " + _SGLANG + "qwen3_5.py 005fa711",
        f"{_MLP} full_attention_interval rms_norm_eps",
        {"*": _HEADS + "rope_parameters partial_rotary_factor attn_output_gate", "G": _DELTA},
        own={},
    ),
    Served(
        "qwen3_5_moe_text",
        SGLANG,
        "python/sglang/srt/configs/qwen3_5.py 0f6f0002, " + _SGLANG + "qwen3_5.py 005fa711",
        f"{_QWEN_EXPERTS} full_attention_interval hidden_act rms_norm_eps",
        {"*": _HEADS + "rope_parameters partial_rotary_factor attn_output_gate", "G": _DELTA},
        own={},
    ),
    Served(
        "olmo_hybrid",
        VLLM,
        _VLLM + "olmo_hybrid.py 055e47c2",
        f"{_MLP} layer_types rms_norm_eps",
        {
            "*": "num_attention_heads num_key_value_heads rope_parameters max_position_embeddings",
            "G": _DELTA + "linear_allow_neg_eigval",
        },
        own={},
    ),
    Served(
        "nemotron_h",
        VLLM,
        _VLLM + "nemotron_h.py 00b08dc4",
        f"hybrid_override_pattern layer_norm_epsilon {_NEMOTRON_MAMBA}",
        {
            "*": "num_attention_heads num_key_value_heads head_dim sliding_window",
            "-": "intermediate_size mlp_bias",
            "E": _NEMOTRON_EXPERTS,
        },
    ),
    Served(
        "nemotron_h",
        SGLANG,
        "python/sglang/srt/configs/nemotron_h.py 01144484, " + _SGLANG + "nemotron_h.py 02c60328",
        f"hybrid_override_pattern layer_norm_epsilon {_NEMOTRON_MAMBA} mamba_proj_bias",
        {
            "*": "num_attention_heads num_key_value_heads head_dim",
            "-": "intermediate_size mlp_bias",
            "E": _NEMOTRON_EXPERTS,
        },
        own={
            "conv_kernel": 4,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "mamba_num_heads": 128,
            "mamba_proj_bias": False,
            "mlp_bias": False,
            "ssm_state_size": 128,
            "use_bias": False,
            "use_conv_bias": True,
        },
    ),
    Served(
        "mamba2",
        VLLM,
        _VLLM + "mamba2.py 055e47c2",
        """state_size conv_kernel expand n_groups
        use_conv_bias use_bias num_heads head_dim layer_norm_epsilon hidden_act""",
    ),
    Served(
        "bamba",
        VLLM,
        _VLLM + "bamba.py 017597e9",
        f"{_BAMBA} {_MLP} layers_block_type",
        {"*": "num_attention_heads num_key_value_heads max_position_embeddings rope_theta"},
    ),
    Served(
        "granitemoehybrid",
        VLLM,
        _VLLM + "granitemoehybrid.py 0195c9ec",
        f"{_BAMBA} {_GRANITE}",
        {
            "*": "num_attention_heads num_key_value_heads attention_bias attention_multiplier "
            "position_embedding_type max_position_embeddings rope_parameters",
            "-": "shared_intermediate_size",
            "E": "num_experts_per_tok intermediate_size shared_intermediate_size",
        },
    ),
    Served(
        "granitemoehybrid",
        SGLANG,
        "python/sglang/srt/configs/granitemoehybrid.py 7f1ce9b5, "
        + _SGLANG
        + "granitemoehybrid.py 008b79d2",
        f"{_BAMBA} {_GRANITE}",
        {
            "*": "num_attention_heads num_key_value_heads attention_bias attention_multiplier "
            "position_embedding_type max_position_embeddings rope_theta",
            "-": "shared_intermediate_size",
            "E": "num_experts_per_tok intermediate_size shared_intermediate_size",
        },
        own={
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_proj_bias": False,
            "attention_bias": False,
        },
    ),
)
"""Tables of all families. SGLang has no file for Bamba and Mamba-2, and its file for OLMo Hybrid has
no entry in its registry of configurations.
"""
REGISTERED = {
    VLLM: """BambaForCausalLM GraniteMoeHybridForCausalLM LlamaForCausalLM Mamba2ForCausalLM
        MistralForCausalLM MixtralForCausalLM NemotronHForCausalLM OlmoHybridForCausalLM
        Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
        Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM""",
    SGLANG: """GraniteMoeHybridForCausalLM LlamaForCausalLM MistralForCausalLM MixtralForCausalLM
        NemotronHForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
        Qwen3NextForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration""",
}
"""Classes by the names that ``architectures`` may have: in vLLM those of its registry (0002bff0, and
for Qwen3.5 version 0.28), in SGLang those of ``EntryClass`` in the files above.
"""
NOT_REGISTERED = {("qwen3_5_text", SGLANG), ("qwen3_5_moe_text", SGLANG)}
"""Families whose text model alone the library does not serve; its class needs the vision model."""
EVERY_FAMILY = (
    "architectures model_type vocab_size hidden_size num_hidden_layers tie_word_embeddings"
)
"""Keys that both libraries read for all families."""
