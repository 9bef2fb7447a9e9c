"""Detection of out-of-memory errors, and advice for users.

`profiling.MemoryHistory` writes the memory snapshot of an allocation that failed.
"""

from __future__ import annotations

import torch

from megatron_packed.config import flag_names as flags

CURE = f"; lower {flags.SEQ_LENGTH} or {flags.MICRO_BATCH_SIZE}, or train a smaller model"
_WORDS = ("out of memory", "can't allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the error means that GPU or host memory ran out."""
    # Torch raises its own class only for its allocator. A library's failed cudaMalloc and a failed
    # host malloc raise a RuntimeError that only its text identifies.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _WORDS)
