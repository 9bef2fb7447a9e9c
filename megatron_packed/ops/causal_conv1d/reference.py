"""Convolution as W shifted, masked products in plain PyTorch, on any device.

The arithmetic is fp32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu


def run(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    seq_idx_1T: Tensor,
    *,
    activation: str | None,
) -> Tensor:
    """Run the op; see ``api.causal_conv1d``.

    Tokens of other documents are replaced by zeros before the multiplication.
    """
    dtype = torch.promote_types(x_TC.dtype, torch.float32)
    x, weight_CW = x_TC.to(dtype), weight_CW.to(dtype)
    tokens, width = x.shape[0], weight_CW.shape[1]
    y_TC = x * weight_CW[:, width - 1]
    for back in range(1, min(width, tokens)):
        earlier_TC = pad(x[: tokens - back], (0, 0, back, 0))
        y_TC = (
            y_TC
            + earlier_TC.masked_fill(~reaches(seq_idx_1T, back), 0) * weight_CW[:, width - 1 - back]
        )
    if bias_C is not None:
        y_TC = y_TC + bias_C.to(dtype)
    return (silu(y_TC) if activation == "silu" else y_TC).to(x_TC.dtype)


def reaches(seq_idx_1T: Tensor, back: int) -> Tensor:
    """Return ``(T, 1)`` bool, True if token t - back exists and is in the document of token t."""
    same = seq_idx_1T[0, back:] == seq_idx_1T[0, :-back]
    return pad(same, (back, 0), value=False)[:, None]
