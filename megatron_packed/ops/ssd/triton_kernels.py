# mypy: disable-error-code="no-untyped-call"
"""Scan by Triton kernels that keep the state in registers, and restart at each document.

Forward runs four kernels and saves only its inputs. Backward computes the decay factors and states
again, and gives the same bits in each run. README.md has the formulas and the proof of isolation.

The shapes of all tensors and grids depend only on the numbers of tokens, heads, groups and channels.
There is no autotuning, so a warm-up only has to compile the kernels.

Gradients of x, B, C and dt are written directly into the buffers of ``ops.column_slices`` if there are
any. Gradients of A_log, D and dt_bias are added to their ``main_grad`` if they have one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.column_slices import GradientSlot, gradient_like, gradient_slot
from megatron_packed.ops.kernel_operands import adjacent, main_grads_of
from megatron_packed.ops.parts_of_pack import PartOfPack
from megatron_packed.ops.ssd.api import LARGEST_STATE, SSDInputs, inputs_of
from megatron_packed.ops.ssd.chunk_sum import chunk_sum_backward
from megatron_packed.ops.ssd.triton_gradients import ScanTensors, chunk_gradients
from megatron_packed.ops.ssd.triton_outputs import input_gradients, outputs
from megatron_packed.ops.ssd.triton_states import (
    added_by_segments,
    message_of_part,
    state_from_parts,
    states_of_chunks,
    states_of_segments,
)
from megatron_packed.ops.ssd.triton_steps import STEP, chunk_factors
from megatron_packed.ops.ssd.triton_tiles import plan_of
from megatron_packed.ops.triton_mode import device_reasons

DTYPES = (torch.bfloat16,)
"""Supported dtypes. Tests add float32 in the interpreter; on a GPU its tiles would not fit in registers."""

PASSES_STATES = True
"""`run` accepts a part of a pack."""


def not_supported_reasons(inputs: SSDInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs; empty if they do."""
    reasons = device_reasons(inputs.device_type)
    if inputs.dtype not in DTYPES:
        reasons.append(f"the kernels support bfloat16, not {inputs.dtype}")
    if inputs.state_dim > LARGEST_STATE:
        reasons.append(
            f"state_dim ({inputs.state_dim}) is above {LARGEST_STATE}, the largest that fits in registers"
        )
    return reasons


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
    part: PartOfPack | None = None,
) -> Tensor:
    """Run the op; see ``api.ssd``. The kernels have their own chunk length and ignore ``chunk_size``.

    Args:
        part: the tokens are this part of a pack; see ``passed_states.ssd_of_part``.
    """
    slots = tuple(gradient_slot(tensor) for tensor in (x_TNP, dt_TN, B_TGS, C_TGS))
    arguments = (x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N)
    y_TNP: Tensor = _SegmentedScan.apply(*arguments, seq_idx_1T, slots, part)
    return y_TNP


class _SegmentedScan(torch.autograd.Function):
    """Scan of a pack in segments; saves its inputs only.

    For a part of a pack it also saves the state that enters the part. Forward sends the state that the
    part reaches from zeros, and backward the gradient of the state in the same way.
    """

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
        slots: tuple[GradientSlot | None, ...],
        part: PartOfPack | None,
    ) -> Tensor:
        x_TNP, B_TGS, C_TGS = map(adjacent, (x_TNP, B_TGS, C_TGS))
        ctx.main_grads = main_grads_of(A_log_N, D_N, dt_bias_N)
        ctx.slots = slots
        ctx.part = part
        A_log_N, D_N, dt_bias_N = A_log_N.contiguous(), D_N.contiguous(), dt_bias_N.contiguous()
        plan = plan_of(inputs_of(x_TNP, B_TGS, C_TGS, 1))
        before_1 = None if part is None else part.document_before_1
        factors_4NQL, first_QL = chunk_factors(
            dt_TN, A_log_N, dt_bias_N, seq_idx_1T, plan.length, before_1
        )
        # Backward also uses the state that enters a part, so it must be precise.
        sent = part is not None
        added = added_by_segments(x_TNP, B_TGS, factors_4NQL, plan, precise=sent, last=sent)
        entering_NPS = message = None
        if part is not None:
            message = part.start(message_of_part(added))
            if part.number > 0:
                entering_NPS = state_from_parts(message.wait(), added.states_ZNPS.shape[1:])
        ctx.save_for_backward(
            *(x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N, seq_idx_1T),
            *(before_1, entering_NPS),
        )
        states_ZNPS = states_of_segments(added, entering_NPS)
        y_TNP = outputs(x_TNP, B_TGS, C_TGS, D_N, first_QL, factors_4NQL, states_ZNPS, plan)
        if message is not None:
            message.wait()
        return y_TNP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TNP: Tensor) -> tuple[Tensor | None, ...]:
        x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N, seq_idx_1T, *part_tensors = (
            ctx.saved_tensors
        )
        (before_1, entering_NPS), part = part_tensors, ctx.part
        dy_TNP = adjacent(dy_TNP)
        dx_TNP, ddt_TN, dB_TGS, dC_TGS = map(gradient_like, (x_TNP, dt_TN, B_TGS, C_TGS), ctx.slots)
        plan = plan_of(inputs_of(x_TNP, B_TGS, C_TGS, 1))
        factors_4NQL, first_QL = chunk_factors(
            dt_TN, A_log_N, dt_bias_N, seq_idx_1T, plan.length, before_1
        )
        d_added = added_by_segments(
            *(dy_TNP, C_TGS, factors_4NQL, plan),
            reverse=True,
            precise=True,
            last=part is not None,
        )
        # The states are computed while the message is on its way.
        message = None if part is None else part.start(message_of_part(d_added), back=True)
        forward = (x_TNP, B_TGS, factors_4NQL)
        added = added_by_segments(*forward, plan, precise=True)
        states_QNPS = states_of_chunks(*forward, states_of_segments(added, entering_NPS), plan)
        d_leaving_NPS = None
        if message is not None and part.number < part.parts - 1:
            d_leaving_NPS = state_from_parts(
                message.wait(), added.states_ZNPS.shape[1:], reverse=True
            )
        d_states_ZNPS = states_of_segments(d_added, d_leaving_NPS)
        d_states_QNPS = input_gradients(
            *(dy_TNP, B_TGS, C_TGS, D_N, first_QL, factors_4NQL, d_states_ZNPS, plan),
            out=dx_TNP,
        )
        tensors = ScanTensors(
            *(x_TNP, B_TGS, C_TGS, dy_TNP, seq_idx_1T, factors_4NQL, states_QNPS, d_states_QNPS)
        )
        sums = chunk_gradients(tensors, plan, out=(dB_TGS, dC_TGS))
        steps = chunk_sum_backward(
            factors_4NQL[STEP],
            *(dt_TN, A_log_N, D_N, dt_bias_N, seq_idx_1T, sums),
            out_TN=ddt_TN,
            main_grads=ctx.main_grads,
        )
        if message is not None:
            message.wait()
        gradients = (dx_TNP, steps.dt_TN, steps.A_log_N, dB_TGS, dC_TGS)
        return (*gradients, steps.D_N, steps.dt_bias_N, None, None, None)
