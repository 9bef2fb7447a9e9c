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

OVERLAP = "--moe-shared-expert-overlap"


def shared_expert_rules(
    memory: MemoryConfig, model: ModelConfig, sound: Sound
) -> Iterator[Problem]:
    """Yield a problem if one stream would restore a saved tensor that another stream reads.

    See `Sound` for ``sound``.
    """
    known = sound(
        "memory.offload_layer_inputs",
        "memory.fine_grained_activation_offloading",
        "memory.recompute_granularity",
        "memory.recompute_modules",
    )
    if not known or not model.moe_shared_expert_overlap:
        return
    if memory.offloads:
        flag = LAYER_INPUTS if memory.offload_layer_inputs else FINE_GRAINED
        yield Problem(
            OVERLAP,
            "True",
            f"cannot be used with {flag}, which copies on streams of its own",
            "leave one of them out",
        )
    if LAYER_NORM in memory.modules:
        yield Problem(
            OVERLAP,
            "True",
            f"cannot be used with {MODULES} {LAYER_NORM}: two streams would read what one recomputes",
            f"leave one of them out, or recompute moe instead of {LAYER_NORM}",
        )
