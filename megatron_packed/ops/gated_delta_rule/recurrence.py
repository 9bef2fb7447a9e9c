"""Gated delta rule by its definition, token by token, for tests of the other backends.

The computation is float32, or float64 if one of q, k, v is float64. It has T sequential steps and is
slow by design. Autograd differentiates it. It reads the documents from ``cu_seqlens`` on the host and
computes them one by one. Because of the host read it runs only if it is requested by name.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import softplus

if TYPE_CHECKING:
    from megatron_packed.ops.gated_delta_rule.api import GatedDeltaRuleInputs
    from megatron_packed.ops.gated_delta_rule.tables import DeltaRuleTables


def not_supported_reasons(inputs: GatedDeltaRuleInputs) -> list[str]:
    """Return the reasons why the recurrence does not support these inputs; empty if it does."""
    return ["the recurrence passes no states between parts of a pack"] if inputs.in_parts else []


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
) -> Tensor:
    """Run the op; see ``api.gated_delta_rule``."""
    dtype = torch.promote_types(v_TNV.dtype, torch.float32)
    values_per_key = v_TNV.shape[1] // k_TGK.shape[1]
    q_TNK, k_TNK = (
        _unit(x_TGK.to(dtype)).repeat_interleave(values_per_key, dim=1) for x_TGK in (q_TGK, k_TGK)
    )
    q_TNK = q_TNK * q_TGK.shape[2] ** -0.5
    g_TN = -A_log_N.to(dtype).exp() * softplus(a_TN.to(dtype) + dt_bias_N.to(dtype))
    beta_TN = b_TN.to(dtype).sigmoid() * (2 if allow_neg_eigval else 1)
    offsets = cu_seqlens.tolist()
    outputs = [
        _document(*(x[start:end] for x in (q_TNK, k_TNK, v_TNV.to(dtype), g_TN, beta_TN)))
        for start, end in pairwise(offsets)
        if end > start
    ]
    return torch.cat(outputs).to(v_TNV.dtype)


def _unit(x_TGK: Tensor) -> Tensor:
    return x_TGK / (x_TGK.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _document(q_LNK: Tensor, k_LNK: Tensor, v_LNV: Tensor, g_LN: Tensor, beta_LN: Tensor) -> Tensor:
    """Run the recurrence over the tokens of one document."""
    state_NKV = v_LNV.new_zeros(*k_LNK.shape[1:], v_LNV.shape[2])
    outputs = []
    for q_NK, k_NK, v_NV, g_N, beta_N in zip(q_LNK, k_LNK, v_LNV, g_LN, beta_LN):
        state_NKV = g_N.exp()[:, None, None] * state_NKV
        read_NV = (k_NK[:, :, None] * state_NKV).sum(1)
        written_NV = beta_N[:, None] * (v_NV - read_NV)
        state_NKV = state_NKV + k_NK[:, :, None] * written_NV[:, None, :]
        outputs.append((q_NK[:, :, None] * state_NKV).sum(1))
    return torch.stack(outputs)
