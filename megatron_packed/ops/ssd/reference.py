"""Scan in chunks in plain PyTorch, with static shapes, on any device. README.md has the derivation.

Isolation is exact. If a sum contains a term of another document, the factor of this term is an exact
zero. A mask before the exponential (exp(-inf)) makes the zero; no term is added and later subtracted.
So a change in one document changes no bit of the outputs and gradients of other documents.

Additional letters: Q chunks, L tokens of a chunk (L = chunk_size; the last chunk is padded), R heads
per group. Sums are fp32 (float64 for float64 inputs). The sums of dt * A are float64 up to the
exponential, because they grow to hundreds and only their differences matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus


def run(
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
    chunk_size: int,
) -> Tensor:
    """Run the op; see ``api.ssd``."""
    tokens, groups, padded = x_TNP.shape[0], B_TGS.shape[1], -x_TNP.shape[0] % chunk_size
    dtype = torch.promote_types(x_TNP.dtype, torch.float32)
    x_TNP_wide, A_N = x_TNP.to(dtype), -A_log_N.exp()

    # Padding tokens belong to the last document. Their dt is 0, so they neither add to the state
    # nor decay it.
    dt_TN_wide = softplus(dt_TN.to(dtype) + dt_bias_N.to(dtype))
    seq_idx_QL = torch.cat([seq_idx_1T, seq_idx_1T[:, -1:].expand(1, padded)], dim=1).view(
        -1, chunk_size
    )
    dt_QLN = _chunked(dt_TN_wide, padded, chunk_size)
    xdt_QGRLP = _by_group(_chunked(x_TNP_wide * dt_TN_wide[:, :, None], padded, chunk_size), groups)
    B_QGLS = _chunked(B_TGS.to(dtype), padded, chunk_size).transpose(1, 2)
    C_QGLS = _chunked(C_TGS.to(dtype), padded, chunk_size).transpose(1, 2)

    # (Q, L, N) -> (Q, G, R, L)
    logs_QGRL = _by_group(document_sum(dt_QLN.double() * A_N.double(), seq_idx_QL), groups)
    y_QGRLP = _within_chunk(xdt_QGRLP, B_QGLS, C_QGLS, logs_QGRL, seq_idx_QL)
    entering_QGRPS = _entering_states(
        _chunk_states(xdt_QGRLP, B_QGLS, logs_QGRL, seq_idx_QL), logs_QGRL, seq_idx_QL
    )
    y_QGRLP = y_QGRLP + _from_entering(entering_QGRPS, C_QGLS, logs_QGRL, seq_idx_QL)

    # (Q, G, R, L, P) -> (Q, L, G, R, P) -> (T, N, P)
    y_TNP = y_QGRLP.permute(0, 3, 1, 2, 4).reshape(-1, *x_TNP.shape[1:])[:tokens]
    return (y_TNP + D_N.to(dtype)[:, None] * x_TNP_wide).to(x_TNP.dtype)


def document_sum(values_QLN: Tensor, seq_idx_QL: Tensor) -> Tensor:
    """Compute the running sum over the tokens of a chunk that restarts at each document.

    The sum is a product with a mask, not a difference of running sums. So terms of other documents
    are exact zeros.
    """
    mask_QLL = same_document(seq_idx_QL).tril()
    return mask_QLL.to(values_QLN.dtype) @ values_QLN


def _within_chunk(xdt: Tensor, b: Tensor, c: Tensor, logs: Tensor, seq_idx: Tensor) -> Tensor:
    """Compute the part of the outputs from tokens of the same document in the same chunk."""
    mask_Q11LL = same_document(seq_idx).tril()[:, None, None]
    decay_QGRLL = _decay(logs[..., :, None] - logs[..., None, :], mask_Q11LL, xdt.dtype)
    scores_QG1LL = (c @ b.transpose(-1, -2))[:, :, None]
    return (scores_QG1LL * decay_QGRLL) @ xdt


def _chunk_states(xdt: Tensor, b: Tensor, logs: Tensor, seq_idx: Tensor) -> Tensor:
    """Compute the state that the tokens of each chunk contribute at the end of the chunk.

    Only tokens of the chunk's last document contribute.
    """
    reaches_Q11L = (seq_idx == seq_idx[:, -1:])[:, None, None]
    decay_QGRL = _decay(logs[..., -1:] - logs, reaches_Q11L, xdt.dtype)
    # (Q, G, R, P, L) @ (Q, G, 1, L, S) -> (Q, G, R, P, S)
    return (xdt * decay_QGRL[..., None]).transpose(-1, -2) @ b[:, :, None]


def _entering_states(states_QGRPS: Tensor, logs: Tensor, seq_idx: Tensor) -> Tensor:
    """Compute the state at the start of each chunk.

    The state is a decayed sum over the earlier chunks that end in the same document.

    ``total_GRQQ[..., i, j]`` is the sum of the logarithms of the chunks j+1..i. The sum is computed
    only by additions, so there is no cancellation. It is used only if chunks j and i end in the
    same document; then the chunks j+1..i have tokens of this document only.
    """
    chunks = seq_idx.shape[0]
    later_QQ = torch.ones(chunks, chunks, dtype=torch.bool, device=seq_idx.device).tril(-1)
    chunk_GRQ1 = logs[..., -1].permute(1, 2, 0)[..., None]
    total_GRQQ = chunk_GRQ1.masked_fill(~later_QQ, 0).cumsum(-2)
    ends_Q = seq_idx[:, -1]
    reaches_QQ = (ends_Q[:, None] == ends_Q[None, :]).tril()
    decay_GRQQ = _decay(total_GRQQ, reaches_QQ, states_QGRPS.dtype)
    # (G, R, Q, Q) @ (G, R, Q, P*S) -> (Q, G, R, P, S); the state leaving chunk i enters chunk i+1.
    flat_GRQX = states_QGRPS.permute(1, 2, 0, 3, 4).flatten(-2)
    leaving_QGRPS = (decay_GRQQ @ flat_GRQX).permute(2, 0, 1, 3).reshape(states_QGRPS.shape)
    return torch.cat([torch.zeros_like(leaving_QGRPS[:1]), leaving_QGRPS[:-1]])


def _from_entering(entering_QGRPS: Tensor, c: Tensor, logs: Tensor, seq_idx: Tensor) -> Tensor:
    """Compute the part of the outputs from earlier chunks, for documents that began there."""
    # The entering state of the first chunk is zero, so its previous document has no effect.
    previous_Q1 = torch.cat([seq_idx[:1, :1], seq_idx[:-1, -1:]])
    continues_Q11L = (seq_idx == previous_Q1)[:, None, None]
    decay_QGRL = _decay(logs, continues_Q11L, c.dtype)
    # (Q, G, 1, L, S) @ (Q, G, R, S, P) -> (Q, G, R, L, P)
    return (c[:, :, None] @ entering_QGRPS.transpose(-1, -2)) * decay_QGRL[..., None]


def _decay(logs: Tensor, reaches: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``exp(logs)`` where the mask ``reaches`` is True, and exact zeros elsewhere."""
    return logs.to(dtype).masked_fill(~reaches, -torch.inf).exp()


def same_document(seq_idx_QL: Tensor) -> Tensor:
    return seq_idx_QL[:, :, None] == seq_idx_QL[:, None, :]


def _chunked(values: Tensor, padded: int, chunk_size: int) -> Tensor:
    """Split ``(T, ...)`` into ``(Q, L, ...)``, with zeros after the last token."""
    return pad(values, (0, 0) * (values.dim() - 1) + (0, padded)).reshape(
        -1, chunk_size, *values.shape[1:]
    )


def _by_group(values: Tensor, groups: int) -> Tensor:
    """Split heads into groups: ``(Q, L, N, ...)`` -> ``(Q, G, R, L, ...)``."""
    chunks, length, heads = values.shape[:3]
    return values.reshape(chunks, length, groups, heads // groups, *values.shape[3:]).movedim(1, 3)
