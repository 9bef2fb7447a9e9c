"""Hybrid Mamba-Transformer-MoE training on packed sequences.

Importing this package imports neither torch nor any optional kernel library; names are resolved
when first used.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig as RunConfig
    from megatron_packed.models.hybrid_model import HybridModel as HybridModel
    from megatron_packed.packed.micro_batch import MicroBatch as MicroBatch
    from megatron_packed.packed.params import PackedSeqParams as PackedSeqParams
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config.run": ["RunConfig"],
            "models.hybrid_model": ["HybridModel"],
            "packed.micro_batch": ["MicroBatch"],
            "packed.params": ["PackedSeqParams"],
        },
    )
    __all__.append("__version__")
