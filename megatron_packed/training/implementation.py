"""Whether this machine has what ``--transformer-impl`` and ``--cuda-graph-impl`` ask of TransformerEngine, before ranks
wait for each other."""

from __future__ import annotations

import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.layers.implementation import ENGINE_NAME, LOCAL_NAME, implementation
from megatron_packed.ops.varlen_attention import api as varlen_attention
from megatron_packed.ops.zigzag_attention import api as zigzag_attention
from megatron_packed.training.build import dtype_of
from megatron_packed.training.explain import op_inputs

ATTENTION_OPS = (varlen_attention.OP, zigzag_attention.OP)


def check_implementation(config: RunConfig, device: torch.device) -> None:
    """Linear layers, norms and, where it comes along, TransformerEngine's attention, by what a pack asks of it; and its
    capture of layers.

    Raises:
        ValueError: one of them cannot serve; says why, and what can.
    """
    implementation(config.training.transformer_impl, device, dtype_of(config))
    if config.cuda_graph.by_engine and device.type == "cuda":
        maker()
    if not config.training.engine_attends:
        return
    for op, inputs in op_inputs(config, device):
        reasons = op.explain(inputs)[ENGINE_NAME] if op in ATTENTION_OPS else []
        if reasons:
            raise ValueError(
                f"--transformer-impl {ENGINE_NAME}: its attention cannot serve: {'; '.join(reasons)}; name another "
                f"--attention-backend beside it, or give {LOCAL_NAME}."
            )
