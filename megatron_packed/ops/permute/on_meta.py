"""Permutation of rows on the meta device: shapes, and the tensors that the kernels save."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.memory_purpose import Purpose, counted_as
from megatron_packed.ops.on_meta import of_shape


def rows_of_tokens(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Return a tensor ``(R, D)``; see `api.permute`."""
    shape = (token_R.shape[0], x_TD.shape[1])
    with counted_as(Purpose.EXPERTS):
        return of_shape(shape, x_TD, saved=(row_TK,))


def tokens_of_rows(
    y_RD: Tensor, weights_TK: Tensor, token_R: Tensor, route_R: Tensor, row_TK: Tensor
) -> Tensor:
    """Return a tensor ``(T, D)``; see `api.unpermute`."""
    shape = (row_TK.shape[0], y_RD.shape[1])
    with counted_as(Purpose.EXPERTS):
        return of_shape(shape, y_RD, weights_TK, saved=(y_RD, weights_TK, token_R, route_R))
