"""Hybrid Mamba-Transformer-MoE training on packed sequences.

Importing this package imports neither torch nor any optional kernel library; names are resolved
when first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "PackedSeqParams": "megatron_packed.packed.params",
    "MicroBatch": "megatron_packed.packed.micro_batch",
    "HybridModel": "megatron_packed.models.hybrid_model",
    "RunConfig": "megatron_packed.config.run",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'megatron_packed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
