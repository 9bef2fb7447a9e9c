"""Gathers in both directions in plain PyTorch, without scatter-add, so that sums have a fixed order.

The gradient of a gather is a sum over the rows to which a token was copied. Autograd would use
``index_add``, which on a GPU is an atomic sum in changing order. This module gathers through the
inverse index instead and sums over k in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rows_of_tokens(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Return ``x[token_R]``, zero where the token is -1; see ``api.permute``."""
    rows_RD: Tensor = _ReferenceGather.apply(x_TD, token_R, row_TK)  # type: ignore[no-untyped-call]
    return rows_RD


def tokens_of_rows(
    y_RD: Tensor, weights_TK: Tensor, token_R: Tensor, route_R: Tensor, row_TK: Tensor
) -> Tensor:
    """Return the weighted sum of each token's rows; see ``api.unpermute``."""
    y_TD: Tensor = _ReferenceCombine.apply(y_RD, weights_TK, token_R, route_R, row_TK)  # type: ignore[no-untyped-call]
    return y_TD


class _ReferenceGather(torch.autograd.Function):
    """Copy tokens to rows; backward sums the gradients of each token's rows, k in order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return _at(x_TD, token_R)

    @staticmethod
    def backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return _sum_rows(dx_RD, None, row_TK), None, None


class _ReferenceCombine(torch.autograd.Function):
    """Weighted sum of each token's rows.

    Backward returns the gradient of the rows, which is the token's gradient times the weight. The
    gradient of a weight is the dot product of the row and the token's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_TK: Tensor, token_R: Tensor, route_R: Tensor, row_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, token_R, route_R, row_TK)
        return _sum_rows(y_RD, weights_TK, row_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y_RD, weights_TK, token_R, route_R, row_TK = ctx.saved_tensors
        dtype = torch.promote_types(y_RD.dtype, torch.float32)
        weight_R1 = _at(weights_TK.flatten()[:, None], route_R).to(dtype)
        dy_RD = _at(dy_TD, token_R).to(dtype)
        dot_R1 = (dy_RD * y_RD.to(dtype).masked_fill((token_R < 0)[:, None], 0)).sum(
            -1, keepdim=True
        )
        dweights_TK = _at(dot_R1, row_TK.flatten()).view(row_TK.shape).to(weights_TK.dtype)
        return (dy_RD * weight_R1).to(y_RD.dtype), dweights_TK, None, None, None


def _at(x_ND: Tensor, index: Tensor) -> Tensor:
    """Return ``x[index]``, with zeros for index -1."""
    if x_ND.shape[0] == 0:
        return x_ND.new_zeros(index.shape[0], *x_ND.shape[1:])
    return x_ND[index.clamp(min=0)].masked_fill((index < 0)[:, None], 0)


def _sum_rows(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    dtype = torch.promote_types(y_RD.dtype, torch.float32)
    total_TD = y_RD.new_zeros(row_TK.shape[0], y_RD.shape[1], dtype=dtype)
    for k in range(row_TK.shape[1]):
        term_TD = _at(y_RD, row_TK[:, k]).to(dtype)
        total_TD = total_TD + (
            term_TD if weights_TK is None else term_TD * weights_TK[:, k, None].to(dtype)
        )
    return total_TD.to(y_RD.dtype)
