"""Inputs by which ops that join products with what stands around them choose their kernels.

They hold the reasons why a run keeps the operations apart. See `kernel_inputs`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MLP, MOE
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import (
    EXPERT_ACTIVATION,
    MODULES,
    OFFLOADED,
    OFFLOADED_IN,
)
from megatron_packed.layers.joined import BIAS, NOT_LOCAL, TENSOR_PARALLEL
from megatron_packed.layers.transformer_impl import TRANSFORMER_ENGINE_NAME
from megatron_packed.memory.apply import offloaded_parts, recomputed_parts
from megatron_packed.ops.backend_dispatch import Op
from megatron_packed.ops.dense_mlp import api as dense_mlp
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.residual_projection import api as residual_projection
from megatron_packed.training.build_job import dtype_of


def dense_mlp_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    """Yield the backward pass of dense MLPs and of shared experts, if it has several backends."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if (model.activation, kind) not in dense_mlp.WITH_CHOICE:
        return
    apart = TENSOR_PARALLEL if tp > 1 else ""
    if config.training.transformer_impl == TRANSFORMER_ENGINE_NAME:
        apart = NOT_LOCAL
    found = []
    if MLP in model.hybrid_layer_pattern:
        offloaded = f"{OFFLOADED} names parts of dense MLPs"
        own = BIAS if model.add_bias_linear else offloaded
        separate = model.add_bias_linear or config.memory.offloads_parts_of_mlp
        found.append((model.ffn_hidden_size, apart or (own if separate else "")))
    if MOE in model.hybrid_layer_pattern and model.moe_shared_expert_intermediate_size:
        found.append((model.moe_shared_expert_intermediate_size, apart))
    for inner, reason in found:
        yield (
            dense_mlp.OP,
            dense_mlp.DenseMLPInputs(
                channels=model.hidden_size,
                inner=inner // tp,
                kind=model.activation,
                dtype=dtype_of(config),
                device_type=kind,
                apart=reason,
            ),
        )


def grouped_mlp_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    """Yield the experts, once for each reason why layers call their steps one by one."""
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    inner = (model.moe_ffn_hidden_size or 0) // parallel.expert_tensor_parallel_size
    # Layers with the same reason choose the same kernel, so one entry serves all of them.
    for apart in dict.fromkeys(_reasons_of_experts(config)):
        yield (
            grouped_mlp.OP,
            grouped_mlp.GroupedMLPInputs(
                channels=model.routed_width,
                experts=(model.num_experts or 0) // parallel.expert_model_parallel_size,
                hidden_in=2 * inner if model.activation == "swiglu" else inner,
                hidden_out=inner,
                activation=model.activation,
                dtype=dtype,
                weight_dtype=dtype,
                device_type=kind,
                apart=apart,
            ),
        )


def _reasons_of_experts(config: RunConfig) -> Iterator[str]:
    """Yield for each layer with experts why it calls their steps one by one; empty if it does not."""
    for number, symbol in enumerate(config.model.layer_types):
        if symbol != MOE:
            continue
        # A norm before the experts is a part of the layer too, but no step of the experts.
        offloaded = offloaded_parts(config.memory, MOE, number)
        if any(OFFLOADED_IN[part] == MOE for part in offloaded):
            yield f"{OFFLOADED} names parts of experts"
        elif EXPERT_ACTIVATION in recomputed_parts(config.memory, MOE):
            yield f"{MODULES} names {EXPERT_ACTIVATION}"
        else:
            yield ""


def calls_activation(config: RunConfig, kind: str) -> bool:
    """Return whether a training step calls the op ``activation`` of MLPs or of experts.

    The first backend of each op that joins computes the activation in its products.
    """
    model = config.model
    dense, experts = (list(ops(config, kind)) for ops in (dense_mlp_ops, grouped_mlp_ops))
    if any(op.backends[0].reasons(inputs) for op, inputs in (*dense, *experts)):
        return True
    # `dense_mlp_ops` yields nothing where dense MLPs have no backend that joins.
    has_mlp = MLP in model.layer_types or bool(model.moe_shared_expert_intermediate_size)
    return has_mlp and not dense


def residual_projection_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    """Yield the end of each kind of layer and of shared experts, if it has several backends."""
    if kind not in residual_projection.WITH_CHOICE:
        return
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    widths = {
        ATTENTION: lambda: model.num_attention_heads * model.head_dim,
        MAMBA: lambda: model.d_inner,
        GATED_DELTA_NET: lambda: model.linear_value_dim,
        MLP: lambda: model.ffn_hidden_size,
    }
    for symbol, width in widths.items():
        if symbol in model.layer_types:
            yield (
                residual_projection.OP,
                residual_projection.ResidualProjectionInputs(
                    inner=width() // tp,
                    channels=model.hidden_size,
                    dtype=dtype_of(config),
                    device_type=kind,
                    apart=_reason_to_add_apart(config, symbol),
                ),
            )
    if MOE in model.layer_types and model.moe_shared_expert_intermediate_size:
        yield (
            residual_projection.OP,
            residual_projection.ResidualProjectionInputs(
                inner=model.moe_shared_expert_intermediate_size // tp,
                channels=model.hidden_size,
                dtype=dtype_of(config),
                device_type=kind,
                apart=_reason_to_add_shared_expert_apart(config),
            ),
        )


def _reason_to_add_shared_expert_apart(config: RunConfig) -> str:
    """Return why routed and shared experts' results are added in a kernel of its own; empty if not."""
    if config.training.transformer_impl == TRANSFORMER_ENGINE_NAME:
        return NOT_LOCAL
    if config.parallel.tensor_model_parallel_size > 1:
        return TENSOR_PARALLEL
    if config.model.moe_shared_expert_gate:
        return "the shared expert's output is multiplied by its gate"
    if config.model.moe_shared_expert_overlap:
        return "the shared expert runs beside the routed experts"
    return ""


def _reason_to_add_apart(config: RunConfig, symbol: str) -> str:
    """Return why all layers of this kind add the residual in a kernel of its own; empty if some do not."""
    model = config.model
    numbers = [number for number, other in enumerate(model.layer_types) if other == symbol]
    if config.training.transformer_impl == TRANSFORMER_ENGINE_NAME:
        return NOT_LOCAL
    if config.parallel.tensor_model_parallel_size > 1:
        return TENSOR_PARALLEL
    if model.add_bias_linear and symbol in (ATTENTION, MLP):
        return BIAS
    if model.hidden_dropout:
        return "the mixer's output has dropout"
    if model.residual_multiplier is not None:
        return "the mixer's output is multiplied before the addition"
    if all(map(model.norms_output, numbers)):
        return "the mixer's output is normalised before the addition"
    return ""
