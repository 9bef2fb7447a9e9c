"""Copies of rows by given indices, and their adjoint: sums without weights, which save no rows.

Both use the gathers of a backend of `api.permute`, so sums have a fixed order, also in the backward pass.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.memory_purpose import Purpose, counted_as
from megatron_packed.ops.on_meta import of_shape
from megatron_packed.ops.permute.api import OP, Permuted, PermuteInputs


def copy_rows(x_TD: Tensor, token_R: Tensor, row_T: Tensor, *, backend: str = "auto") -> Tensor:
    """Return ``x[token_R]``, zeros where the token is -1.

    Args:
        x_TD: ``(T, D)``.
        token_R: ``(R,)`` integers: token of each row, or -1. A token has at most one row.
        row_T: ``(T,)`` integers: row of each token, or -1.
    Raises:
        NoBackendError: the requested backend does not support these inputs.
    """
    kernels = OP.chosen[backend, _inputs(x_TD, 1)].loaded
    return cast(Tensor, kernels.rows_of_tokens(x_TD, token_R, row_T[:, None]))


def sum_rows(y_RD: Tensor, permuted: Permuted, *, backend: str = "auto") -> Tensor:
    """Return ``y[t] = sum_k y_R[row of (t, k)]``, as `api.unpermute` does with weights of 1.

    Args:
        y_RD: ``(R, D)`` rows in the order of ``permuted``.
        permuted: result of `api.permute`.
    Returns:
        ``(T, D)`` in y's dtype, summed over k in order, in fp32 (float64 for float64 inputs).
    Raises:
        NoBackendError: the requested backend does not support these inputs.
    """
    tokens, routes = permuted.row_TK.shape
    if y_RD.is_meta:
        with counted_as(Purpose.EXPERTS):
            return of_shape((tokens, y_RD.shape[1]), y_RD, saved=(permuted.token_R,))
    kernels = OP.chosen[backend, _inputs(y_RD, routes)].loaded
    return cast(
        Tensor,
        _SummedRows.apply(y_RD, permuted.token_R, permuted.row_TK, kernels),  # type: ignore[no-untyped-call]
    )


def _inputs(rows: Tensor, routes: int) -> PermuteInputs:
    return PermuteInputs(
        channels=rows.shape[1], routes=routes, dtype=rows.dtype, device_type=rows.device.type
    )


class _SummedRows(torch.autograd.Function):
    """Sum of each token's rows: the adjoint of the backend's gather of rows, in both directions."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor, kernels: Any) -> Tensor:
        ctx.save_for_backward(token_R, row_TK)
        ctx.kernels = kernels
        summed: Tensor = kernels._sum_rows(y_RD, None, row_TK)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None]:
        token_R, row_TK = ctx.saved_tensors
        dy_RD: Tensor = ctx.kernels.rows_of_tokens(dy_TD, token_R, row_TK)
        return dy_RD, None, None, None
