# mypy: disable-error-code="no-untyped-call"
"""Gated delta rule by the Triton kernels of flash-linear-attention (package ``fla-core``).

The op passes its own chunks, because the package would read their number on the host. Spare chunks
are the first chunk of one more document, which is empty, so their stores are masked. The decay is
computed in float32 before the kernels.

The package caches its tables by the identity of ``cu_seqlens``. A buffer that is refilled would then
get the tables of an earlier pack, so this module disables the cache. Triton tunes the kernels at
their first call. Call ``tune`` before a capture.
"""

from __future__ import annotations

import re
from functools import partial
from importlib.metadata import version

import fla.utils
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.api import GatedDeltaRuleInputs
from megatron_packed.ops.gated_delta_rule.reference import gates
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables, build_tables

fla.utils.FLA_DISABLE_TENSOR_CACHE = True

OLDEST = (0, 6, 0)
"""Oldest supported version of fla-core; its op accepts the chunks as an argument."""
MISCOMPILING_TRITON = ((3, 4, 0), (3, 7, 1))
"""First wrong and first right version of Triton for the backward kernels on Hopper."""


def not_supported_reasons(inputs: GatedDeltaRuleInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs; empty if they do."""
    reasons = []
    if _version("fla-core") < OLDEST:
        reasons.append(f"fla-core {version('fla-core')} is older than the required 0.6.0")
    if inputs.device_type != "cuda":
        reasons.append(f"the kernel runs on CUDA devices, not on {inputs.device_type}")
    elif torch.cuda.get_device_capability()[0] == 9:
        first_miscompiling, first_correct = MISCOMPILING_TRITON
        if first_miscompiling <= _version("triton") < first_correct:
            reasons.append(
                f"Triton {version('triton')} compiles the backward pass wrongly for Hopper; "
                "it needs Triton 3.7.1 or later"
            )
    if inputs.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"the kernel supports bfloat16 and float16, not {inputs.dtype}")
    if inputs.key_dim > 256 or inputs.key_dim % 2 or inputs.value_dim % 2:
        reasons.append(
            f"the key dimension ({inputs.key_dim}) and the value dimension ({inputs.value_dim}) "
            "must be even, the first at most 256"
        )
    if inputs.allow_neg_eigval:
        # measured on an H200: errors of 0.18 for 448 tokens of one key, and of 0.95 for 8,192
        reasons.append("with a doubled beta the kernels are wrong where keys repeat")
    if inputs.in_parts:
        reasons.append("the package's states do not pass between parts of a pack here")
    if inputs.deterministic:
        reasons.append("equal gradients in each run are not proven for these kernels")
    return reasons


def tune(inputs: GatedDeltaRuleInputs, device: torch.device) -> None:
    """Tune the kernels' tiles by one forward and backward pass over zeros of these sizes."""
    zeros = partial(torch.zeros, dtype=inputs.dtype, device=device)
    k_TGK = zeros(inputs.tokens, inputs.key_heads, inputs.key_dim, requires_grad=True)
    v_TNV = zeros(inputs.tokens, inputs.value_heads, inputs.value_dim)
    a_TN = zeros(inputs.tokens, inputs.value_heads)
    per_head_N = torch.zeros(inputs.value_heads, device=device)
    cu_seqlens = torch.arange(2, dtype=torch.int32, device=device) * inputs.tokens
    with torch.enable_grad():
        o_TNV = run(
            *(k_TGK, k_TGK, v_TNV, a_TN, a_TN, per_head_N, per_head_N, cu_seqlens, cu_seqlens),
            allow_neg_eigval=inputs.allow_neg_eigval,
            tables=None,
            deterministic=inputs.deterministic,
        )
    torch.autograd.grad(o_TNV, k_TGK, torch.zeros_like(o_TNV))


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
    tables = tables or build_tables(cu_seqlens, k_TGK.shape[0])
    g_TN, _ = gates(a_TN, b_TN, A_log_N, dt_bias_N, torch.float32, allow_neg_eigval=False)
    o_1TNV, _ = chunk_gated_delta_rule(
        q_TGK[None],
        k_TGK[None],
        v_TNV[None],
        g_TN[None],
        b_TN.float()[None],
        use_qk_l2norm_in_kernel=True,
        # With this option the package does not switch to the kernels of FlashQLA.
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval,
        cu_seqlens=torch.cat([cu_seqlens, cu_seqlens[-1:]]),
        chunk_indices=_chunk_indices(tables, cu_seqlens),
    )
    o_TNV: Tensor = o_1TNV[0]
    return o_TNV


def _chunk_indices(tables: DeltaRuleTables, cu_seqlens: Tensor) -> Tensor:
    """Return ``(Q, 2)`` int32 rows (document, chunk in the document).

    Spare chunks get the number of the added document, which follows those of ``cu_seqlens``.
    """
    spare_Q = tables.start_Q == tables.end_Q
    first_token_Q = cu_seqlens[tables.document_Q]
    document_Q = tables.document_Q.masked_fill(spare_Q, cu_seqlens.shape[0] - 1)
    chunk_Q = ((tables.start_Q - first_token_Q) // CHUNK).masked_fill(spare_Q, 0)
    return torch.stack([document_Q, chunk_Q], dim=1)


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version(package))[:3]))
