"""Types of the keys of config.json that decide what a model computes.

All families read a key with one type, so one table holds the types. A test compares it with the
keys of the families and with the annotations of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from megatron_packed.models.convert.families.family import Fields

_LARGEST_INTEGER, _LARGEST_NUMBER = 1 << 53, 1e38
"""Bounds that keep a forged number from an overflow in arithmetic."""
_MOST_SHOWN = 100
"""Characters of a value in a message."""


class FieldType(NamedTuple):
    """Type of a value."""

    said: str
    """The type in words, after 'must be'."""
    holds: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _LARGEST_INTEGER


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST_NUMBER


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(holds(item) for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_INTEGER = FieldType("a whole number", _is_integer)
_WIDTH = FieldType("a whole number or 'auto'", lambda value: value == "auto" or _is_integer(value))
_NUMBER = FieldType("a number", _is_number)
_SWITCH = FieldType("true or false", lambda value: isinstance(value, bool))
_TEXT = FieldType("a text", _is_text)
_TEXTS = FieldType("a list of texts", _list_of(_is_text))
_INTEGERS = FieldType("a list of whole numbers", _list_of(_is_integer))
_OBJECT = FieldType("an object", lambda value: isinstance(value, dict))

_COUNTS = """
    chunk_size full_attention_interval linear_num_key_heads linear_num_value_heads mamba_n_heads
    mamba_chunk_size mamba_n_groups mamba_num_heads max_window_layers mtp_num_hidden_layers
    n_group n_groups n_routed_experts num_attention_heads num_experts num_experts_per_tok
    num_heads num_hidden_layers num_key_value_heads num_local_experts num_nextn_predict_layers
    original_max_position_embeddings sliding_window topk_group
"""
_SIZES = """
    attn_rotary_emb head_dim hidden_size intermediate_size linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim mamba_d_state mamba_expand mamba_head_dim
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size
    shared_expert_intermediate_size shared_intermediate_size ssm_state_size state_size
    vocab_size
"""
_KEYS = {
    _INTEGER: f"{_COUNTS} {_SIZES}",
    _WIDTH: "mamba_d_head",
    _NUMBER: """attention_multiplier embedding_multiplier factor high_freq_factor
    layer_norm_epsilon logits_scaling low_freq_factor mtp_loss_scaling_factor
    partial_rotary_factor residual_multiplier rms_norm_eps rope_theta routed_scaling_factor
    time_step_min""",
    _SWITCH: """linear_allow_neg_eigval mamba_conv_bias mtp_use_dedicated_embeddings
    mtp_use_repeated_layer norm_topk_prob rescale_prenorm_residual tie_word_embeddings
    use_conv_bias use_sliding_window""",
    _TEXT: """hybrid_override_pattern mtp_hybrid_override_pattern output_gate_type
    position_embedding_type rope_type type""",
    _TEXTS: "layer_types layers_block_type mtp_layers_block_type",
    _INTEGERS: "attn_layer_indices mlp_only_layers",
    _OBJECT: "rope_parameters rope_scaling text_config",
}
FIELD_TYPES = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
"""Type of each key."""
_NULLABLE = """
    attn_layer_indices head_dim hybrid_override_pattern layer_types layers_block_type
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    mlp_only_layers moe_latent_size mtp_hybrid_override_pattern mtp_layers_block_type
    num_key_value_heads position_embedding_type rope_parameters rope_scaling sliding_window
"""
NULLABLE = frozenset(_NULLABLE.split())
"""Keys whose null has a meaning: no window, no scaled positions, or a value that is derived."""


def shown_value(value: Any) -> str:
    """Return a value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def wrong_types(fields: Fields, read: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield a clause for each value of a wrong type, also inside rotary options and text_config.

    Args:
        read: keys for which null is refused too, unless null has a meaning.
        prefix: path of the object that ``fields`` are, such as ``rope_parameters.``.
    """
    for key, value in fields.items():
        kind = FIELD_TYPES.get(key)
        if kind is None:
            continue
        if value is None:
            if key in read and key not in NULLABLE:
                yield f"{prefix}{key} is null; it must be {kind.said}"
        elif not kind.holds(value):
            yield f"{prefix}{key} is {shown_value(value)}; it must be {kind.said}"
        elif isinstance(value, dict):
            yield from wrong_types(value, read, f"{prefix}{key}.")
