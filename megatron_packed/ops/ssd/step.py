"""States of Mamba-2's scan after each document, and the scan of one next token, for generation.

Letters: B documents, T tokens of a pack, L tokens of one document, N heads, P head dimension, G
groups, R heads per group, S state size. The recurrence is in ``api.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megatron_packed.ops.running_sum import running_sum


def final_states(
    x_TNP: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    B_TGS: Tensor,
    dt_bias_N: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Return the state after the last token of each document of a pack.

    The state is ``sum_t w_t dt_t x_t B_t^T`` over the tokens t of the document. The weight ``w_t``
    is ``exp(sum of dt_s A over the later tokens s)``, which is at most 1. The sums are float64 and
    only add terms of the same document.

    Args:
        x_TNP: ``(T, N, P)`` inputs of the scan; the documents are consecutive.
        dt_TN: ``(T, N)`` step sizes before bias and softplus.
        A_log_N: ``(N,)`` logarithm of -A.
        B_TGS: ``(T, G, S)`` input projections.
        dt_bias_N: ``(N,)``.
        lengths: number of tokens of each document.
    Returns:
        ``(B, N, P, S)`` float32, or float64 for float64 inputs.
    """
    dtype = torch.promote_types(x_TNP.dtype, torch.float32)
    groups, A_N1 = B_TGS.shape[1], -A_log_N.double().exp()[:, None]
    states, start = [], 0
    for length in lengths:
        x_LNP, dt_LN, B_LGS = (x[start : start + length].to(dtype) for x in (x_TNP, dt_TN, B_TGS))
        start += length
        dt_NL = softplus(dt_LN + dt_bias_N.to(dtype)).t()
        # The sum over a token and its later tokens is a running sum from the end.
        from_here_NL = running_sum((dt_NL.double() * A_N1).flip(-1)).flip(-1)
        later_NL = torch.cat([from_here_NL[:, 1:], torch.zeros_like(A_N1)], dim=1)
        weighted_NLP = x_LNP.transpose(0, 1) * (dt_NL * later_NL.exp().to(dtype))[..., None]
        # (N, P, L) -> (G, R P, L); (G, R P, L) @ (G, L, S) -> (G, R P, S) -> (N, P, S)
        x_GXL = weighted_NLP.transpose(1, 2).reshape(groups, -1, length)
        states.append((x_GXL @ B_LGS.transpose(0, 1)).view(*x_LNP.shape[1:], -1))
    return torch.stack(states)


def scan_next(
    state_BNPS: Tensor,
    x_BNP: Tensor,
    dt_BN: Tensor,
    A_log_N: Tensor,
    B_BGS: Tensor,
    C_BGS: Tensor,
    D_N: Tensor,
    dt_bias_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the scan for the next token of each document.

    Args:
        state_BNPS: ``(B, N, P, S)`` from `final_states` or from the previous call.
        x_BNP: ``(B, N, P)`` inputs. For the other arguments see `api.ssd`, with B instead of T.
    Returns:
        ``(B, N, P)`` outputs in the dtype of x; ``(B, N, P, S)`` state for the next call.
    """
    dtype = state_BNPS.dtype
    heads_per_group = x_BNP.shape[1] // B_BGS.shape[1]
    x_wide_BNP = x_BNP.to(dtype)
    dt_BN = softplus(dt_BN.to(dtype) + dt_bias_N.to(dtype))
    decay_BN = (dt_BN * -A_log_N.to(dtype).exp()).exp()
    B_BNS, C_BNS = (b.to(dtype).repeat_interleave(heads_per_group, dim=1) for b in (B_BGS, C_BGS))
    added_BNPS = (x_wide_BNP * dt_BN[..., None])[..., None] * B_BNS[:, :, None]
    state_BNPS = state_BNPS * decay_BN[..., None, None] + added_BNPS
    y_BNP = (state_BNPS @ C_BNS[..., None])[..., 0] + D_N.to(dtype)[:, None] * x_wide_BNP
    return y_BNP.to(x_BNP.dtype), state_BNPS
