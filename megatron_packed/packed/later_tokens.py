"""Tokens, labels and masks for multi-token prediction, shifted inside their documents.

At depth k (1, 2, ...) slot i uses the values of slot i + k, if this slot has a token of the same
document. A document of L tokens has L - k such slots. Other slots get the value 0. They are not
targets, and routers ignore them. Shapes depend only on T, and nothing is read by the host.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_packed.packed.params import DepthTables, PackedSeqParams


def reaches(packed: PackedSeqParams, depth: int) -> Tensor:
    """Return ``(T,)`` bool: True if slot i + depth has a token of the document of slot i.

    Example:
        Documents of 3 and 1 tokens in 5 slots, depth 1: ``[True, True, False, False, False]``.
    """
    document_T, valid_T = packed.seq_idx[0], packed.valid
    slots = document_T.shape[0]
    count = max(slots - depth, 0)
    same = (document_T[:count] == document_T[slots - count :]) & valid_T[slots - count :]
    return F.pad(same, (0, slots - count))


def prepared(packed: PackedSeqParams, depth: int) -> DepthTables | None:
    """Return the tables of a depth; None if the shared tables are not computed."""
    depths = packed.tables.depths
    return depths[depth - 1] if depths else None


def reached(packed: PackedSeqParams, depth: int) -> Tensor:
    """Return `reaches` from the shared tables, or computed without them."""
    tables = prepared(packed, depth)
    return reaches(packed, depth) if tables is None else tables.reaches_T


def later(x_T: Tensor, depth: int, reaches_T: Tensor) -> Tensor:
    """Return ``x[i + depth]`` for every slot i that reaches it, and 0 for other slots.

    Args:
        x_T: ``(T,)`` values of all slots of a pack.
        reaches_T: result of `reaches` for the pack and ``depth``.
    Example:
        Depth 1, documents ``a b c`` and ``d`` in 5 slots: ``[b, c, 0, 0, 0]``.
    """
    slots = x_T.shape[0]
    count = max(slots - depth, 0)
    shifted_T = F.pad(x_T[slots - count :], (0, slots - count))
    return shifted_T.masked_fill(~reaches_T, 0)
