"""Bring tokens into the order of their experts and back: static shapes, offsets on the device, no host sync.

Every token has K routes (its chosen experts). There are always R = T * K rows: sorted by expert, in token order within
an expert, and the routes of invalid tokens (the tail of a pack) behind the last expert.

Letters: T tokens, K routes per token, R = T * K rows, E experts, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.dispatch import Backend, Op

OP = Op(
    "permute",
    (
        Backend("triton", "megatron_packed.ops.permute.triton_kernels"),
        Backend("reference", "megatron_packed.ops.permute.reference"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the choice of a backend depends on."""

    channels: int
    routes: int
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True, kw_only=True)
class Permuted:
    """Rows in expert order, and the way back."""

    x_RD: Tensor
    """Rows sorted by expert; rows beyond ``offsets_E[-1]`` are zero."""
    tokens_per_expert_E: Tensor
    """int32, on the device."""
    offsets_E: Tensor
    """int32, on the device: row number after the last row of each expert."""
    token_R: Tensor
    """int32: the token that each row came from."""
    route_R: Tensor
    """int32: the route (token * K + k) that each row serves."""
    row_TK: Tensor
    """int32: the row of each route."""
    valid_T: Tensor
    """bool: False for tokens that no expert sees."""


def permute(x_TD: Tensor, topk_ids_TK: Tensor, num_experts: int, valid_T: Tensor, *, backend: str = "auto") -> Permuted:
    """Copy each token to the rows of its experts.

    Args:
        x_TD: ``(T, D)``.
        topk_ids_TK: ``(T, K)`` integers in [0, num_experts).
        num_experts: E.
        valid_T: ``(T,)`` bool; the routes of tokens that are not valid go behind the last expert as zero rows.
    Raises:
        ValueError: shapes that do not fit together.
        NoBackendError: the backend asked for cannot serve these inputs.
    Example:
        Experts [[1, 0], [1, 2]] of two tokens, E = 3, both valid: rows come from tokens [0, 0, 1, 1] and offsets are
        [1, 3, 4].
    """
    if x_TD.dim() != 2 or topk_ids_TK.dim() != 2 or topk_ids_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"permute: x has shape {list(x_TD.shape)} and topk_ids {list(topk_ids_TK.shape)}; "
            "they must be (T, D) and (T, K)."
        )
    if valid_T.shape != x_TD.shape[:1]:
        raise ValueError(f"permute: valid has shape {list(valid_T.shape)}; it must be (T,) with T = {x_TD.shape[0]}.")
    tokens, routes = topk_ids_TK.shape
    keys_R = topk_ids_TK.to(torch.int32).masked_fill(~valid_T[:, None], num_experts).flatten()
    sorted_R, route_R = torch.sort(keys_R, stable=True)
    # The inverse of the sort: row_TK.flatten()[route_R[r]] = r. The indices are unique, so the scatter is exact.
    rows_R = torch.arange(tokens * routes, dtype=torch.int32, device=x_TD.device)
    row_TK = torch.empty_like(rows_R).scatter_(0, route_R, rows_R).view(tokens, routes)
    experts_E = torch.arange(num_experts, dtype=torch.int32, device=x_TD.device)
    offsets_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
    route_R = route_R.to(torch.int32)
    token_R = torch.div(route_R, routes, rounding_mode="floor")
    module = OP.select(_inputs(x_TD, routes), backend).load()
    return Permuted(
        x_RD=module.rows_of_tokens(x_TD, token_R, row_TK, valid_T),
        tokens_per_expert_E=torch.diff(offsets_E, prepend=torch.zeros_like(offsets_E[:1])),
        offsets_E=offsets_E,
        token_R=token_R,
        route_R=route_R,
        row_TK=row_TK,
        valid_T=valid_T,
    )


def unpermute(y_RD: Tensor, permuted: Permuted, topk_weights_TK: Tensor, *, backend: str = "auto") -> Tensor:
    """Add up each token's rows, weighted: ``y_T = sum_k weight[t, k] * y_R[row of (t, k)]``, k in order.

    Args:
        y_RD: ``(R, D)`` the experts' results, in the order of ``permuted``.
        permuted: what ``permute`` returned.
        topk_weights_TK: ``(T, K)`` fp32 or y's dtype.
    Returns:
        ``(T, D)`` in y's dtype, summed in fp32 (float64 for float64 inputs); zero for tokens that are not valid.
    Raises:
        ValueError: shapes that do not fit together.
        NoBackendError: the backend asked for cannot serve these inputs.
    """
    tokens, routes = permuted.row_TK.shape
    if y_RD.dim() != 2 or y_RD.shape[0] != tokens * routes or topk_weights_TK.shape != (tokens, routes):
        raise ValueError(
            f"unpermute: y has shape {list(y_RD.shape)} and weights {list(topk_weights_TK.shape)}; with T = {tokens} "
            f"and K = {routes} they must be ({tokens * routes}, D) and ({tokens}, {routes})."
        )
    module = OP.select(_inputs(y_RD, routes), backend).load()
    y_TD: Tensor = module.tokens_of_rows(
        y_RD, topk_weights_TK, permuted.token_R, permuted.route_R, permuted.row_TK, permuted.valid_T
    )
    return y_TD


def _inputs(rows: Tensor, routes: int) -> Inputs:
    return Inputs(channels=rows.shape[1], routes=routes, dtype=rows.dtype, device_type=rows.device.type)
