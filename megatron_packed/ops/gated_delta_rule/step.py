"""States of the gated delta rule after each document, and one next token, for generation.

Letters: B documents, T tokens of a pack, G key heads, N value heads, K key head dimension, V value
head dimension, Q chunks. The recurrence is in ``api.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.reference import Chunks, Places, gates, unit
from megatron_packed.ops.gated_delta_rule.tables import build_tables


def final_states(
    k_TGK: Tensor,
    v_TNV: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    lengths: Sequence[int],
    *,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """Return the state after the last token of each document of a pack.

    Args:
        lengths: number of tokens of each document, at least 1; the documents are consecutive and
            begin with the first token. Tokens after the last document are not read.
        k_TGK, v_TNV, a_TN, b_TN, A_log_N, dt_bias_N: inputs of `api.gated_delta_rule`.
    Returns:
        ``(B, N, K, V)`` float32, or float64 for float64 inputs.
    """
    tokens = sum(lengths)
    sizes = torch.tensor([0, *lengths], dtype=torch.int32, device=k_TGK.device)
    places = Places.from_tables(build_tables(sizes.cumsum(0, dtype=torch.int32), tokens), tokens)
    k_TGK, v_TNV, a_TN, b_TN = (x[:tokens] for x in (k_TGK, v_TNV, a_TN, b_TN))
    constants = (A_log_N, dt_bias_N, places)
    chunks = Chunks.from_inputs(
        k_TGK, v_TNV, a_TN, b_TN, *constants, allow_neg_eigval=allow_neg_eigval
    )
    leaving_QGRKV = chunks.keep_QGRKK @ chunks.entering_states(places) + chunks.add_QGRKV
    return leaving_QGRKV[places.last_chunk_D].flatten(1, 2)


def update_next(
    state_BNKV: Tensor,
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BNV: Tensor,
    a_BN: Tensor,
    b_BN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    *,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the rule for the next token of each document.

    Args:
        state_BNKV: ``(B, N, K, V)`` from `final_states` or from the previous call.
        q_BGK, k_BGK, v_BNV, a_BN, b_BN, A_log_N, dt_bias_N: inputs of `api.gated_delta_rule`, with
            B instead of T.
    Returns:
        ``(B, N, V)`` outputs in v's dtype; ``(B, N, K, V)`` state for the next call.
    """
    dtype, values_per_key = state_BNKV.dtype, v_BNV.shape[1] // k_BGK.shape[1]
    q_BNK, k_BNK = (
        unit(x.to(dtype)).repeat_interleave(values_per_key, dim=1) for x in (q_BGK, k_BGK)
    )
    g_BN, beta_BN = gates(a_BN, b_BN, A_log_N, dt_bias_N, dtype, allow_neg_eigval=allow_neg_eigval)
    state_BNKV = state_BNKV * g_BN.exp()[..., None, None]
    read_BNV = (k_BNK[..., None, :] @ state_BNKV)[..., 0, :]
    written_BNV = beta_BN[..., None] * (v_BNV.to(dtype) - read_BNV)
    state_BNKV = state_BNKV + k_BNK[..., None] * written_BNV[..., None, :]
    o_BNV = ((q_BNK * q_BGK.shape[2] ** -0.5)[..., None, :] @ state_BNKV)[..., 0, :]
    return o_BNV.to(v_BNV.dtype), state_BNKV
