"""Gated delta rule of a pack in consecutive parts: the state that passes from part to part.

Each of c ranks has one part of the pack. The rule is affine in the state that enters a part: the state
S becomes A S + B. B is the state that the part reaches from zeros, and A is the matrix of all its decays
and updates. A part sends both, whatever its length. README.md derives the formulas D1 and D2.

A is zero unless all tokens of the part continue the document before it. Masks replace values of other
documents by exact zeros. So a document that is not cut keeps its bits.

A message has transposed states and matrices, one row after the other: for each head V rows of the state
and K rows of the matrix.

Letters: c parts, N value heads, K key head dimension, V value head dimension, X numbers of a message.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_packed.ops.parts_of_pack import PartOfPack


class StateSizes(NamedTuple):
    """Sizes of the states of one part."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def rows(self) -> int:
        """Return the number of rows of each head in a message."""
        return self.value_dim + self.key_dim


def begins_inside(seq_idx_1T: Tensor, part: PartOfPack) -> Tensor:
    """Return ``(1,)`` bool: True if the first token of the part continues the document before it."""
    if part.document_before_1 is None:
        return torch.zeros(1, dtype=torch.bool, device=seq_idx_1T.device)
    return seq_idx_1T[0, :1] == part.document_before_1


def state_from_parts(messages_kX: Tensor, sizes: StateSizes, *, reverse: bool = False) -> Tensor:
    """Return the state that enters a part, or with ``reverse`` the gradient of the state after it.

    Args:
        messages_kX: messages of the k earlier parts, or with ``reverse`` of the k later ones.
        sizes: sizes of the states.
    Returns:
        ``(N, V, K)``, transposed; zeros if there are no such parts.
    """
    heads, key_dim, value_dim = sizes
    rows_kNXK = messages_kX.view(-1, heads, sizes.rows, key_dim)
    states_kNVK, maps_kNKK = torch.split(rows_kNXK, [value_dim, key_dim], dim=2)
    state_NVK = messages_kX.new_zeros(heads, value_dim, key_dim)
    order = range(len(messages_kX))
    for i in reversed(order) if reverse else order:
        map_NKK = maps_kNKK[i].mT if reverse else maps_kNKK[i]
        # A part without a map replaces the state. Zeros times a value that is not finite are not zeros.
        passed_NVK = state_NVK.masked_fill(~maps_kNKK[i].any(), 0)
        state_NVK = torch.baddbmm(states_kNVK[i], passed_NVK, map_NKK)
    return state_NVK


def state_of_gathered(messages_cX: Tensor, sizes: StateSizes, part: PartOfPack) -> Tensor:
    """Return what `state_from_parts` returns, from the messages of all parts.

    Every part takes part in the backward pass of a gather. So the state of the first part depends on the
    messages, too: it is a row of zeros before them.
    """
    return state_from_parts(pad(messages_cX, (0, 0, 1, 0))[: part.number + 1], sizes)
