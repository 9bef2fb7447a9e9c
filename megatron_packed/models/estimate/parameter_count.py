"""Number of parameters of a configuration, computed without building the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MLP, MOE
from megatron_packed.config.sections.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of parameters of a model; every weight counts once, tied weights too."""

    total: int
    active: int
    """Parameters that one token uses: of the routed experts only ``moe_router_topk``."""
    embedding: int
    """Parameters of an embedding table that is only looked up; 0 if it is tied to the output."""

    @property
    def multiplied(self) -> int:
        """Active parameters that take part in a product with the token: all but ``embedding``."""
        return self.active - self.embedding


def fc1_rows(config: ModelConfig, inner_size: int) -> int:
    """Return the rows of a feed-forward network's first weight; SwiGLU has gate and value rows."""
    return 2 * inner_size if config.activation == "swiglu" else inner_size


def feed_forward(config: ModelConfig, inner_size: int) -> int:
    """Return the number of weights of one feed-forward network, without biases."""
    return config.hidden_size * (fc1_rows(config, inner_size) + inner_size)


def routed_expert(config: ModelConfig) -> int:
    """Return the number of weights of one routed expert, which has no biases."""
    inner_size = config.moe_ffn_hidden_size
    return config.routed_width * (fc1_rows(config, inner_size) + inner_size)


def latent_projections(config: ModelConfig) -> int:
    """Return the number of weights of an expert layer's two projections [Note: latent experts]."""
    return 2 * config.hidden_size * (config.moe_latent_size or 0)


def shared_expert(config: ModelConfig) -> int:
    """Return the number of weights of an expert layer's shared expert, with its gate."""
    inner_size = config.moe_shared_expert_intermediate_size
    if not inner_size:
        return 0
    return feed_forward(config, inner_size) + config.hidden_size * config.moe_shared_expert_gate


def qkv_rows(config: ModelConfig) -> int:
    """Return the rows of the fused projection of an attention layer."""
    queries = config.num_attention_heads * (2 if config.attention_output_gate else 1)
    return (queries + 2 * config.num_query_groups) * config.head_dim


def query_key_norm_parameters(config: ModelConfig) -> int:
    """Return the parameters of the norms of queries and keys of an attention layer."""
    if not config.qk_layernorm:
        return 0
    if config.qk_layernorm_scope == "all_heads":
        return (config.num_attention_heads + config.num_query_groups) * config.head_dim
    return 2 * config.head_dim * (2 if config.normalization == "LayerNorm" else 1)


def conv_channels(config: ModelConfig) -> int:
    """Return the channels of a Mamba layer's convolution: x, B and C."""
    return config.d_inner + 2 * config.mamba_num_groups * config.mamba_state_dim


def gated_delta_net_rows(config: ModelConfig) -> int:
    """Return the rows of the input projection of a gated delta net: q, k, v, z, b and a."""
    heads = config.linear_num_value_heads
    return 2 * (config.linear_key_dim + config.linear_value_dim + heads)


def layer_parameters(config: ModelConfig, symbol: str) -> tuple[int, int]:
    """Return the (total, active) parameters of one layer, its norm included."""
    hidden, bias = config.hidden_size, config.add_bias_linear
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    if symbol == ATTENTION:
        rows, width = qkv_rows(config), config.num_attention_heads * config.head_dim
        biases = rows * (bias or config.add_qkv_bias) + hidden * bias
        norm += query_key_norm_parameters(config)
        count = norm + hidden * rows + width * hidden + biases
    elif symbol == MLP:
        biases = (fc1_rows(config, config.ffn_hidden_size) + hidden) * bias
        count = norm + feed_forward(config, config.ffn_hidden_size) + biases
    elif symbol == MAMBA:
        channels, inner, heads = conv_channels(config), config.d_inner, config.mamba_num_heads
        convolution = channels * (config.mamba_d_conv + config.mamba_conv_bias)
        projections = hidden * (inner + channels + heads) + inner * hidden
        count = norm + projections + convolution + 3 * heads + inner
    elif symbol == GATED_DELTA_NET:
        channels = 2 * config.linear_key_dim + config.linear_value_dim
        projections = hidden * (gated_delta_net_rows(config) + config.linear_value_dim)
        per_head = 2 * config.linear_num_value_heads + config.linear_value_head_dim
        count = norm + projections + channels * config.linear_conv_kernel_dim + per_head
    else:
        assert symbol == MOE and config.num_experts is not None, symbol
        expert = routed_expert(config)
        everyone = norm + config.num_experts * hidden
        everyone += shared_expert(config) + latent_projections(config)
        return everyone + config.num_experts * expert, everyone + config.moe_router_topk * expert
    return count, count


def depth_projection(config: ModelConfig) -> int:
    """Return the weights of the projection at the beginning of a depth of multi-token prediction."""
    return 2 * config.hidden_size**2


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Count the parameters of the complete model. Repeated depths count once.

    Args:
        vocab_size: entries of the tokenizer; the tables have
            ``config.padded_vocab_size(vocab_size)`` rows.
    """
    table = config.padded_vocab_size(vocab_size) * config.hidden_size
    norm = config.hidden_size * (2 if config.normalization == "LayerNorm" else 1)
    depths = min(config.mtp_depths, 1) if config.mtp_use_repeated_layer else config.mtp_depths
    total = table + norm + depths * (depth_projection(config) + 3 * norm)
    if config.untie_embeddings_and_output_weights:
        total += table
    active = total
    for symbol in config.main_layers + depths * config.mtp_layers:
        layer_total, layer_active = layer_parameters(config, symbol)
        total, active = total + layer_total, active + layer_active
    looked_up = table if config.untie_embeddings_and_output_weights else 0
    return ParameterCount(total=total, active=active, embedding=looked_up)
