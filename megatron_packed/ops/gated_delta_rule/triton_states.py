# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the second stage: the state from chunk to chunk, forward and backward.

A program computes the chunks of a walk one after another, for one value head and one block of value
channels. It holds the transposed state, (V, K), in registers in fp32. In this orientation each
product's left operand is a value in registers or a loaded tile, and its right operand is a loaded
tile. The kernels never transpose a computed tile: Triton 3.4 to 3.7.0 miscompile products with such an
operand on Hopper.

A walk that begins at a joint starts from the state there, and its gradient from that of the state at the
joint after it (`triton_joints`). Without joints the compiled code has no such steps.

The states are stored by position. A chunk that a state enters starts at least 64 tokens after each
earlier such chunk. So ``start // 64`` is a different slot for each, and ``T / 64`` slots suffice for any
number of documents.

Letters: T tokens, N value heads, K key head dimension, V value head dimension, S slots of states, J joints.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.gated_delta_rule.triton_scores import ChunkScores
from megatron_packed.ops.gated_delta_rule.triton_steps import (
    add_rows,
    token_writes,
    value_gradients,
)
from megatron_packed.ops.gated_delta_rule.triton_tiles import tiles_of
from megatron_packed.ops.triton_loads import load, mask_of, tile_of

_MOST_PROGRAMS = 1024
"""Programs of a launch, which share the walks; each head and block of channels has at least 16."""


def outputs(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    scores: ChunkScores,
    tables: DeltaRuleTables,
    entering_JNVK: Tensor | None,
) -> Tensor:
    """Return o of each token, ``(T, N, V)`` contiguous.

    Args:
        entering_JNVK: transposed state at each joint where a walk begins; None without joints.
    """
    o_TNV = torch.empty(v_TNV.shape, dtype=v_TNV.dtype, device=v_TNV.device)
    strided, others = (q_TGK, k_TGK, v_TNV), (o_TNV, o_TNV)
    constants = {"OUTPUTS": True}
    _launch(_forward_kernel, "outputs", strided, scores, tables, others, entering_JNVK, **constants)
    return o_TNV


def states_and_writes(
    k_TGK: Tensor,
    v_TNV: Tensor,
    scores: ChunkScores,
    tables: DeltaRuleTables,
    entering_JNVK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the state at the start of each chunk, and what each token adds along its key.

    Args:
        entering_JNVK: as for `outputs`.
    Returns:
        ``(S, N, V, K)``, the transposed state at the start of the chunk of each slot; unwritten for
        slots without a chunk. ``(T, N, V)``, the vector u_t of ``S <- S + k_t u_t^T``.
    """
    states_SNVK = new_states(k_TGK, v_TNV, scores.matrices_2NTC.dtype)
    u_TNV = torch.empty(v_TNV.shape, dtype=states_SNVK.dtype, device=v_TNV.device)
    strided, others = (k_TGK, k_TGK, v_TNV), (u_TNV, states_SNVK)
    constants = {"OUTPUTS": False}
    _launch(_forward_kernel, "states", strided, scores, tables, others, entering_JNVK, **constants)
    return states_SNVK, u_TNV


def gradients_of_states(
    q_TGK: Tensor,
    k_TGK: Tensor,
    do_TNV: Tensor,
    scores: ChunkScores,
    tables: DeltaRuleTables,
    d_leaving_JNVK: Tensor | None,
    *,
    out: Tensor,
    of_part: bool,
) -> Tensor:
    """Write the gradient of v to ``out``, and return the gradients of the states.

    Args:
        d_leaving_JNVK: gradient of the transposed state at each joint where a walk ends; None without
            joints.
        out: ``(T, N, V)`` with stride 1 in the last dimension.
        of_part: the tokens are a part of a pack.
    Returns:
        ``(S, N, V, K)``, the gradient of the transposed state at the start of the chunk of each slot;
        unwritten for slots without a chunk. A part has one more slot, for the state after its last
        token.
    """
    dtype = scores.matrices_2NTC.dtype
    d_states_SNVK = new_states(k_TGK, do_TNV, dtype, more=1 if of_part else 0)
    strided, others = (q_TGK, k_TGK, do_TNV, out), (d_states_SNVK,)
    constants = {"OF_PART": of_part}
    _launch(_backward_kernel, "back", strided, scores, tables, others, d_leaving_JNVK, **constants)
    return d_states_SNVK


def new_states(k_TGK: Tensor, v_TNV: Tensor, dtype: torch.dtype, *, more: int = 0) -> Tensor:
    """Return uninitialised memory for the states of all slots, and of ``more`` after them."""
    slots = triton.cdiv(v_TNV.shape[0], CHUNK) + more
    shape = (slots, v_TNV.shape[1], v_TNV.shape[2], k_TGK.shape[2])
    return torch.empty(shape, dtype=dtype, device=v_TNV.device)


def _launch(
    kernel: Any,
    name: str,
    strided: tuple[Tensor, ...],
    scores: ChunkScores,
    tables: DeltaRuleTables,
    others: tuple[Tensor, ...],
    at_joints_JNVK: Tensor | None,
    **constants: bool,
) -> None:
    """Launch a kernel over all walks, value heads and blocks of value channels.

    Args:
        strided: (T, heads, channels) of q, k, a tensor of the value heads, and others; the kernel
            gets their strides, too.
        others: contiguous results.
        at_joints_JNVK: states or gradients that the walks start from; contiguous in the last two dimensions.
    """
    (_, key_heads, key_dim), (tokens, heads, value_dim) = strided[1].shape, strided[2].shape
    tiles = tiles_of(name, strided[1].dtype, scores.matrices_2NTC.dtype, value_dim)
    blocks = heads * triton.cdiv(value_dim, tiles.values)
    walks = tables.walks_4W.shape[1]
    kernel[(blocks, _walk_programs(blocks, walks))](
        *strided,
        scores.gates_6NT,
        scores.matrices_2NTC,
        tables.walks_4W,
        tables.counts_2,
        *others,
        at_joints_JNVK,
        tokens,
        walks,
        *(stride for x in strided for stride in x.stride()[:2]),
        JOINT_STRIDE=0 if at_joints_JNVK is None else at_joints_JNVK.stride(1),
        HEADS_PER_KEY=heads // key_heads,
        CHUNK=CHUNK,
        **tiles.constants(heads, key_dim, value_dim),
        **constants,
    )


def _walk_programs(blocks: int, walks: int) -> int:
    """Return the number of programs per head and block of channels."""
    return min(walks, max(-(-_MOST_PROGRAMS // blocks), 16))


@triton.jit
def walk_at(walks_ptr, walks, i):
    """Return a walk's first token and length, and the joints at its start and its end or -1."""
    first = tl.load(walks_ptr + i).to(tl.int64)
    length = (tl.load(walks_ptr + walks + i) - first).to(tl.int32)
    joint_at_start = tl.load(walks_ptr + 2 * walks + i)
    joint_at_end = tl.load(walks_ptr + 3 * walks + i)
    return first, length, joint_at_start, joint_at_end


@triton.jit(do_not_specialize=["tokens", "walks"])
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gates_ptr,
    scores_ptr,
    walks_ptr,
    counts_ptr,
    out_ptr,
    states_ptr,
    entering_ptr,
    tokens,
    walks,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    JOINT_STRIDE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk through walks i, i + programs, ... of the order in program (n * blocks + block, i).

    With OUTPUTS the kernel stores o, else the states at the starts of chunks and u.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    key_head = head // HEADS_PER_KEY
    dtype = scores_ptr.dtype.element_ty
    gates = HEADS * tokens.to(tl.int64)
    value = (tl.program_id(0) % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    state_tile = tile_of(value, K, channel)
    square = tile_of(token, CHUNK, token)
    k_tile = tile_of(token, k_stride, channel)
    q_tile = tile_of(token, q_stride, channel)
    v_tile = token[None, :] * v_stride + value[:, None]
    out_tile = token[None, :] * (HEADS * V) + value[:, None]
    for i in tl.range(tl.program_id(1), tl.load(counts_ptr), tl.num_programs(1), num_stages=1):
        first, length, joint_at_start, _ = walk_at(walks_ptr, walks, i)
        state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
        if entering_ptr is not None:  # noqa: SIM102
            if joint_at_start >= 0:
                joint = joint_at_start.to(tl.int64) * HEADS + head
                mask = mask_of(value < V, channel < K)
                state = load(entering_ptr + joint * JOINT_STRIDE + state_tile, mask)
                if not OUTPUTS:
                    slot = (first // CHUNK) * HEADS + head
                    tl.store(states_ptr + slot * (V * K) + state_tile, state, mask=mask)
        for chunk in tl.range((length + CHUNK - 1) // CHUNK, num_stages=STAGES):
            # Each tile has a scalar base and 32-bit offsets, which take few registers.
            start = first + chunk * CHUNK
            row = head.to(tl.int64) * tokens + start
            real = token < length - chunk * CHUNK
            key_mask = mask_of(real, channel < K)
            value_mask = mask_of(value < V, real)
            k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
            v_base = v_ptr + (start * v_stride + head * v_head_stride)
            k = load(k_base + k_tile, key_mask).to(dtype)
            v = load(v_base + v_tile, value_mask).to(dtype)
            solve = load(scores_ptr + (gates + row) * CHUNK + square, real[:, None])
            # The sum at the last token is that of the chunk. Only a whole chunk passes its state on.
            total = load(gates_ptr + row + CHUNK - 1, chunk * CHUNK + CHUNK <= length)

            low = state.to(dtype)
            if not OUTPUTS:
                slot = (start // CHUNK) * HEADS + head
                mask = mask_of(value < tl.where(chunk > 0, V, 0), channel < K)
                tl.store(states_ptr + slot * (V * K) + state_tile, low, mask=mask)
            read = tl.dot(low, tl.trans(k), input_precision=PRECISION)
            of_read_k = load(gates_ptr + 3 * gates + row + token, real)
            u = token_writes(read, v, solve, of_read_k, PRECISION)
            out = out_ptr + (start * HEADS + head) * V + out_tile
            if OUTPUTS:
                q_base = q_ptr + (start * q_stride + key_head * q_head_stride)
                q = load(q_base + q_tile, key_mask).to(dtype)
                scores = load(scores_ptr + row * CHUNK + square, real[:, None])
                of_q = load(gates_ptr + 2 * gates + row + token, real)
                o = tl.dot(low, tl.trans(q), input_precision=PRECISION) * of_q[None, :]
                o = tl.dot(u.to(dtype), tl.trans(scores), o, input_precision=PRECISION)
                tl.store(out, o, mask=value_mask)
            else:
                tl.store(out, u, mask=value_mask)
            of_written_k = load(gates_ptr + 4 * gates + row + token, real)
            state = add_rows(state * tl.exp(total), u, of_written_k, k, PRECISION)


# Strides are constants, so that the rows of a tile differ by constants and share one address.
@triton.jit(do_not_specialize=["tokens", "walks"])
def _backward_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    dv_ptr,
    gates_ptr,
    scores_ptr,
    walks_ptr,
    counts_ptr,
    d_states_ptr,
    d_leaving_ptr,
    tokens,
    walks,
    q_stride: tl.constexpr,
    q_head_stride: tl.constexpr,
    k_stride: tl.constexpr,
    k_head_stride: tl.constexpr,
    do_stride: tl.constexpr,
    do_head_stride: tl.constexpr,
    dv_stride: tl.constexpr,
    dv_head_stride: tl.constexpr,
    JOINT_STRIDE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    OF_PART: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk backward through the walks of `_forward_kernel`, from the last chunk to the first."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    key_head = head // HEADS_PER_KEY
    dtype = scores_ptr.dtype.element_ty
    gates = HEADS * tokens.to(tl.int64)
    value = (tl.program_id(0) % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    state_tile = tile_of(value, K, channel)
    square = tile_of(token, CHUNK, token)
    k_tile = tile_of(token, k_stride, channel)
    q_tile = tile_of(token, q_stride, channel)
    do_tile = token[None, :] * do_stride + value[:, None]
    dv_tile = token[None, :] * dv_stride + value[:, None]
    for i in tl.range(tl.program_id(1), tl.load(counts_ptr), tl.num_programs(1), num_stages=1):
        first, length, _, joint_at_end = walk_at(walks_ptr, walks, i)
        d_state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
        chunks = (length + CHUNK - 1) // CHUNK
        if d_leaving_ptr is not None:  # noqa: SIM102
            if joint_at_end >= 0:
                joint = joint_at_end.to(tl.int64) * HEADS + head
                mask = mask_of(value < V, channel < K)
                d_state = load(d_leaving_ptr + joint * JOINT_STRIDE + state_tile, mask)
                slot = (first // CHUNK + chunks) * HEADS + head
                tl.store(d_states_ptr + slot * (V * K) + state_tile, d_state, mask=mask)
        for done in tl.range(chunks, num_stages=STAGES):
            chunk = chunks - 1 - done
            start = first + chunk * CHUNK
            row = head.to(tl.int64) * tokens + start
            real = token < length - chunk * CHUNK
            key_mask = mask_of(real, channel < K)
            value_mask = mask_of(value < V, real)
            q_base = q_ptr + (start * q_stride + key_head * q_head_stride)
            k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
            do_base = do_ptr + (start * do_stride + head * do_head_stride)
            q = load(q_base + q_tile, key_mask).to(dtype)
            k = load(k_base + k_tile, key_mask).to(dtype)
            do = load(do_base + do_tile, value_mask).to(dtype)
            scores = load(scores_ptr + row * CHUNK + square, real[:, None])
            solve = load(scores_ptr + (gates + row) * CHUNK + square, real[:, None])
            # The sum at the last token is that of the chunk. Only a whole chunk passes its state on.
            total = load(gates_ptr + row + CHUNK - 1, chunk * CHUNK + CHUNK <= length)

            # The gradient at the end of this chunk belongs to the start of the next chunk.
            low = d_state.to(dtype)
            slot = (start // CHUNK + 1) * HEADS + head
            if OF_PART:
                # The last chunk of a part passes its state on, also if it is not whole.
                whole = tl.minimum(length - chunk * CHUNK, CHUNK)
                total = tl.load(gates_ptr + row + whole - 1)
            mask = mask_of(value < tl.where(done > 0, V, 0), channel < K)
            tl.store(d_states_ptr + slot * (V * K) + state_tile, low, mask=mask)
            du = tl.dot(low, tl.trans(k), input_precision=PRECISION)
            of_written_k = load(gates_ptr + 4 * gates + row + token, real)
            dv = value_gradients(du, do, scores, solve, of_written_k, PRECISION)
            dv_base = dv_ptr + (start * dv_stride + head * dv_head_stride)
            tl.store(dv_base + dv_tile, dv, mask=value_mask)
            of_read_k = load(gates_ptr + 3 * gates + row + token, real)
            d_state = add_rows(d_state * tl.exp(total), dv, -of_read_k, k, PRECISION)
            of_q = load(gates_ptr + 2 * gates + row + token, real)
            d_state = add_rows(d_state, do, of_q, q, PRECISION)
