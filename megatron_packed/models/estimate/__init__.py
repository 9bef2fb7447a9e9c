"""Estimates of GPU memory and parameter counts of a configuration, without a GPU or weights."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.estimate.parameter_count import count_parameters as count_parameters
    from megatron_packed.models.estimate.rank_memory import Estimate as Estimate
    from megatron_packed.models.estimate.rank_memory import estimate as estimate
    from megatron_packed.models.estimate.step_memory import Work as Work
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "parameter_count": ["count_parameters"],
            "rank_memory": ["Estimate", "estimate"],
            "step_memory": ["Work"],
        },
    )
