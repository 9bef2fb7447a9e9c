"""Rules of a shared expert that runs on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_packed.config.errors import Problem
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.memory import (
    FINE_GRAINED,
    LAYER_INPUTS,
    LAYER_NORM,
    MODULES,
    MemoryConfig,
)
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.parallel import ParallelConfig

OVERLAP = "--moe-shared-expert-overlap"


def shared_expert_rules(
    memory: MemoryConfig, model: ModelConfig, parallel: ParallelConfig, sound: Sound
) -> Iterator[Problem]:
    """Yield a problem if one stream would restore a saved tensor that another stream reads.

    See `Sound` for ``sound``.
    """
    known = sound(
        "memory.offload_layer_inputs",
        "memory.fine_grained_activation_offloading",
        "memory.recompute_granularity",
        "memory.recompute_modules",
        "model.moe_shared_expert_intermediate_size",
        "parallel.tensor_model_parallel_size",
        "parallel.expert_tensor_parallel_size",
    )
    has_shared = known and model.moe_shared_expert_intermediate_size is not None
    if not has_shared or not model.moe_shared_expert_overlap or parallel.splits_tokens_of_experts:
        return
    if memory.offloads:
        flag = LAYER_INPUTS if memory.offload_layer_inputs else FINE_GRAINED
        yield Problem(
            OVERLAP,
            "",
            f"cannot be used with {flag}, which copies on streams of its own",
            "leave one of them out",
        )
    if LAYER_NORM in memory.modules:
        yield Problem(
            OVERLAP,
            "",
            f"cannot be used with {MODULES} {LAYER_NORM}: two streams would read what one recomputes",
            f"leave one of them out, or recompute moe instead of {LAYER_NORM}",
        )
