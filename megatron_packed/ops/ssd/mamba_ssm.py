# mypy: disable-error-code="no-untyped-call"
"""Scan by mamba-ssm's Triton kernels, with a running sum that restarts at each document.

This module calls the kernels of ``mamba_chunk_scan_combined`` one by one and replaces the running sum
by ``chunk_sum``. The combined function isolates documents only up to rounding. README.md shows why
the kernels are exact with the restarting sum, in forward and backward.

Gradients of x, B, C and dt are written directly into the buffers of ``ops.column_slices`` if there
are any. Gradients of A_log, D and dt_bias are added to their ``main_grad`` if they have one.

Results are bitwise reproducible with the same tuned tiles (see ``gradients``). Triton tunes a kernel
at its first call with a new (chunk, head, state) size, and uses the result for any number of tokens
and heads. So run forward and backward once before a capture. Call ``tune`` before the first small
pack, because a small pack would determine the tiles of all later packs.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import mamba_ssm
import torch
from mamba_ssm.ops.triton import (
    ssd_bmm,
    ssd_chunk_scan,
    ssd_chunk_state,
    ssd_combined,
    ssd_state_passing,
)
from mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_bwd, _bmm_chunk_fwd
from mamba_ssm.ops.triton.ssd_chunk_scan import _chunk_scan_bwd_dstates, _chunk_scan_fwd
from mamba_ssm.ops.triton.ssd_chunk_state import _chunk_state_fwd
from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_fwd
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.column_slices import GradientSlot, gradient_like, gradient_slot
from megatron_packed.ops.kernel_operands import adjacent, main_grads_of
from megatron_packed.ops.ssd import gradients
from megatron_packed.ops.ssd.api import SSDInputs, inputs_of
from megatron_packed.ops.ssd.chunk_sum import PartialSums, chunk_sum_backward, chunk_sum_forward
from megatron_packed.ops.ssd.int32_offsets import OFFSET_LIMIT, largest_offset, piece, pieces
from megatron_packed.ops.ssd.parallel_compile import compile_module_in_threads

for _module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_combined, ssd_state_passing):
    compile_module_in_threads(_module)

OLDEST = (2, 3, 2)
"""Oldest supported version of mamba-ssm: its kernels clamp all exponent differences at zero.

Without the clamp, exp() of a difference across documents can be inf, and inf times the mask's zero
is NaN.
"""


def not_supported_reasons(inputs: SSDInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs; empty if they do."""
    reasons = []
    if tuple(map(int, re.findall(r"\d+", mamba_ssm.__version__)[:3])) < OLDEST:
        reasons.append(
            f"mamba-ssm {mamba_ssm.__version__} is older than the required {'.'.join(map(str, OLDEST))}"
        )
    if inputs.device_type != "cuda":
        reasons.append(f"the kernel runs on CUDA devices, not on {inputs.device_type}")
    if inputs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"the kernel supports bfloat16, float16 and float32, not {inputs.dtype}")
    if inputs.chunk_size not in (16, 32, 64, 128, 256):
        reasons.append(f"chunk_size ({inputs.chunk_size}) is not one of 16, 32, 64, 128, 256")
    if inputs.head_dim > 256 or inputs.state_dim > 256:
        reasons.append(
            f"head_dim ({inputs.head_dim}) and state_dim ({inputs.state_dim}) must be at most 256"
        )
    if pieces(inputs) == 0:
        reasons.append(
            f"{inputs.tokens} tokens overflow the kernels' 32-bit offsets even one head at a time; use shorter packs"
        )
    return reasons


def tune(inputs: SSDInputs, device: torch.device) -> None:
    """Tune the kernels' tiles by one forward and backward pass over zeros of these sizes.

    The function waits for the device. If no kernel is compiled yet, all cores of this process
    compile for about 200 s together.
    """
    zeros = partial(torch.zeros, dtype=inputs.dtype, device=device)
    x_TNP = zeros(inputs.tokens, inputs.heads, inputs.head_dim, requires_grad=True)
    dt_TN = zeros(inputs.tokens, inputs.heads)
    B_TGS = zeros(inputs.tokens, inputs.groups, inputs.state_dim)
    per_head_N = torch.zeros(inputs.heads, device=device)
    seq_idx_1T = torch.zeros(1, inputs.tokens, dtype=torch.int32, device=device)
    with torch.enable_grad():
        y_TNP = run(
            x_TNP,
            dt_TN,
            per_head_N,
            B_TGS,
            B_TGS,
            per_head_N,
            per_head_N,
            seq_idx_1T,
            seq_idx_1T[0],
            chunk_size=inputs.chunk_size,
        )
    torch.autograd.grad(y_TNP, x_TNP, torch.zeros_like(y_TNP))


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
    """Run the op; see ``api.ssd``.

    If all heads together would overflow 32-bit offsets, the heads are processed in several pieces.
    """
    arguments = (x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N)
    inputs = inputs_of(x_TNP, B_TGS, C_TGS, chunk_size)
    if largest_offset(inputs) <= OFFSET_LIMIT:
        slots = tuple(gradient_slot(tensor) for tensor in (x_TNP, dt_TN, B_TGS, C_TGS))
        y_TNP: Tensor = _Scan.apply(*arguments, seq_idx_1T, chunk_size, slots)
        return y_TNP
    count = pieces(inputs)
    no_slots = (None,) * 4
    parts = [
        _Scan.apply(*piece(arguments, i, count), seq_idx_1T, chunk_size, no_slots)
        for i in range(count)
    ]
    return torch.cat(parts, dim=1)


class _Scan(torch.autograd.Function):
    """Chunked scan; backward recomputes the chunk states and C B^T, which forward does not save."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TNP: Tensor,
        dt_TN: Tensor,
        A_log_N: Tensor,
        B_TGS: Tensor,
        C_TGS: Tensor,
        D_N: Tensor,
        dt_bias_N: Tensor,
        seq_idx_1T: Tensor,
        chunk_size: int,
        slots: tuple[GradientSlot | None, ...],
    ) -> Tensor:
        x_TNP, B_TGS, C_TGS = map(adjacent, (x_TNP, B_TGS, C_TGS))
        ctx.main_grads = main_grads_of(A_log_N, D_N, dt_bias_N)
        A_log_N, D_N, dt_bias_N = A_log_N.contiguous(), D_N.contiguous(), dt_bias_N.contiguous()
        step_NQL, sum_NQL = chunk_sum_forward(dt_TN, A_log_N, dt_bias_N, seq_idx_1T, chunk_size)
        x, b, c, step, total = x_TNP[None], B_TGS[None], C_TGS[None], step_NQL[None], sum_NQL[None]
        states = _entering_states(x, b, step, total, seq_idx_1T, dtype=c.dtype)
        scores = _bmm_chunk_fwd(c, b, chunk_size, seq_idx=seq_idx_1T, output_dtype=torch.float32)
        y, _ = _chunk_scan_fwd(scores, x, step, total, c, states, D=D_N, seq_idx=seq_idx_1T)
        ctx.save_for_backward(
            x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N, seq_idx_1T, step_NQL, sum_NQL
        )
        ctx.slots = slots
        y_TNP: Tensor = y[0]
        return y_TNP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TNP: Tensor) -> tuple[Tensor | None, ...]:
        x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N, seq_idx, step_NQL, sum_NQL = (
            ctx.saved_tensors
        )
        dx_TNP, ddt_TN, dB_TGS, dC_TGS = map(gradient_like, (x_TNP, dt_TN, B_TGS, C_TGS), ctx.slots)
        x, b, c, step, total = x_TNP[None], B_TGS[None], C_TGS[None], step_NQL[None], sum_NQL[None]
        dy = dy_TNP.contiguous()[None]
        scan = gradients.Scan(x, b, c, step, total, seq_idx, dy)

        # Recompute the scores and entering states, which forward did not save. The states are fp32
        # here, for the gradient of their decay.
        scores = _bmm_chunk_fwd(c, b, step.shape[3], seq_idx=seq_idx, output_dtype=torch.float32)
        states = _entering_states(x, b, step, total, seq_idx, dtype=torch.float32)

        # Compute the adjoint of the passing of states from chunk to chunk, then that of the products
        # inside a chunk.
        d_entering = _chunk_scan_bwd_dstates(c, total, dy, seq_idx=seq_idx, dtype=states.dtype)
        d_states, states_low, d_last_sum_NQX = gradients.state_passing(scan, states, d_entering)
        d_step_XNQL, d_D_XXQN = gradients.inputs(scan, scores, d_states, D_N, dx_TNP[None])
        dB_states, dC_states, d_reach_XNQL, d_sum_XNQL = gradients.projections(
            scan, states_low, d_states
        )
        d_scores = gradients.scores(scan)
        _bmm_chunk_bwd(c, d_scores, residual=dB_states, out=dB_TGS[None])
        _bmm_chunk_bwd(b, d_scores.transpose(-1, -2), residual=dC_states, out=dC_TGS[None])

        steps = chunk_sum_backward(
            step_NQL,
            dt_TN,
            A_log_N,
            D_N,
            dt_bias_N,
            seq_idx,
            PartialSums(
                d_sum_XNQL=d_sum_XNQL,
                d_last_sum_NQX=d_last_sum_NQX,
                d_log_XNQL=gradients.logs(scan, scores),
                d_reach_XNQL=d_reach_XNQL,
                d_step_XNQL=d_step_XNQL,
                d_D_XXQN=d_D_XXQN,
            ),
            out_TN=ddt_TN,
            main_grads=ctx.main_grads,
        )
        return (
            dx_TNP,
            steps.dt_TN,
            steps.A_log_N,
            dB_TGS,
            dC_TGS,
            steps.D_N,
            steps.dt_bias_N,
            None,
            None,
            None,
        )


def _entering_states(
    x: Tensor, b: Tensor, step: Tensor, total: Tensor, seq_idx: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """Compute the state at the start of each chunk; zero unless a document continues into it.

    Returns:
        ``(1, Q, N, P, S)``.
    """
    states = _chunk_state_fwd(b, x, step, total, seq_idx=seq_idx, states_in_fp32=True)
    entering, _ = _state_passing_fwd(
        states.flatten(-2),
        total[..., -1],
        seq_idx=seq_idx,
        chunk_size=step.shape[-1],
        out_dtype=dtype,
    )
    passed: Tensor = entering.view(states.shape)
    return passed
