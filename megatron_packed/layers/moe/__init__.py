"""Mixture of experts: router, dispatch of tokens to experts, experts, combination of results."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.layers.moe.experts import GroupedExperts as GroupedExperts
    from megatron_packed.layers.moe.layer import MoE as MoE
    from megatron_packed.layers.moe.layer import MoEOutput as MoEOutput
    from megatron_packed.layers.moe.parallel import ExpertParallel as ExpertParallel
    from megatron_packed.layers.moe.router import Router as Router
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "experts": ["GroupedExperts"],
            "layer": ["MoE", "MoEOutput"],
            "parallel": ["ExpertParallel"],
            "router": ["Router"],
        },
    )
