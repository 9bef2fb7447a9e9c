"""Inputs by which a run chooses products that include an activation or the residual.

They hold the reasons why a run keeps the operations apart. See `kernel_inputs`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MLP, MOE
from megatron_packed.config.optional_packages import is_installed
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
from megatron_packed.ops.quack_tiles import device_reasons
from megatron_packed.ops.residual_projection import api as residual_projection
from megatron_packed.training.build_job import dtype_of


def dense_mlp_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    """Yield dense MLPs and shared experts, once for each reason, if they have several backends."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if (model.activation, kind) not in dense_mlp.WITH_CHOICE:
        return
    found = [
        (model.ffn_hidden_size, _reason_of_dense_mlp(config, number))
        for number, symbol in enumerate(model.layer_types)
        if symbol == MLP
    ]
    if MOE in model.layer_types and model.moe_shared_expert_intermediate_size:
        found.append((model.moe_shared_expert_intermediate_size, _reason_of_layout(config)))
    for inner, reason in dict.fromkeys(found):
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


def _reason_of_layout(config: RunConfig) -> str:
    """Return why no product of the run is joined; empty if some may be."""
    if config.training.transformer_impl == TRANSFORMER_ENGINE_NAME:
        return NOT_LOCAL
    return TENSOR_PARALLEL if config.parallel.tensor_model_parallel_size > 1 else ""


def _reason_of_dense_mlp(config: RunConfig, number: int) -> str:
    """Return why a dense MLP calls its steps one by one; empty if it does not."""
    if reason := _reason_of_layout(config):
        return reason
    if config.model.add_bias_linear:
        return BIAS
    # A norm before the MLP is a part of the layer too, but no step of the MLP.
    offloaded = offloaded_parts(config.memory, MLP, number)
    named = any(OFFLOADED_IN[part] == MLP for part in offloaded)
    return f"{OFFLOADED} names parts of dense MLPs" if named else ""


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


def useless_recomputation(config: RunConfig, kind: str) -> str:
    """Return why ``--recompute-modules moe_act`` saves no memory; empty if it is not given or does.

    A recomputed activation is a call of its own. If all experts would join it with their products
    without this option, it is not saved in either case.
    """
    if MOE not in config.model.layer_types:
        return ""
    if EXPERT_ACTIVATION not in recomputed_parts(config.memory, MOE):
        return ""
    without = replace(config, memory=replace(config.memory, recompute_granularity=None))
    joined = grouped_mlp.JOINED
    if any(joined.reasons(inputs) for _, inputs in grouped_mlp_ops(without, kind)):
        return ""
    return (
        f"{EXPERT_ACTIVATION} saves no memory: without it the experts run {joined.name}, which does "
        "not save the activation either and takes less time"
    )


def lacks_joined_kernels(config: RunConfig) -> bool:
    """Return whether layers might save fewer activations with kernels that this machine lacks."""
    if not device_reasons("cuda") and is_installed("quack.gemm"):
        return False
    model = config.model
    found: list[tuple[Op, Any]] = [*dense_mlp_ops(config, "cuda")]
    if MOE in model.layer_types and (model.activation, "cuda") in grouped_mlp.WITH_JOINED:
        found += grouped_mlp_ops(config, "cuda")
    return config.training.bf16 and any(not inputs.apart for _, inputs in found)


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
    """Yield the ends of layers and of shared experts, once for each width and reason.

    Nothing is yielded on devices where the op has only one backend.
    """
    if kind not in residual_projection.WITH_CHOICE:
        return
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    widths = {
        ATTENTION: lambda: model.num_attention_heads * model.head_dim,
        MAMBA: lambda: model.d_inner,
        GATED_DELTA_NET: lambda: model.linear_value_dim,
        MLP: lambda: model.ffn_hidden_size,
    }
    found = [
        (widths[symbol](), _reason_to_add_apart(config, number))
        for number, symbol in enumerate(model.layer_types)
        if symbol in widths
    ]
    if MOE in model.layer_types and (shared := model.moe_shared_expert_intermediate_size):
        found.append((shared, _reason_to_add_shared_expert_apart(config)))
    for inner, reason in dict.fromkeys(found):
        yield (
            residual_projection.OP,
            residual_projection.ResidualProjectionInputs(
                inner=inner // tp,
                channels=model.hidden_size,
                dtype=dtype_of(config),
                device_type=kind,
                apart=reason,
            ),
        )


def _reason_to_add_shared_expert_apart(config: RunConfig) -> str:
    """Return why a kernel adds the results of routed and shared experts; empty if a product does."""
    if reason := _reason_of_layout(config):
        return reason
    if config.model.moe_shared_expert_gate:
        return "the shared expert's output is multiplied by its gate"
    if config.model.moe_shared_expert_overlap:
        return "the shared expert runs beside the routed experts"
    return ""


def _reason_to_add_apart(config: RunConfig, number: int) -> str:
    """Return why a layer adds the residual in a kernel of its own; empty if its mixer adds it."""
    model = config.model
    if reason := _reason_of_layout(config):
        return reason
    if model.add_bias_linear and model.layer_types[number] in (ATTENTION, MLP):
        return BIAS
    if model.hidden_dropout:
        return "the mixer's output has dropout"
    if model.residual_multiplier is not None:
        return "the mixer's output is multiplied before the addition"
    if model.norms_output(number):
        return "the mixer's output is normalised before the addition"
    return ""
