"""Bring tokens into the order of their experts and back: static shapes, offsets on the device, no
host sync.

Every token has K routes (its chosen experts). The number of rows is fixed, T * K unless another is
asked for. They are sorted by expert, in token order within an expert. Routes that lead to no expert
here (those of the tail of a pack, of dropped tokens, to experts of other ranks) have no row; rows
without a route lie after the last expert's.

Letters: T tokens, K routes per token, R rows, E experts, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op

OP = Op(
    "permute",
    (
        Backend("triton", "megatron_packed.ops.permute.triton_kernels"),
        Backend("reference", "megatron_packed.ops.permute.reference"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class PermuteInputs:
    """Shapes, types and options by which a backend is chosen."""

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
    """int32, on the device: routes to each expert, whether there is a row for them or not."""
    offsets_E: Tensor
    """int32, on the device: row number after the last row of each expert; at most R."""
    token_R: Tensor
    """int32: the token that each row came from; -1 for a row that no route needs."""
    route_R: Tensor
    """int32: the route (token * K + k) that each row serves; -1 for a row that no route needs."""
    row_TK: Tensor
    """int32: the row of each route; -1 for a route without one."""


def permute(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    num_experts: int,
    valid_T: Tensor | None = None,
    *,
    rows: int | None = None,
    rows_per_expert: int | None = None,
    backend: str = "auto",
) -> Permuted:
    """Copy each token to the rows of its experts.

    Args:
        x_TD: ``(T, D)``.
        topk_ids_TK: ``(T, K)`` integers; routes to numbers outside of [0, num_experts) lead
        nowhere.
        num_experts: E.
        valid_T: ``(T,)`` bool; the routes of tokens that are not valid lead nowhere either.
        rows: R, by default ``T * K``. With fewer, the last routes in the order of rows may find
        none.
        rows_per_expert: every expert has exactly so many rows, zeros after those that it needs; R
        is E times that.
    Raises:
        ValueError: shapes that do not fit together.
        NoBackendError: the backend asked for cannot serve these inputs.
    Example:
        Experts [[1, 0], [1, 2]] of two tokens, E = 3: rows come from tokens [0, 0, 1, 1] and
        offsets are [1, 3, 4]. With 3 rows they come from [0, 0, 1] and offsets are [1, 3, 3]: the
        last route has no row.
    """
    _check_permute(x_TD, topk_ids_TK, valid_T)
    tokens, routes = topk_ids_TK.shape
    sorted_S, route_S, ends_E = _sort_routes(topk_ids_TK, valid_T, num_experts)
    if rows_per_expert is None:
        rows = tokens * routes if rows is None else rows
        row_S, offsets_E = _rows_in_order(ends_E, tokens * routes, rows)
    else:
        rows = num_experts * rows_per_expert
        row_S, offsets_E = _rows_with_padding(sorted_S, ends_E, rows_per_expert)
    # Routes have rows of their own, so both scatters are exact; those without one meet in a place
    # that is cut off.
    row_TK = torch.empty_like(row_S).scatter_(0, route_S, row_S).view(tokens, routes)
    place_S = row_S.masked_fill(row_S < 0, rows).long()
    route_R = row_S.new_full((rows + 1,), -1).scatter_(0, place_S, route_S.to(torch.int32))[:rows]
    token_R = torch.div(route_R, routes, rounding_mode="floor")  # -1 stays -1
    module = OP.chosen[backend, _inputs(x_TD, routes)].loaded
    return Permuted(
        x_RD=module.rows_of_tokens(x_TD, token_R, row_TK),
        tokens_per_expert_E=torch.diff(ends_E, prepend=torch.zeros_like(ends_E[:1])),
        offsets_E=offsets_E,
        token_R=token_R,
        route_R=route_R,
        row_TK=row_TK,
    )


def _check_permute(x_TD: Tensor, topk_ids_TK: Tensor, valid_T: Tensor | None) -> None:
    if x_TD.dim() != 2 or topk_ids_TK.dim() != 2 or topk_ids_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"permute: x has shape {list(x_TD.shape)} and topk_ids {list(topk_ids_TK.shape)}; "
            "they must be (T, D) and (T, K)."
        )
    if valid_T is not None and valid_T.shape != x_TD.shape[:1]:
        raise ValueError(
            f"permute: valid has shape {list(valid_T.shape)}; it must be (T,) with T = {x_TD.shape[0]}."
        )


def _sort_routes(
    topk_ids_TK: Tensor, valid_T: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the S = T * K routes by expert; those that lead nowhere come last, as expert E.

    Returns:
        ``(S,)`` int32 experts in rising order; ``(S,)`` int64 their routes; ``(E,)`` int32 the
        number of routes to each expert and those before it.
    """
    somewhere_TK = (topk_ids_TK >= 0) & (topk_ids_TK < num_experts)
    if valid_T is not None:
        somewhere_TK = somewhere_TK & valid_T[:, None]
    experts_S = topk_ids_TK.to(torch.int32).masked_fill(~somewhere_TK, num_experts).flatten()
    sorted_S, route_S = torch.sort(experts_S, stable=True)
    experts_E = torch.arange(num_experts, dtype=torch.int32, device=topk_ids_TK.device)
    ends_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True)
    return sorted_S, route_S, ends_E


def _rows_in_order(ends_E: Tensor, routes: int, rows: int) -> tuple[Tensor, Tensor]:
    """Give sorted routes one row after the other, until the rows run out.

    Returns:
        ``(S,)`` int32 the row of each sorted route, -1 without one; ``(E,)`` int32 offsets.
    """
    row_S = torch.arange(routes, dtype=torch.int32, device=ends_E.device)
    offsets_E = ends_E.clamp(max=rows)
    return row_S.masked_fill(row_S >= offsets_E[-1], -1), offsets_E


def _rows_with_padding(
    sorted_S: Tensor, ends_E: Tensor, rows_per_expert: int
) -> tuple[Tensor, Tensor]:
    """Give sorted routes rows where every expert has equally many; those beyond have none.

    Returns:
        as `_rows_in_order`.
    """
    num_experts = ends_E.shape[0]
    number_S = torch.arange(sorted_S.shape[0], dtype=torch.int32, device=ends_E.device)
    starts_X = F.pad(ends_E, (1, 0))  # of each expert, and of the routes that lead nowhere
    place_S = number_S - starts_X[sorted_S]
    row_S = sorted_S * rows_per_expert + place_S
    row_S = row_S.masked_fill((place_S >= rows_per_expert) | (sorted_S == num_experts), -1)
    number_E = torch.arange(1, num_experts + 1, dtype=torch.int32, device=ends_E.device)
    return row_S, number_E * rows_per_expert


def unpermute(
    y_RD: Tensor,
    permuted: Permuted,
    topk_weights_TK: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Add up each token's rows, weighted: ``y_T = sum_k weight[t, k] * y_R[row of (t, k)]``, k in
    order.

    Args:
        y_RD: ``(R, D)`` the experts' results, in the order of ``permuted``.
        permuted: what ``permute`` returned.
        topk_weights_TK: ``(T, K)`` fp32 or y's dtype; None for routes of weight 1, of which there
        is one per token.
    Returns:
        ``(T, D)`` in y's dtype, summed in fp32 (float64 for float64 inputs); routes without a row
        add nothing.
    Raises:
        ValueError: shapes that do not fit together.
        NoBackendError: the backend asked for cannot serve these inputs.
    """
    tokens, routes = permuted.row_TK.shape
    rows = permuted.token_R.shape[0]
    weights = (tokens, 1) if topk_weights_TK is None else tuple(topk_weights_TK.shape)
    if y_RD.dim() != 2 or y_RD.shape[0] != rows or weights != (tokens, routes):
        raise ValueError(
            f"unpermute: y has shape {list(y_RD.shape)} and weights {list(weights)}; with {rows} rows, T = {tokens} "
            f"and K = {routes} they must be ({rows}, D) and ({tokens}, {routes})."
        )
    module = OP.chosen[backend, _inputs(y_RD, routes)].loaded
    if topk_weights_TK is None:  # rows and tokens change places
        y_TD: Tensor = module.rows_of_tokens(
            y_RD, permuted.row_TK.flatten(), permuted.token_R[:, None]
        )
    else:
        y_TD = module.tokens_of_rows(
            y_RD, topk_weights_TK, permuted.token_R, permuted.route_R, permuted.row_TK
        )
    return y_TD


def _inputs(rows: Tensor, routes: int) -> PermuteInputs:
    return PermuteInputs(
        channels=rows.shape[1], routes=routes, dtype=rows.dtype, device_type=rows.device.type
    )
