# mypy: disable-error-code="no-untyped-call"
"""Gated delta rule in chunks in plain PyTorch, with static shapes, on any device.

README.md has the derivation. All chunks of all documents are computed together. Only the states pass
from chunk to chunk one after another, in a number of steps that the shapes determine.

Isolation is exact. A chunk has tokens of one document, and a state enters a chunk only if the chunk
continues its document. So a change in one document changes no bit of the outputs and gradients of
other documents.

Exponents are sums of gates over tokens that follow each other, so they are never positive. They are
float64 up to the exponential, because only their differences matter.

Additional letters: Q chunks, L tokens of a chunk (64, the free places of a chunk are zeros), R value
heads per key head. Sums are fp32, or float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, softplus

from megatron_packed.ops.gated_delta_rule.passed_states import (
    StateSizes,
    begins_inside,
    state_of_gathered,
)
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables, build_tables
from megatron_packed.ops.parts_of_pack import PartOfPack


def run(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
    cu_seqlens: Tensor,
    *,
    allow_neg_eigval: bool,
    tables: DeltaRuleTables | None,
    deterministic: bool,
    part: PartOfPack | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run the op; see ``api.gated_delta_rule``."""
    places = Places.from_tables(tables or build_tables(cu_seqlens, k_TGK.shape[0]), k_TGK.shape[0])
    dtype = torch.promote_types(v_TNV.dtype, torch.float32)
    constants = (A_log_N, dt_bias_N, places)
    chunks = Chunks.from_inputs(
        k_TGK, v_TNV, a_TN, b_TN, *constants, allow_neg_eigval=allow_neg_eigval
    )
    q_QG1LK = places.chunked(unit(q_TGK.to(dtype)) * q_TGK.shape[2] ** -0.5)[:, :, None]

    first_GRKV = None
    if part is not None:
        assert gather is not None
        message_1X, sizes = chunks.message_of_part(places, seq_idx_1T, part)
        state_NVK = state_of_gathered(gather(message_1X), sizes, part)
        state_NVK = state_NVK.masked_fill(~begins_inside(seq_idx_1T, part), 0)
        first_GRKV = state_NVK.mT.unflatten(0, chunks.add_QGRKV.shape[1:3])
    entering_QGRKV = chunks.entering_states(places, first_GRKV)
    written_QGRLV = chunks.own_QGRLV - chunks.read_QGRLK @ entering_QGRKV
    scores_QGRLL = (q_QG1LK @ chunks.k_QG1LK.mT) * chunks.decay_QGRLL
    o_QGRLV = scores_QGRLL @ written_QGRLV
    o_QGRLV = o_QGRLV + (q_QG1LK * chunks.kept_QGRL1) @ entering_QGRKV
    return places.tokens(o_QGRLV.flatten(1, 2)).to(v_TNV.dtype)


def unit(x: Tensor) -> Tensor:
    """Divide ``x`` by its L2 norm over the last dimension, with 1e-6 under the root."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def gates(
    a_TN: Tensor,
    b_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    dtype: torch.dtype,
    *,
    allow_neg_eigval: bool,
) -> tuple[Tensor, Tensor]:
    """Return g, the logarithm of the decay, and beta, the strength of the update, ``(T, N)``."""
    g_TN = -A_log_N.to(dtype).exp() * softplus(a_TN.to(dtype) + dt_bias_N.to(dtype))
    beta_TN = b_TN.to(dtype).sigmoid()
    return g_TN, 2 * beta_TN if allow_neg_eigval else beta_TN


class Places(NamedTuple):
    """Places of the tokens in the chunks: ``Q * L`` places for T tokens, the others are free."""

    token_X: Tensor
    """``(Q * L,)`` int64: token at each place; any token if the place is free."""
    free_X: Tensor
    """``(Q * L,)`` bool: True for a place without a token."""
    place_T: Tensor
    """``(T,)`` int64: place of each token."""
    starts_Q: Tensor
    """``(Q,)`` bool: True if no state enters the chunk (first of its document, or empty)."""
    last_chunk_D: Tensor
    """``(D,)`` int64: last chunk of each document; meaningless for an empty document."""

    @classmethod
    def from_tables(cls, tables: DeltaRuleTables, tokens: int) -> Places:
        """Compute the places from the chunks of a pack with ``tokens`` tokens."""
        start_Q, device = tables.start_Q, tables.start_Q.device
        token_QL = start_Q[:, None] + torch.arange(CHUNK, device=device)
        chunk_Q = torch.arange(start_Q.shape[0], device=device)
        token_T = torch.arange(tokens, dtype=torch.int32, device=device)
        # Chunks with tokens are in the order of the pack, and empty chunks start at T.
        chunk_T = torch.searchsorted(start_Q, token_T, right=True) - 1
        continues_Q = chunk_Q > tables.first_chunk_D[tables.document_Q]
        return cls(
            token_X=token_QL.clamp_max(tokens - 1).flatten(),
            free_X=(token_QL >= tables.end_Q[:, None]).flatten(),
            place_T=chunk_T * CHUNK + (token_T - start_Q[chunk_T]),
            starts_Q=~continues_Q | (start_Q == tables.end_Q),
            last_chunk_D=(tables.first_chunk_D + tables.num_chunks_D - 1).long(),
        )

    def chunked(self, x_THX: Tensor) -> Tensor:
        """Copy ``(T, H, ...)`` to ``(Q, H, L, ...)``, with zeros at the free places."""
        placed = _Rearrange.apply(x_THX, self.token_X, self.free_X, self.place_T, None)
        # (Q L, H, ...) -> (Q, L, H, ...) -> (Q, H, L, ...)
        chunks: Tensor = placed.unflatten(0, (-1, CHUNK)).transpose(1, 2)
        return chunks

    def tokens(self, x_QHLX: Tensor) -> Tensor:
        """Copy ``(Q, H, L, ...)`` to ``(T, H, ...)``; drop what is at the free places."""
        placed = x_QHLX.transpose(1, 2).flatten(0, 1)
        x_THX: Tensor = _Rearrange.apply(placed, self.place_T, None, self.token_X, self.free_X)
        return x_THX


class Chunks(NamedTuple):
    """Chunks of a pack with all that does not depend on the states that enter them.

    ``own``, ``read``, ``keep`` and ``add`` are the matrices of the README: from the state S that
    enters a chunk, the chunk's updates are ``own - read S`` and the state after it is
    ``keep S + add``.
    """

    k_QG1LK: Tensor
    decay_QGRLL: Tensor
    """Decay from token j (last dimension) to token i >= j; 0 for i < j."""
    kept_QGRL1: Tensor
    """Decay from the start of the chunk to each token."""
    own_QGRLV: Tensor
    read_QGRLK: Tensor
    keep_QGRKK: Tensor
    add_QGRKV: Tensor

    @classmethod
    def from_inputs(
        cls,
        k_TGK: Tensor,
        v_TNV: Tensor,
        a_TN: Tensor,
        b_TN: Tensor,
        A_log_N: Tensor,
        dt_bias_N: Tensor,
        places: Places,
        *,
        allow_neg_eigval: bool,
    ) -> Chunks:
        """Compute the matrices of all chunks."""
        dtype = torch.promote_types(v_TNV.dtype, torch.float32)
        by_key_head = (k_TGK.shape[1], -1)
        g_TN, beta_TN = gates(
            a_TN, b_TN, A_log_N, dt_bias_N, dtype, allow_neg_eigval=allow_neg_eigval
        )
        # (Q, N, L, ...) -> (Q, G, R, L, ...)
        g_QGRL, beta_QGRL, v_QGRLV = (
            places.chunked(x).unflatten(1, by_key_head) for x in (g_TN, beta_TN, v_TNV.to(dtype))
        )
        k_QG1LK = places.chunked(unit(k_TGK.to(dtype)))[:, :, None]

        decay_QGRLL = _Decay.apply(g_QGRL)
        kept_QGRL1 = _running_sum(g_QGRL).exp().to(dtype)[..., None]

        # The updates U solve (I + A) U = beta (V - kept K S). The solver reads A below the diagonal.
        beta_QGRL1 = beta_QGRL[..., None]
        A_QGRLL = beta_QGRL1 * decay_QGRLL * (k_QG1LK @ k_QG1LK.mT)
        right_QGRLX = beta_QGRL1 * torch.cat([v_QGRLV, kept_QGRL1 * k_QG1LK], dim=-1)
        solved_QGRLX = torch.linalg.solve_triangular(
            A_QGRLL, right_QGRLX, upper=False, unitriangular=True
        )
        own_QGRLV, read_QGRLK = solved_QGRLX.split([v_TNV.shape[2], k_TGK.shape[2]], dim=-1)

        at_end_QGRKL = (k_QG1LK * decay_QGRLL[..., -1, :, None]).mT
        identity_KK = torch.eye(k_TGK.shape[2], dtype=dtype, device=k_TGK.device)
        return cls(
            k_QG1LK=k_QG1LK,
            decay_QGRLL=decay_QGRLL,
            kept_QGRL1=kept_QGRL1,
            own_QGRLV=own_QGRLV,
            read_QGRLK=read_QGRLK,
            keep_QGRKK=kept_QGRL1[..., -1:, :] * identity_KK - at_end_QGRKL @ read_QGRLK,
            add_QGRKV=at_end_QGRKL @ own_QGRLV,
        )

    def entering_states(self, places: Places, first_GRKV: Tensor | None = None) -> Tensor:
        """Compute the state that enters each chunk; zero for the first chunk of a document.

        Args:
            first_GRKV: state that enters the first chunk; None for zeros.
        Returns:
            ``(Q, G, R, K, V)``.
        """
        states: Tensor = _PassStates.apply(
            self.keep_QGRKK.flatten(1, 2),
            self.add_QGRKV.flatten(1, 2),
            places.starts_Q,
            None if first_GRKV is None else first_GRKV.flatten(0, 1),
        )
        return states.view_as(self.add_QGRKV)

    def message_of_part(
        self, places: Places, seq_idx_1T: Tensor, part: PartOfPack
    ) -> tuple[Tensor, StateSizes]:
        """Return the message of a part, ``(1, N (V + K) K)``; see `passed_states`.

        The states after the part are those that a state of zeros and one of ones on the diagonal become.
        Empty chunks pass them on, so they leave the last chunk.
        """
        keep_QNKK, add_QNKV = self.keep_QGRKK.flatten(1, 2), self.add_QGRKV.flatten(1, 2)
        heads, key_dim, value_dim = add_QNKV.shape[1:]
        identity_KK = torch.eye(key_dim, dtype=keep_QNKK.dtype, device=keep_QNKK.device)
        map_KK = identity_KK * begins_inside(seq_idx_1T, part)
        first_NKX = pad(map_KK, (value_dim, 0)).expand(heads, -1, -1)
        add_QNKX = pad(add_QNKV, (0, key_dim))
        starts_Q = places.starts_Q & ~places.free_X[::CHUNK]
        entering_QNKX = _PassStates.apply(keep_QNKK, add_QNKX, starts_Q, first_NKX)
        leaving_NKX = keep_QNKK[-1] @ entering_QNKX[-1] + add_QNKX[-1]
        return leaving_NKX.mT.reshape(1, -1), StateSizes(heads, key_dim, value_dim)


def _running_sum(g_QGRL: Tensor) -> Tensor:
    """Return the running sum over the tokens of a chunk in float64.

    The sum is a product with a triangle of ones, which is deterministic on every device.
    """
    ones_LL = torch.ones(CHUNK, CHUNK, dtype=torch.float64, device=g_QGRL.device)
    return g_QGRL.double() @ ones_LL.triu()


class _Decay(torch.autograd.Function):
    """Decay from token j to token i of a chunk, the exponential of the gates j+1..i.

    The entries with j > i are exact zeros: a mask before the exponential keeps it from overflow.
    Backward adds the gradients of all entries whose sum has a gate. It subtracts none, so the
    gradient of a gate is exact to rounding also if its decay is strong.
    """

    @staticmethod
    def forward(ctx: Any, g_QGRL: Tensor) -> Tensor:
        sum_QGRL = _running_sum(g_QGRL)
        logs_QGRLL = (sum_QGRL[..., :, None] - sum_QGRL[..., None, :]).to(g_QGRL.dtype)
        later_LL = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g_QGRL.device).triu(1)
        decay_QGRLL = logs_QGRLL.masked_fill_(later_LL, -torch.inf).exp_()
        ctx.save_for_backward(decay_QGRLL)
        return decay_QGRLL

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_QGRLL: Tensor) -> Tensor:
        (decay_QGRLL,) = ctx.saved_tensors
        # Gate t is in the sums of the entries i >= t and j < t.
        d_logs_QGRLL = gradient_QGRLL * decay_QGRLL
        from_t_QGRLL = torch.ones_like(decay_QGRLL[0, 0, 0]).triu() @ d_logs_QGRLL
        d_g_QGRL: Tensor = from_t_QGRLL.tril_(-1).sum(-1)
        return d_g_QGRL


class _Rearrange(torch.autograd.Function):
    """Copy of rows to other places; backward copies the gradients back.

    Each row has at most one place. So both directions read by an index, and no sum and no atomic
    addition is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        free: Tensor | None,
        back: Tensor,
        dropped: Tensor | None,
    ) -> Tensor:
        ctx.back = (back, dropped)
        return _rows(x, index, free)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _rows(gradient, *ctx.back), None, None, None, None


def _rows(x: Tensor, index: Tensor, free: Tensor | None) -> Tensor:
    """Return ``x[index]``, with zeros where ``free`` is True."""
    rows = x.index_select(0, index)
    return rows if free is None else rows.masked_fill_(free.view(-1, *(1,) * (x.dim() - 1)), 0)


class _PassStates(torch.autograd.Function):
    """State that enters each chunk, ``state = keep state + add`` of the chunk before.

    The state that enters the first chunk is given, or zero.

    Forward goes through the chunks in order, backward in reverse order. The number of steps is the
    number of chunks in the tables, also if some are empty.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keep_QNKK: Tensor,
        add_QNKV: Tensor,
        starts_Q: Tensor,
        first_NKV: Tensor | None,
    ) -> Tensor:
        entering_QNKV = torch.zeros_like(add_QNKV)
        if first_NKV is not None:
            entering_QNKV[0] = first_NKV
        starts = starts_Q.unbind()
        for i in range(1, len(starts)):
            previous_chunk = (add_QNKV[i - 1], keep_QNKK[i - 1], entering_QNKV[i - 1])
            torch.baddbmm(*previous_chunk, out=entering_QNKV[i]).masked_fill_(starts[i], 0)
        ctx.save_for_backward(keep_QNKK, entering_QNKV, starts_Q)
        return entering_QNKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_QNKV: Tensor) -> tuple[Tensor | None, ...]:
        keep_QNKK, entering_QNKV, starts_Q = ctx.saved_tensors
        starts = starts_Q.unbind()
        # The gradient of `add` is the gradient of the state after the chunk.
        d_add_QNKV = torch.zeros_like(gradient_QNKV)
        for i in range(len(starts) - 1, 0, -1):
            next_chunk = (gradient_QNKV[i], keep_QNKK[i].mT, d_add_QNKV[i])
            torch.baddbmm(*next_chunk, out=d_add_QNKV[i - 1]).masked_fill_(starts[i], 0)
        d_first_NKV = None
        if ctx.needs_input_grad[3]:
            d_first_NKV = torch.baddbmm(gradient_QNKV[0], keep_QNKK[0].mT, d_add_QNKV[0])
        return d_add_QNKV @ entering_QNKV.mT, d_add_QNKV, None, d_first_NKV
