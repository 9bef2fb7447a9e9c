"""Hybrid model, its initial values, its floating-point operations and its isolation self-test.

``estimate`` predicts memory and parameters of a configuration. ``convert`` imports and exports
weights of Hugging Face models.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.flops import FlopCounter as FlopCounter
    from megatron_packed.models.flops import model_flops as model_flops
    from megatron_packed.models.hybrid_model import HybridModel as HybridModel
    from megatron_packed.models.isolation import IsolationResult as IsolationResult
    from megatron_packed.models.isolation import check_isolation as check_isolation
    from megatron_packed.models.lm_head_and_loss import HybridOutput as HybridOutput
    from megatron_packed.models.run_model import build_model as build_model
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "flops": ["FlopCounter", "model_flops"],
            "hybrid_model": ["HybridModel"],
            "isolation": ["IsolationResult", "check_isolation"],
            "lm_head_and_loss": ["HybridOutput"],
            "run_model": ["build_model"],
        },
    )
