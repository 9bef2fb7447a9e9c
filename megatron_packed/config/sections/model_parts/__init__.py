"""Options of `ModelConfig`, one module for each subject."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.sections.model_parts.attention import (
        AttentionOptions as AttentionOptions,
    )
    from megatron_packed.config.sections.model_parts.experts import ExpertOptions as ExpertOptions
    from megatron_packed.config.sections.model_parts.gated_delta_net import (
        GatedDeltaNetOptions as GatedDeltaNetOptions,
    )
    from megatron_packed.config.sections.model_parts.mamba import MambaOptions as MambaOptions
    from megatron_packed.config.sections.model_parts.multipliers import (
        MultiplierOptions as MultiplierOptions,
    )
    from megatron_packed.config.sections.model_parts.stack import StackOptions as StackOptions
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "attention": ["AttentionOptions"],
            "experts": ["ExpertOptions"],
            "gated_delta_net": ["GatedDeltaNetOptions"],
            "mamba": ["MambaOptions"],
            "multipliers": ["MultiplierOptions"],
            "stack": ["StackOptions"],
        },
    )
