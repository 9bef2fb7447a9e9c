"""Document number (``seq_idx``) and position of every slot of a pack, computed from ``cu_seqlens``.

`cu_seqlens.py` has an example of both. Kernels with a recurrent state reset the state where
``seq_idx`` changes. Rotary embeddings read the positions.
"""

from __future__ import annotations

import numpy as np

from megatron_packed.packed.cu_seqlens import Int32Array


def seq_idx_from_cu_seqlens(cu_seqlens: Int32Array) -> Int32Array:
    """Return the document number of every slot, ``(T,)`` int32.

    The document number of the tail is the number of real documents.
    """
    return np.repeat(np.arange(cu_seqlens.size - 1, dtype=np.int32), np.diff(cu_seqlens))


def position_ids_from_cu_seqlens(cu_seqlens: Int32Array) -> Int32Array:
    """Return the position of every slot in its document or in the tail, ``(T,)`` int32, from 0."""
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return np.arange(starts.size, dtype=np.int32) - starts
