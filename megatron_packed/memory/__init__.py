"""Activations that do not stay on the device: recomputed in backward, or offloaded to the host."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.memory.offload import Offload as Offload
    from megatron_packed.memory.recompute import RecomputeError as RecomputeError
    from megatron_packed.memory.recompute import SavedByAutograd as SavedByAutograd
    from megatron_packed.memory.recompute import checkpoint as checkpoint
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "offload": ["Offload"],
            "recompute": ["RecomputeError", "SavedByAutograd", "checkpoint"],
        },
    )
