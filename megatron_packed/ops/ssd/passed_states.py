"""Mamba-2's scan of a pack in consecutive parts: the state that passes from part to part.

Each of c ranks has one part of the pack. A part sends N P S + N values, whatever its length. There are
two ways:

* The kernels of the backend start from the state that enters the part. They compute the state that the
  part reaches from zeros in any case, so the messages are the only additional cost. Backward sends the
  gradient of the state to the earlier parts in the same way.
* Any other backend runs `api.ssd` with a state of zero at the start. The recurrence is linear, so the
  state that really enters the part adds a term to the outputs. README.md derives the formulas P1 to P3.

All masks are applied before the exponential. So terms of other documents are exact zeros, and a
document that is not cut keeps its bits. Backward computes the intermediate values again.

Letters: T tokens of a part, N heads, P head dimension, G groups, S state, c parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, softplus

from megatron_packed.ops.parts_of_pack import PartOfPack
from megatron_packed.ops.running_sum import running_sum
from megatron_packed.ops.ssd.api import OP, checked_inputs, ssd


def ssd_of_part(
    x_TNP: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    B_TGS: Tensor,
    C_TGS: Tensor,
    D_N: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
    cu_seqlens: Tensor,
    *,
    part: PartOfPack,
    entering: Callable[[Tensor, Tensor], Tensor],
    chunk_size: int,
    backend: str = "auto",
) -> Tensor:
    """Run `api.ssd` on one part of a pack; all processes with a part call it at the same time.

    Args:
        x_TNP: ``(T, N, P)`` inputs of the part; for the other tensors see `api.ssd`.
        part: place of the part in the pack.
        entering: returns the state that enters the part, from the results of `leaving_state`. Backends
            that do not pass states themselves need it.
    Returns:
        ``(T, N, P)`` in x's dtype.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
    """
    inputs = checked_inputs(x_TNP, dt_TN, B_TGS, C_TGS, seq_idx_1T, chunk_size)
    arguments = (x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N, seq_idx_1T, cu_seqlens)
    chosen = OP.chosen[backend, inputs].loaded
    if getattr(chosen, "PASSES_STATES", False):
        return cast(Tensor, chosen.run(*arguments, chunk_size=chunk_size, part=part))
    y_TNP = ssd(*arguments, chunk_size=chunk_size, backend=backend)
    left = leaving_state(x_TNP, dt_TN, A_log_N, B_TGS, dt_bias_N, seq_idx_1T)
    return add_entering(y_TNP, entering(*left), dt_TN, A_log_N, C_TGS, dt_bias_N, seq_idx_1T)


def leaving_state(
    x_TNP: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    B_TGS: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the state after the last token of a part, and the logarithm of the part's decay (P1).

    Args:
        x_TNP: ``(T, N, P)`` inputs; for the other arguments see `api.ssd`.
    Returns:
        ``(N, P, S)`` state of the last document, which is zero at the start of the part, and ``(N,)``
        D. Both are float32, or float64 for float64 inputs.
    """
    tensors = (x_TNP, dt_TN, A_log_N, B_TGS, dt_bias_N, seq_idx_1T)
    state_NPS, log_N = _repeated(_leaving_state, *tensors)
    return state_NPS, log_N


def entering_state(
    states_cNPS: Tensor, logs_cN: Tensor, last_documents_c: Tensor, rank: int, document: Tensor
) -> Tensor:
    """Return the state that enters part ``rank``, zero if its first token begins a document (P2).

    Args:
        states_cNPS: ``(c, N, P, S)`` leaving states of all parts.
        logs_cN: ``(c, N)`` logarithms of the decay of all parts.
        last_documents_c: ``(c,)`` document of the last token of each part.
        rank: number of the part.
        document: ``(1,)`` document of the first token of the part.
    Returns:
        ``(N, P, S)``.
    """
    parts = torch.arange(len(logs_cN), device=logs_cN.device)
    before_c = parts < rank
    between_cc = (parts[:, None] < parts) & before_c
    reaches_c = (last_documents_c == document) & before_c
    # Sum with a mask, not by subtraction, so that decays of other documents are exact zeros.
    sums_cN = between_cc.to(logs_cN.dtype) @ logs_cN
    decay_cN = sums_cN.masked_fill(~reaches_c[:, None], -torch.inf).exp()
    return (states_cNPS * decay_cN[..., None, None]).sum(0)


def add_entering(
    y_TNP: Tensor,
    state_NPS: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    C_TGS: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
) -> Tensor:
    """Add the term of the entering state to the outputs of a part (P3).

    Args:
        y_TNP: ``(T, N, P)`` outputs of `api.ssd`; for the other arguments see there.
        state_NPS: ``(N, P, S)`` from `entering_state`.
    Returns:
        ``(T, N, P)`` in y's dtype.
    """
    tensors = (state_NPS, dt_TN, A_log_N, C_TGS, dt_bias_N, seq_idx_1T)
    (added_TNP,) = _repeated(_from_entering, *tensors)
    return (y_TNP + added_TNP).to(y_TNP.dtype)


def _leaving_state(
    x_TNP: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    B_TGS: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
) -> tuple[Tensor, Tensor]:
    groups, dtype = B_TGS.shape[1], torch.promote_types(x_TNP.dtype, torch.float32)
    dt_NT, logs_NT = _steps(dt_TN, A_log_N, dt_bias_N, dtype)
    last_T = seq_idx_1T[0] == seq_idx_1T[0, -1]
    from_here_NT = running_sum(logs_NT.masked_fill(~last_T, 0).flip(-1)).flip(-1)
    later_NT = pad(from_here_NT[:, 1:], (0, 1)).to(dtype)
    weight_NT = dt_NT * later_NT.masked_fill(~last_T, -torch.inf).exp()
    weighted_TNP = x_TNP.to(dtype) * weight_NT.t()[..., None]
    # (T, N, P) -> (G, R P, T); (G, R P, T) @ (G, T, S) -> (G, R P, S) -> (N, P, S)
    x_GXT = weighted_TNP.reshape(len(weighted_TNP), groups, -1).permute(1, 2, 0)
    state_NPS = (x_GXT @ B_TGS.to(dtype).transpose(0, 1)).view(*x_TNP.shape[1:], -1)
    return state_NPS, from_here_NT[:, 0].to(dtype)


def _from_entering(
    state_NPS: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    C_TGS: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
) -> tuple[Tensor]:
    (groups, states), dtype = C_TGS.shape[1:], state_NPS.dtype
    _, logs_NT = _steps(dt_TN, A_log_N, dt_bias_N, dtype)
    first_T = seq_idx_1T[0] == seq_idx_1T[0, 0]
    sums_NT = running_sum(logs_NT.masked_fill(~first_T, 0)).to(dtype)
    decay_NT = sums_NT.masked_fill(~first_T, -torch.inf).exp()
    # (G, T, S) @ (G, S, R P) -> (G, T, R P) -> (T, N, P)
    state_GSX = state_NPS.view(groups, -1, states).transpose(1, 2)
    y_GTX = C_TGS.to(dtype).transpose(0, 1) @ state_GSX
    y_TNP = y_GTX.transpose(0, 1).reshape(len(dt_TN), *state_NPS.shape[:2])
    return (y_TNP * decay_NT.t()[..., None],)


def _steps(
    dt_TN: Tensor, A_log_N: Tensor, dt_bias_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the step sizes ``(N, T)``, and the logarithms dt A of each step's decay in float64."""
    dt_NT = softplus(dt_TN.to(dtype) + dt_bias_N.to(dtype)).t()
    return dt_NT, dt_NT.double() * -A_log_N.double().exp()[:, None]


Results = tuple[Tensor, ...]


class _Repeated(torch.autograd.Function):
    """Autograd function that saves only its inputs and runs ``function`` again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Results], *tensors: Tensor) -> Results:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(ctx.saved_tensors, needed)
        ]
        with torch.enable_grad():
            results = ctx.function(*inputs)
        inputs_with_gradient = [tensor for tensor, needs in zip(inputs, needed) if needs]
        # If only x or B has a gradient, the logarithm of the decay has none.
        pairs = [(y, dy) for y, dy in zip(results, gradients) if y.requires_grad]
        gradients_of_inputs = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], inputs_with_gradient, [dy for _, dy in pairs]
            )
        )
        return None, *(next(gradients_of_inputs) if needs else None for needs in needed)


def _repeated(function: Callable[..., Results], *tensors: Tensor) -> Results:
    return cast(Results, _Repeated.apply(function, *tensors))  # type: ignore[no-untyped-call]
