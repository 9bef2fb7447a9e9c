"""Permutation of tokens into the order of their experts and back, without a host sync.

Each token has K routes (its chosen experts). The number of rows is fixed, by default T * K, so all
shapes are static; the offsets of the experts are on the device. Rows are sorted by expert, and within
an expert by token. Some routes have no row: those of the tail of a pack, of dropped tokens, and to
experts of other ranks. Rows without a route come after the rows of the last expert.

Letters: T tokens, K routes per token, R rows, E experts, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

OP = Op(
    "permute",
    (
        GPUBackend("triton", "megatron_packed.ops.permute.triton_kernels"),
        Backend("reference", "megatron_packed.ops.permute.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.permute.on_meta"),
)


@dataclass(frozen=True, kw_only=True)
class PermuteInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    channels: int
    routes: int
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True, kw_only=True)
class Permuted:
    """Rows sorted by expert, and the index tensors that `unpermute` needs."""

    x_RD: Tensor
    """Rows sorted by expert; rows beyond ``offsets_E[-1]`` are zero."""
    tokens_per_expert_E: Tensor
    """int32, on the device: number of routes to each expert, with or without a row."""
    offsets_E: Tensor
    """int32, on the device: row number after the last row of each expert; at most R."""
    token_R: Tensor
    """int32: token of each row; -1 for a row without a route."""
    route_R: Tensor
    """int32: route (token * K + k) of each row; -1 for a row without a route."""
    row_TK: Tensor
    """int32: row of each route; -1 for a route without a row."""


def permute(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    num_experts: int,
    valid_T: Tensor | None = None,
    *,
    rows: int | None = None,
    rows_per_expert: int | None = None,
    rows_per_part: tuple[int, int] | None = None,
    backend: str = "auto",
) -> Permuted:
    """Copy each token to the rows of its experts.

    Args:
        x_TD: ``(T, D)``.
        topk_ids_TK: ``(T, K)`` integer expert numbers; a route with a number outside of [0,
            num_experts) gets no row.
        num_experts: E.
        valid_T: ``(T,)`` bool; routes of tokens that are not valid get no row.
        rows: R, by default ``T * K``. With fewer rows, the last routes in sorted order may get no
            row.
        rows_per_expert: number of rows of each expert, so that R is E times this number. An expert
            with fewer routes has zeros in its last rows; routes beyond the number get no row.
        rows_per_part: (number of parts, rows of each part): the same for parts that each hold an
            equal number of consecutive experts.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
    Example:
        Experts [[1, 0], [1, 2]] of two tokens, E = 3: rows come from tokens [0, 0, 1, 1] and
        offsets are [1, 3, 4]. With 3 rows they come from [0, 0, 1] and offsets are [1, 3, 3]: the
        last route has no row.
    """
    _check_permute(x_TD, topk_ids_TK, valid_T)
    tokens, routes = topk_ids_TK.shape
    sorted_S, route_S, ends_E = _sort_routes(topk_ids_TK, valid_T, num_experts)
    if rows_per_part is not None:
        rows = rows_per_part[0] * rows_per_part[1]
        row_S, offsets_E = _rows_in_parts(sorted_S, ends_E, *rows_per_part)
    elif rows_per_expert is None:
        rows = tokens * routes if rows is None else rows
        row_S, offsets_E = _rows_in_order(ends_E, tokens * routes, rows)
    else:
        rows = num_experts * rows_per_expert
        row_S, offsets_E = _rows_with_padding(sorted_S, ends_E, rows_per_expert)
    # Each route has a separate row, so the scatters do not collide. Routes without a row all write
    # to one extra element, which is cut off.
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
    """Sort the S = T * K routes by expert; routes without an expert come last, with number E.

    Returns:
        ``(S,)`` int32 sorted expert numbers; ``(S,)`` int64 routes in this order; ``(E,)`` int32
        cumulative number of routes up to and including each expert.
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
    """Assign consecutive rows to the sorted routes, until all rows are used.

    Returns:
        ``(S,)`` int32 row of each sorted route, -1 without a row; ``(E,)`` int32 offsets.
    """
    row_S = torch.arange(routes, dtype=torch.int32, device=ends_E.device)
    offsets_E = ends_E.clamp(max=rows)
    return row_S.masked_fill(row_S >= offsets_E[-1], -1), offsets_E


def _rows_with_padding(
    sorted_S: Tensor, ends_E: Tensor, rows_per_expert: int
) -> tuple[Tensor, Tensor]:
    """Assign rows to the sorted routes, with the same number of rows for each expert.

    Routes beyond an expert's number of rows get none.

    Returns:
        the same tensors as `_rows_in_order`.
    """
    num_experts = ends_E.shape[0]
    number_S = torch.arange(sorted_S.shape[0], dtype=torch.int32, device=ends_E.device)
    # Index of the first sorted route of each expert; the last entry is for routes without an expert.
    starts_X = F.pad(ends_E, (1, 0))
    place_S = number_S - starts_X[sorted_S]
    row_S = sorted_S * rows_per_expert + place_S
    row_S = row_S.masked_fill((place_S >= rows_per_expert) | (sorted_S == num_experts), -1)
    number_E = torch.arange(1, num_experts + 1, dtype=torch.int32, device=ends_E.device)
    return row_S, number_E * rows_per_expert


def _rows_in_parts(
    sorted_S: Tensor, ends_E: Tensor, parts: int, rows_per_part: int
) -> tuple[Tensor, Tensor]:
    """Assign rows to the sorted routes, with the same number of rows for each part of the experts.

    Returns:
        the same tensors as `_rows_in_order`.
    """
    experts = ends_E.shape[0] // parts
    row_S, _ = _rows_with_padding(
        torch.div(sorted_S, experts, rounding_mode="floor"),
        ends_E[experts - 1 :: experts],
        rows_per_part,
    )
    ends_PE = ends_E.view(parts, experts)
    starts_P1 = F.pad(ends_PE[:-1, -1], (1, 0))[:, None]
    first_P1 = torch.arange(parts, dtype=torch.int32, device=ends_E.device)[:, None] * rows_per_part
    return row_S, ((ends_PE - starts_P1).clamp(max=rows_per_part) + first_P1).flatten()


def unpermute(
    y_RD: Tensor,
    permuted: Permuted,
    topk_weights_TK: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Sum each token's rows with weights: ``y[t] = sum_k weight[t, k] * y_R[row of (t, k)]``.

    Args:
        y_RD: ``(R, D)`` results of the experts, in the order of ``permuted``.
        permuted: result of ``permute``.
        topk_weights_TK: ``(T, K)`` in fp32 or y's dtype; None for weight 1 and one route per token.
    Returns:
        ``(T, D)`` in y's dtype, summed over k in order, in fp32 (float64 for float64 inputs).
        Routes without a row add nothing.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
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
    if topk_weights_TK is None:  # This is a gather like `permute`, with rows and tokens swapped.
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
