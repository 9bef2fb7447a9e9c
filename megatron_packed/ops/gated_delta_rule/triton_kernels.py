# mypy: disable-error-code="no-untyped-call"
"""Gated delta rule by Triton kernels in three stages, which restart at each document.

Forward runs `triton_decays` and `triton_scores` (per chunk), and `triton_states` (along each walk through
a document). If a document can have several walks, `triton_joints` computes the states between them first.
Forward saves its inputs, the results of the first two kernels and these states. Backward computes the
states of the chunks again, walks back, and computes the remaining gradients per chunk
(`triton_gradients`). The repeated kernel has the same inputs, so backward and recompute get the same bits
as forward.

The shapes of all tensors and grids depend only on the numbers of tokens, heads and documents of
``cu_seqlens``. There is no autotuning, so a warm-up only has to compile the kernels.

Gradients of q, k, v, a and b are written directly into the buffers of ``ops.column_slices`` if there are
any. Gradients of A_log and dt_bias are added to their ``main_grad`` if they have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.config.environment_variables import RIGHT_PTXAS
from megatron_packed.ops.column_slices import GradientSlot, gradient_like, gradient_slot
from megatron_packed.ops.gated_delta_rule.api import GatedDeltaRuleInputs
from megatron_packed.ops.gated_delta_rule.passed_states import (
    StateSizes,
    begins_inside,
    state_from_parts,
)
from megatron_packed.ops.gated_delta_rule.precision import remark as remark
from megatron_packed.ops.gated_delta_rule.tables import (
    DeltaRuleTables,
    build_tables,
    segment_tokens,
)
from megatron_packed.ops.gated_delta_rule.triton_gates import gate_gradients
from megatron_packed.ops.gated_delta_rule.triton_gradients import BackwardTensors, chunk_gradients
from megatron_packed.ops.gated_delta_rule.triton_joints import (
    entering_gradients,
    leaving_states,
    pass_on,
)
from megatron_packed.ops.gated_delta_rule.triton_scores import ChunkScores, chunk_scores
from megatron_packed.ops.gated_delta_rule.triton_states import (
    gradients_of_states,
    outputs,
    states_and_writes,
)
from megatron_packed.ops.kernel_operands import adjacent, main_grads_of
from megatron_packed.ops.parts_of_pack import PartOfPack
from megatron_packed.ops.triton_mode import device_reasons, ptxas_version

_LARGEST_KEY_DIM = 128
_LEAST_KEY_DIM, _LEAST_VALUE_DIM, _MULTIPLE = 40, 24, 8
"""Least head dimensions with an older ptxas, and their divisor.

Triton 3.4 to 3.7 use ptxas 12.8 on Hopper. For some key heads of up to 32 channels it takes a wrong
register for the address of a product in `_key_kernel`. Then gradients are wrong, or the product reads
outside of the shared memory. In random models on an H200 no fault of the kernels of 28 November 2026 was
seen from these sizes on.
"""
_DTYPES = (torch.bfloat16, torch.float32)


def not_supported_reasons(inputs: GatedDeltaRuleInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs; empty if they do."""
    reasons = device_reasons(inputs.device_type)
    if inputs.dtype not in _DTYPES:
        reasons.append(f"the kernels support bfloat16 and float32, not {inputs.dtype}")
    if inputs.key_dim > _LARGEST_KEY_DIM:
        reasons.append(
            f"key_dim ({inputs.key_dim}) is above {_LARGEST_KEY_DIM}, the largest whose state fits in registers"
        )
    if (
        inputs.device_type == "cuda"
        and (
            inputs.key_dim < _LEAST_KEY_DIM
            or inputs.value_dim < _LEAST_VALUE_DIM
            or inputs.key_dim % _MULTIPLE
            or inputs.value_dim % _MULTIPLE
        )
        and ptxas_version() < RIGHT_PTXAS
    ):
        version, right = (".".join(map(str, each)) for each in (ptxas_version(), RIGHT_PTXAS))
        reasons.append(
            f"key_dim ({inputs.key_dim}) and value_dim ({inputs.value_dim}) must be multiples of "
            f"{_MULTIPLE} from {_LEAST_KEY_DIM} and {_LEAST_VALUE_DIM} with ptxas {version}, because "
            f"it compiles some others wrongly; give ptxas {right} by TRITON_PTXAS_PATH"
        )
    return reasons


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
    """Run the op; see ``api.gated_delta_rule``. All results are deterministic in any case.

    The kernels send the messages of a part themselves and ignore ``gather``.
    """
    if tables is None:
        tokens, heads, _ = v_TNV.shape
        segment = segment_tokens(heads)
        tables = build_tables(cu_seqlens, tokens, segment=segment, of_part=part is not None)
    elif tables.of_part != (part is not None):
        raise ValueError(
            f"gated_delta_rule: the tables have of_part={tables.of_part}, and the tokens are "
            f"{'a complete pack' if part is None else 'a part of a pack'}; build the tables with "
            f"of_part={not tables.of_part}."
        )
    inputs = (q_TGK, k_TGK, v_TNV, a_TN, b_TN)
    slots = tuple(gradient_slot(x) for x in inputs)
    inside_1 = None if part is None else begins_inside(seq_idx_1T, part)
    constants = (inside_1, tables, allow_neg_eigval, slots, part)
    o_TNV: Tensor = _DeltaRule.apply(*map(adjacent, inputs), A_log_N, dt_bias_N, *constants)
    return o_TNV


class _DeltaRule(torch.autograd.Function):
    """Gated delta rule; backward recomputes the states.

    If there can be joints, it also saves the states there, and the matrices of the walks before them.
    A part of a pack sends the state that its last document reaches from zeros, and in backward the
    gradient of the state that enters it in the same way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_TNV: Tensor,
        a_TN: Tensor,
        b_TN: Tensor,
        A_log_N: Tensor,
        dt_bias_N: Tensor,
        inside_1: Tensor | None,
        tables: DeltaRuleTables,
        allow_neg_eigval: bool,
        slots: tuple[GradientSlot | None, ...],
        part: PartOfPack | None,
    ) -> Tensor:
        ctx.main_grads = main_grads_of(A_log_N, dt_bias_N)
        ctx.slots = slots
        ctx.part = part
        A_log_N, dt_bias_N = A_log_N.contiguous(), dt_bias_N.contiguous()
        gates = (a_TN, b_TN, A_log_N, dt_bias_N)
        scores = chunk_scores(q_TGK, k_TGK, *gates, tables, allow_neg_eigval=allow_neg_eigval)
        sizes = StateSizes(v_TNV.shape[1], k_TGK.shape[2], v_TNV.shape[2])
        entering_JNVK = maps_JNKK = own_NRK = message = None
        if tables.joints_5J.shape[1]:
            leaving_JNRK = leaving_states(k_TGK, v_TNV, scores, tables, inside_1)
            entering_JNVK, maps_JNKK = leaving_JNRK.split([sizes.value_dim, sizes.key_dim], dim=2)
            at_joints = (entering_JNVK, maps_JNKK, tables, k_TGK.dtype, scores.matrices_2NTC.dtype)
            if part is not None:
                assert inside_1 is not None
                own_NRK = torch.empty_like(leaving_JNRK[0])
                pass_on(*at_joints, inside_1, message_NRK=own_NRK)
                message = part.start(own_NRK.view(1, -1))
                # The first part has nothing to wait for.
                received_kX = message.wait() if part.number > 0 else own_NRK.view(1, -1)[:0]
                entering_JNVK[0] = state_from_parts(received_kX, sizes).masked_fill_(~inside_1, 0)
            pass_on(*at_joints, inside_1)
        of_joints = (inside_1, entering_JNVK, maps_JNKK, own_NRK)
        ctx.save_for_backward(q_TGK, k_TGK, v_TNV, *gates, *of_joints, *scores, *tables)
        o_TNV = outputs(q_TGK, k_TGK, v_TNV, scores, tables, entering_JNVK)
        if message is not None:
            message.wait()
        return o_TNV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_TNV: Tensor) -> tuple[Tensor | None, ...]:
        q_TGK, k_TGK, v_TNV, a_TN, b_TN, A_log_N, dt_bias_N = ctx.saved_tensors[:7]
        gates = (a_TN, b_TN, A_log_N, dt_bias_N)
        inside_1, entering_JNVK, maps_JNKK, own_NRK = ctx.saved_tensors[7:11]
        scores = ChunkScores(*ctx.saved_tensors[11:14])
        tables = DeltaRuleTables(*ctx.saved_tensors[14:])
        do_TNV, part = adjacent(do_TNV), ctx.part
        dq_TGK, dk_TGK, dv_TNV, da_TN, db_TN = map(
            gradient_like, (q_TGK, k_TGK, v_TNV, a_TN, b_TN), ctx.slots
        )
        sizes = StateSizes(v_TNV.shape[1], k_TGK.shape[2], v_TNV.shape[2])
        d_leaving_JNVK = message = None
        if entering_JNVK is not None:
            d_leaving_JNVK = entering_JNVK.new_empty(entering_JNVK.shape)
            walks = (q_TGK, k_TGK, do_TNV, scores, tables, inside_1)
            entering_gradients(*walks, out=d_leaving_JNVK)
            at_joints = (d_leaving_JNVK, maps_JNKK, tables, k_TGK.dtype, scores.matrices_2NTC.dtype)
            if part is not None:
                # The message has the matrix of the forward message, and another state.
                sent_NRK = own_NRK.clone()
                pass_on(*at_joints, inside_1, back=True, message_NRK=sent_NRK)
                message = part.start(sent_NRK.view(1, -1), back=True)
        # The states are computed while the message is on its way.
        states_SNVK, u_TNV = states_and_writes(k_TGK, v_TNV, scores, tables, entering_JNVK)
        if d_leaving_JNVK is not None:
            if message is not None:
                is_last = part.number == part.parts - 1
                received_kX = sent_NRK.view(1, -1)[:0] if is_last else message.wait()
                d_leaving_JNVK[0] = state_from_parts(received_kX, sizes, reverse=True)
            pass_on(*at_joints, inside_1, back=True)
        # Other kernels read the gradient of v, so it must be as exact as their tiles.
        exact_dv_TNV = dv_TNV
        if u_TNV.dtype != dv_TNV.dtype:
            exact_dv_TNV = torch.empty_like(u_TNV)
        d_states_SNVK = gradients_of_states(
            *(q_TGK, k_TGK, do_TNV, scores, tables, d_leaving_JNVK),
            out=exact_dv_TNV,
            of_part=part is not None,
        )
        if exact_dv_TNV is not dv_TNV:
            dv_TNV.copy_(exact_dv_TNV)
        d_gates = chunk_gradients(
            q_TGK,
            k_TGK,
            v_TNV,
            do_TNV,
            scores,
            BackwardTensors(states_SNVK, d_states_SNVK, u_TNV, exact_dv_TNV),
            tables,
            out=(dq_TGK, dk_TGK),
            in_parts=part is not None,
        )
        d_parameters = gate_gradients(
            d_gates, *gates, out=(da_TN, db_TN), main_grads=ctx.main_grads
        )
        if message is not None:
            message.wait()
        d_inputs = (dq_TGK, dk_TGK, dv_TNV, da_TN, db_TN)
        return (*d_inputs, *d_parameters, *[None] * 5)
