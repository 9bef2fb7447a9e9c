"""Gated delta rule over packed documents, from the inputs of a gated delta net's heads.

The state S of a value head is (K, V) and zero before the first token of each document. The q and k of
its key head are divided by their L2 norms. Each token t computes::

    g = -exp(A_log) softplus(a_t + dt_bias)
    beta = sigmoid(b_t), or 2 sigmoid(b_t) with allow_neg_eigval
    S <- exp(g) S
    S <- S + k_t (beta (v_t - S^T k_t))^T
    o_t = S^T q_t / sqrt(K)

Letters in tensor names: T tokens, G key heads, N value heads (value head n uses key head n // (N/G)),
K key head dimension, V value head dimension.

Source: Yang, Kautz and Hatamizadeh, 'Gated Delta Networks', arXiv:2412.06464. README.md derives the
packed form in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import CHUNKS_TO_TUNE, Backend, GPUBackend, Op, OpWork
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.parts_of_pack import PartOfPack

OP = Op(
    "gated_delta_rule",
    (
        GPUBackend("triton", "megatron_packed.ops.gated_delta_rule.triton_kernels"),
        Backend("reference", "megatron_packed.ops.gated_delta_rule.reference"),
        GPUBackend("fla", "megatron_packed.ops.gated_delta_rule.fla", automatic=False),
        Backend("recurrence", "megatron_packed.ops.gated_delta_rule.recurrence", automatic=False),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.gated_delta_rule.on_meta"),
    # 8 operations for each entry of the states, as Megatron counts them. Kernels run the rule in
    # chunks, with other numbers of operations.
    work=lambda inputs: OpWork(
        per_token=8 * inputs.value_heads * inputs.value_dim * inputs.key_dim
    ),
    to_tune=lambda inputs: replace(inputs, tokens=CHUNKS_TO_TUNE * CHUNK),
)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaRuleInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    allow_neg_eigval: bool
    deterministic: bool
    dtype: torch.dtype
    device_type: str
    in_parts: bool = False
    """True if the tokens are a part of a pack, and states pass between the parts."""


def gated_delta_rule(
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
    allow_neg_eigval: bool = False,
    tables: DeltaRuleTables | tuple[Tensor, ...] | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    part: PartOfPack | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run the gated delta rule, with the state set to zero before the first token of each document.

    The op divides q and k by their L2 norm, scales q and computes the gates itself.

    With ``part`` the tokens are one of consecutive parts of a pack. All processes with a part call the op
    at the same time, and its first document starts from the state that the earlier parts send. Boundaries
    and tables are those of the part.

    Args:
        q_TGK, k_TGK: ``(T, G, K)`` after convolution and SiLU. q, k, v, a and b may be strided views
            with stride 1 in the last dimension.
        v_TNV: ``(T, N, V)`` in the dtype of q and k, N divisible by G.
        a_TN: ``(T, N)`` decay before bias and softplus.
        b_TN: ``(T, N)`` beta before the sigmoid.
        A_log_N: ``(N,)`` fp32, the logarithm of -A.
        dt_bias_N: ``(N,)`` fp32.
        seq_idx_1T: ``(1, T)`` int32 document number of each token, never decreasing.
        cu_seqlens: ``(D + 1,)`` int32 document offsets (first 0, last T), the same boundaries as
            ``seq_idx_1T``. Documents may be empty.
        allow_neg_eigval: doubles beta, so that a token may invert the state along its key.
        tables: result of ``tables.build_tables`` for this micro-batch; if None, the op builds it.
        deterministic: equal inputs give equal bits in all gradients in each run.
        backend: ``auto`` or a name of ``OP.names()``.
        part: place of the part in the pack; None for a complete pack.
        gather: returns the rows of all parts, ``(1, X)`` to ``(c, X)``, and sums their gradients in
            backward. Backends that do not send messages themselves need it for a part.
    Returns:
        ``(T, N, V)`` in v's dtype.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
    """
    _check(q_TGK, k_TGK, v_TNV, a_TN, b_TN)
    _check_boundaries(q_TGK, seq_idx_1T, cu_seqlens)
    _check_heads(v_TNV, A_log_N, dt_bias_N)
    options: dict[str, Any] = {"allow_neg_eigval": allow_neg_eigval, "deterministic": deterministic}
    inputs = inputs_of(k_TGK, v_TNV, in_parts=part is not None, **options)
    if part is not None:
        options |= {"part": part, "gather": gather}
    o_TNV: Tensor = OP.chosen[backend, inputs].loaded.run(
        *(q_TGK, k_TGK, v_TNV, a_TN, b_TN, A_log_N, dt_bias_N, seq_idx_1T, cu_seqlens),
        tables=None if tables is None else DeltaRuleTables._make(tables),
        **options,
    )
    return o_TNV


def inputs_of(
    k_TGK: Tensor,
    v_TNV: Tensor,
    *,
    allow_neg_eigval: bool = False,
    deterministic: bool = False,
    in_parts: bool = False,
) -> GatedDeltaRuleInputs:
    """Return the shapes, dtype and options of a call, which determine its backend."""
    return GatedDeltaRuleInputs(
        tokens=k_TGK.shape[0],
        key_heads=k_TGK.shape[1],
        value_heads=v_TNV.shape[1],
        key_dim=k_TGK.shape[2],
        value_dim=v_TNV.shape[2],
        allow_neg_eigval=allow_neg_eigval,
        deterministic=deterministic,
        dtype=v_TNV.dtype,
        device_type=v_TNV.device.type,
        in_parts=in_parts,
    )


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> None:
    if q.dim() != 3 or q.shape != k.shape:
        raise ValueError(
            f"gated_delta_rule: q has shape {list(q.shape)} and k {list(k.shape)}; both must be (T, G, K)."
        )
    if v.dim() != 3 or v.shape[0] != q.shape[0]:
        raise ValueError(
            f"gated_delta_rule: v has shape {list(v.shape)}; it must be (T, N, V) with T = {q.shape[0]}."
        )
    if v.shape[1] % q.shape[1]:
        raise ValueError(
            f"gated_delta_rule: {v.shape[1]} value heads are not divisible by {q.shape[1]} key heads."
        )
    if a.shape != v.shape[:2] or b.shape != v.shape[:2]:
        raise ValueError(
            f"gated_delta_rule: a has shape {list(a.shape)} and b {list(b.shape)}; "
            f"both must be (T, N) = {list(v.shape[:2])}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"gated_delta_rule: q, k and v need one dtype; got {q.dtype}, {k.dtype}, {v.dtype}."
        )


def _check_boundaries(q: Tensor, seq_idx: Tensor, cu_seqlens: Tensor) -> None:
    if seq_idx.shape != (1, q.shape[0]):
        raise ValueError(
            f"gated_delta_rule: seq_idx has shape {list(seq_idx.shape)}; it must be (1, T) with T = {q.shape[0]}."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"gated_delta_rule: cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
            "it must be int32 (D + 1,) with at least one document."
        )


def _check_heads(v: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    if A_log.shape != (v.shape[1],) or dt_bias.shape != (v.shape[1],):
        raise ValueError(
            f"gated_delta_rule: A_log has shape {list(A_log.shape)} and dt_bias {list(dt_bias.shape)}; "
            f"both must be (N,) with N = {v.shape[1]}."
        )
