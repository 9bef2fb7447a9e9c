"""Recomputation of activations in the backward pass, and their offload to host memory."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.memory.activation_offload import Offload as Offload
    from megatron_packed.memory.apply import apply_memory as apply_memory
    from megatron_packed.memory.apply import offload_module as offload_module
    from megatron_packed.memory.recompute import RecomputeError as RecomputeError
    from megatron_packed.memory.recompute import checkpoint as checkpoint
    from megatron_packed.memory.saved_tensors import SavedByAutograd as SavedByAutograd
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "activation_offload": ["Offload"],
            "apply": ["apply_memory", "offload_module"],
            "recompute": ["RecomputeError", "checkpoint"],
            "saved_tensors": ["SavedByAutograd"],
        },
    )
