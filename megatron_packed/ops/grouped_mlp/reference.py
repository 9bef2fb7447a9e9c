"""MLPs of the experts in plain PyTorch: each expert runs on all rows, and a mask selects the results.

This is E times the work. Each product takes a block of rows of a fixed size, so a row's result depends
only on the row. On some CPUs its last bits also depend on its place in the block. Autograd adds up a
weight's gradient block by block, and the unused rows at the end add zeros. So it does not depend on
their number.
"""

from __future__ import annotations

import torch
from torch import Tensor, split
from torch.nn.functional import linear, pad

from megatron_packed.ops.activation.api import Kind, activation

_BLOCK = 256
"""Rows of the block that one product takes."""


def fc1(x_RD: Tensor, w1_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the first product, ``(R, D)`` -> ``(R, F)``, with zeros from the last offset on."""
    return _grouped_linear(x_RD, w1_EFD, offsets_E)


def activate(x_RF: Tensor, kind: Kind) -> Tensor:
    """Apply the activation function; see ``ops.activation``."""
    return activation(x_RF, kind, backend="reference")


def fc2(x_RF: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the second product, ``(R, F)`` -> ``(R, D)``, with zeros from the last offset on."""
    return _grouped_linear(x_RF, w2_EDF, offsets_E)


def _grouped_linear(x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    rows = x_RI.shape[0]
    # Only the last block is a copy. So recomputation, which frees x_RI early, frees the other blocks.
    *full_blocks, last = split(x_RI, _BLOCK)
    missing = -rows % _BLOCK
    blocks = [*full_blocks, pad(last, (0, 0, 0, missing)) if missing else last]
    row_R1 = torch.arange(rows, device=x_RI.device)[:, None]
    start = torch.zeros_like(offsets_E[0])
    y_RO = x_RI.new_zeros(rows, weight_EOI.shape[1])
    for weight_OI, end in zip(weight_EOI.unbind(), offsets_E.unbind(), strict=True):
        mine_R1 = (row_R1 >= start) & (row_R1 < end)
        start = end
        product_RO = torch.cat([linear(block_BI, weight_OI) for block_BI in blocks])
        y_RO = torch.where(mine_R1, product_RO[:rows], y_RO)
    return y_RO
