"""Inputs by which the ops of a run choose their kernels, and backends that options name.

The inputs equal those that the model will pass to the ops, with the sizes of one rank. The rules
of the choice are in the ops only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from megatron_packed.config.kernel_options import attention_op
from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MLP, MOE
from megatron_packed.config.run import RunConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.transformer_impl import TRANSFORMER_ENGINE_NAME
from megatron_packed.ops.activation import api as activation
from megatron_packed.ops.backend_dispatch import Op
from megatron_packed.ops.causal_conv1d import api as causal_conv1d
from megatron_packed.ops.context_parallel_attention import api as context_parallel_attention
from megatron_packed.ops.cross_entropy import api as cross_entropy
from megatron_packed.ops.gated_delta_rule import api as gated_delta_rule
from megatron_packed.ops.gated_rms_norm import api as gated_rms_norm
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.permute import api as permute
from megatron_packed.ops.rms_norm import api as rms_norm
from megatron_packed.ops.rope import api as rope
from megatron_packed.ops.router_logits import api as router_logits
from megatron_packed.ops.ssd import api as ssd
from megatron_packed.ops.varlen_attention import backends as varlen_attention
from megatron_packed.ops.varlen_attention.api import effective_window
from megatron_packed.optim import adamw
from megatron_packed.training.build_job import backends_of, dtype_of
from megatron_packed.training.joined_inputs import (
    calls_activation,
    dense_mlp_ops,
    grouped_mlp_ops,
    residual_projection_ops,
)

UNKNOWN_VOCABULARY = 32_768
"""Number of vocabulary entries assumed for the choice of the loss kernel before a tokenizer is read."""


def op_inputs(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> Iterator[tuple[Op, Hashable]]:
    """Yield every op that a rank runs, with the inputs by which the op chooses its kernel.

    Args:
        config: configuration of the run.
        device: device of the rank.
        documents: largest number of documents in a pack; by default, the capacity of the largest
            capture size, or 1 without graphs.
    """
    model, dtype, kind = config.model, dtype_of(config), device.type
    if ATTENTION in model.hybrid_layer_pattern:
        yield from _attention_ops(config, device, documents)
    if MAMBA in model.hybrid_layer_pattern:
        yield from _mamba_ops(config, kind)
    if GATED_DELTA_NET in model.hybrid_layer_pattern:
        yield from _gated_delta_net_ops(config, kind)
    # TransformerEngine has its own norms of the hidden state, but not of queries and keys.
    of_layers = config.training.transformer_impl != TRANSFORMER_ENGINE_NAME
    of_heads = model.qk_layernorm and ATTENTION in model.hybrid_layer_pattern
    if model.normalization == "RMSNorm" and (of_layers or of_heads):
        yield (
            rms_norm.OP,
            rms_norm.RMSNormInputs(
                features=model.hidden_size if of_layers else model.head_dim,
                dtype=dtype,
                weight_dtype=dtype,
                device_type=kind,
                zero_centered=model.apply_layernorm_1p,
            ),
        )
    yield from _feed_forward_ops(config, kind)
    yield from dense_mlp_ops(config, kind)
    yield from residual_projection_ops(config, kind)
    tp = config.parallel.tensor_model_parallel_size
    rows = model.padded_vocab_size(model.vocab_size or UNKNOWN_VOCABULARY, tp) // tp
    yield (
        cross_entropy.OP,
        cross_entropy.CrossEntropyInputs(vocab_rows=rows, dtype=dtype, device_type=kind),
    )
    yield adamw.OP, adamw.AdamWInputs(device_type=kind)


def _attention_ops(
    config: RunConfig, device: torch.device, documents: int | None
) -> Iterator[tuple[Op, Hashable]]:
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, kv_heads = model.num_attention_heads // tp, max(model.num_query_groups // tp, 1)
    deterministic = config.training.deterministic_mode
    windows = [window for window in model.attention_windows if window is not None]
    # Layers with and without a window run the same kernel. It must serve the smallest window.
    window = effective_window(min(windows, default=None), config.packing.tokens_per_pack)
    if attention_op(config) == varlen_attention.OP.name:
        yield (
            varlen_attention.OP,
            varlen_attention.inputs_of_pack(
                tokens=config.packing.tokens_per_pack,
                num_heads=heads // cp,
                num_kv_heads=max(kv_heads // cp, 1),
                head_dim=model.head_dim,
                dtype=dtype,
                device=device,
                deterministic=deterministic,
                window_size=window,
                automatic=_backends(config).varlen_attention == "auto",
                documents=documents or (config.cuda_graph.capacities or (1,))[-1],
            ),
        )
    else:
        yield (
            context_parallel_attention.OP,
            context_parallel_attention.ContextParallelAttentionInputs(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=model.head_dim,
                dtype=dtype,
                device_type=device.type,
                comm_type=parallel.cp_comm_type,
                deterministic=deterministic,
                window_size=window,
            ),
        )
    if model.position_embedding_type == "rope":
        yield (
            rope.OP,
            rope.RopeInputs(
                dtype=dtype,
                device_type=device.type,
                head_dim=model.head_dim,
                rotary_dim=model.rotary_dim,
            ),
        )


def _mamba_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    tp, split = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tokens = config.packing.tokens_per_pack
    if parallel.passes_states:
        # A rank has all heads of its rows.
        tokens, split = tokens // split, 1
    heads, groups = (
        model.mamba_num_heads // tp // split,
        max(max(model.mamba_num_groups // tp, 1) // split, 1),
    )
    inner, states = heads * model.mamba_head_dim, groups * model.mamba_state_dim
    channels = inner + 2 * states
    row_stride = channels + heads + (inner if split == 1 else 0)
    yield (
        causal_conv1d.OP,
        causal_conv1d.CausalConvInputs(
            tokens=tokens,
            channels=channels,
            width=model.mamba_d_conv,
            row_stride=row_stride,
            dtype=dtype,
            weight_dtype=dtype,
            bias_dtype=dtype if model.mamba_conv_bias else None,
            device_type=kind,
        ),
    )
    yield (
        ssd.OP,
        ssd.SSDInputs(
            tokens=tokens,
            heads=heads,
            head_dim=model.mamba_head_dim,
            groups=groups,
            state_dim=model.mamba_state_dim,
            chunk_size=model.mamba_chunk_size,
            row_stride=channels,
            dtype=dtype,
            device_type=kind,
        ),
    )
    yield (
        gated_rms_norm.OP,
        gated_rms_norm.GatedRMSNormInputs(
            channels=inner * split,
            group_size=model.d_inner // model.gated_norm_groups,
            unit_channel_stride=True,
            dtype=dtype,
            device_type=kind,
            split_group=model.gated_norm_groups < tp,
        ),
    )


def _gated_delta_net_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    tokens = config.packing.tokens_per_pack
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    key_heads = model.linear_num_key_heads // tp // cp
    value_heads = model.linear_num_value_heads // tp // cp
    values = value_heads * model.linear_value_head_dim
    channels = 2 * key_heads * model.linear_key_head_dim + values
    yield (
        causal_conv1d.OP,
        causal_conv1d.CausalConvInputs(
            tokens=tokens,
            channels=channels,
            width=model.linear_conv_kernel_dim,
            row_stride=channels + (values if cp == 1 else 0) + 2 * value_heads,
            dtype=dtype,
            weight_dtype=dtype,
            bias_dtype=None,
            device_type=kind,
        ),
    )
    yield (
        gated_delta_rule.OP,
        gated_delta_rule.GatedDeltaRuleInputs(
            tokens=tokens,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=model.linear_key_head_dim,
            value_dim=model.linear_value_head_dim,
            allow_neg_eigval=model.linear_allow_neg_eigval,
            deterministic=config.training.deterministic_mode,
            dtype=dtype,
            device_type=kind,
        ),
    )
    yield (
        gated_rms_norm.OP,
        gated_rms_norm.GatedRMSNormInputs(
            channels=values * cp,
            group_size=model.linear_value_head_dim,
            unit_channel_stride=True,
            dtype=dtype,
            device_type=kind,
            norm_before_gate=True,
            shared_weight=value_heads * cp > 1,
        ),
    )


def _feed_forward_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    gated = 2 if model.activation == "swiglu" else 1
    width = model.ffn_hidden_size // parallel.tensor_model_parallel_size
    if MOE in model.hybrid_layer_pattern:
        assert model.num_experts is not None
        expert = model.moe_ffn_hidden_size // parallel.expert_tensor_parallel_size
        yield from grouped_mlp_ops(config, kind)
        yield (
            permute.OP,
            permute.PermuteInputs(
                channels=model.routed_width,
                routes=model.moe_router_topk,
                dtype=dtype,
                device_type=kind,
            ),
        )
        yield (
            router_logits.OP,
            router_logits.RouterLogitsInputs(
                channels=model.hidden_size,
                experts=model.num_experts,
                dtype=dtype,
                weight_dtype=torch.float32,
                device_type=kind,
            ),
        )
        if MLP not in model.hybrid_layer_pattern:
            shared = model.moe_shared_expert_intermediate_size
            width = shared // parallel.tensor_model_parallel_size if shared else expert
    if calls_activation(config, kind):
        yield (
            activation.OP,
            activation.ActivationInputs(
                kind=model.activation, features=width * gated, dtype=dtype, device_type=kind
            ),
        )
    elif ATTENTION in model.hybrid_layer_pattern and model.attention_output_gate:
        heads = model.num_attention_heads // model.num_query_groups
        yield (
            activation.OP,
            activation.ActivationInputs(
                kind=activation.GATE, features=heads * model.head_dim, dtype=dtype, device_type=kind
            ),
        )


def asked_of(config: RunConfig, op: Op, device: torch.device) -> str:
    """Return the backend that the run requests of an op: a name, or ``auto``."""
    if op is adamw.OP:
        return config.optim.optimizer_backend
    if op is context_parallel_attention.OP:
        return context_parallel_attention.resolved_backend(
            _backends(config).context_parallel_attention, device.type
        )
    if op is activation.OP and MOE in config.model.hybrid_layer_pattern and not _has_mlp(config):
        # All activations run inside experts, so the backend of the grouped product decides. The
        # reference of the grouped product uses the reference activation. Every other backend uses
        # the activation that ``auto`` chooses.
        inputs = next(
            inputs for other, inputs in op_inputs(config, device) if other is grouped_mlp.OP
        )
        return "reference" if grouped_mlp.OP.select(inputs).name == "reference" else "auto"
    return str(getattr(_backends(config), op.name))


def _backends(config: RunConfig) -> Backends:
    return Backends.of(backends_of(config))


def _has_mlp(config: RunConfig) -> bool:
    """Return True if activations also run outside of routed experts."""
    return MLP in config.model.hybrid_layer_pattern or bool(
        config.model.moe_shared_expert_intermediate_size
    )
