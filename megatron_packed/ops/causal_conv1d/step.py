"""Convolution of one new token per document, in plain PyTorch, for generation.

Letters: B documents, T tokens of a pack, C channels, W width of the filter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu


def last_inputs(x_TC: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """Return the last W - 1 inputs of each document of a pack, which later outputs depend on.

    Args:
        x_TC: ``(T, C)`` inputs of the convolution; the documents are consecutive.
        lengths: number of tokens of each document.
        width: W.
    Returns:
        ``(B, W - 1, C)``; a document shorter than W - 1 begins with zeros.
    """
    last_BWC = x_TC.new_zeros(len(lengths), width - 1, x_TC.shape[1])
    end = 0
    for document_WC, length in zip(last_BWC, lengths, strict=True):
        end += length
        num_inputs = min(length, width - 1)
        document_WC[width - 1 - num_inputs :] = x_TC[end - num_inputs : end]
    return last_BWC


def convolve_next(
    last_BWC: Tensor, x_BC: Tensor, weight_CW: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convolve the next token of each document, with SiLU as in Mamba.

    Args:
        last_BWC: ``(B, W - 1, C)`` from `last_inputs` or from the previous call.
        x_BC: ``(B, C)`` inputs of the next tokens.
        weight_CW: ``(C, W)``.
        bias_C: ``(C,)`` or None.
    Returns:
        ``(B, C)`` outputs in the dtype of x; ``(B, W - 1, C)`` inputs for the next call.
    """
    inputs_BWC = torch.cat([last_BWC, x_BC[:, None]], dim=1)
    dtype = torch.promote_types(x_BC.dtype, torch.float32)
    y_BC = (inputs_BWC.to(dtype) * weight_CW.t().to(dtype)).sum(dim=1)
    if bias_C is not None:
        y_BC = y_BC + bias_C.to(dtype)
    return silu(y_BC).to(x_BC.dtype), inputs_BWC[:, 1:]
