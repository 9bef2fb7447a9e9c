# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for the joints between walks: the states there, and their gradients.

The walks through a long document run at the same time, because the rule is affine in the state that
enters a walk: the state S becomes A S + B (`passed_states`). A first kernel walks as those of
`triton_states` do, and stores B and A of each walk that ends at a joint. Rows of B start from zeros.
Rows of A start from ones on the diagonal and have values of zero. A second kernel passes the states
from joint to joint, one product (V, K) x (K, K) each. Backward has a kernel for the gradient that each
walk passes to the joint at its start, and passes them on from the last joint to the first.

The two ends of a part of a pack are joint 0. There, states come from other processes and go to them. The
second kernel makes the message of the part, and later passes on what the part received.

Letters: T tokens, N value heads, K key head dimension, V value head dimension, J joints, R = V + K rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.gated_delta_rule.triton_scores import ChunkScores
from megatron_packed.ops.gated_delta_rule.triton_steps import (
    add_rows,
    chunk_factors,
    token_writes,
    value_gradients,
)
from megatron_packed.ops.gated_delta_rule.triton_tiles import tiles_of
from megatron_packed.ops.triton_loads import load, mask_of, tile_of


def leaving_states(
    k_TGK: Tensor,
    v_TNV: Tensor,
    scores: ChunkScores,
    tables: DeltaRuleTables,
    inside_1: Tensor | None = None,
) -> Tensor:
    """Return what the walk before each joint makes of the state that enters it, ``(J, N, V + K, K)`` fp32.

    V rows of the transposed state B, then K rows of the transposed matrix A. A is zero if no state enters
    the walk. Unwritten for joints that do not exist.

    Args:
        inside_1: for a part of a pack the result of `passed_states.begins_inside`.
    """
    (tokens, heads, value_dim), (_, key_heads, key_dim) = v_TNV.shape, k_TGK.shape
    tiles = tiles_of("states", k_TGK.dtype, scores.matrices_2NTC.dtype, value_dim)
    blocks = heads * sum(triton.cdiv(rows, tiles.values) for rows in (value_dim, key_dim))
    joints = tables.joints_5J.shape[1]
    shape = (joints, heads, value_dim + key_dim, key_dim)
    leaving_JNRK = torch.empty(shape, dtype=torch.float32, device=v_TNV.device)
    _leaving_kernel[(blocks, joints)](
        k_TGK,
        v_TNV,
        scores.gates_6NT,
        scores.matrices_2NTC,
        tables.joints_5J,
        tables.counts_2,
        inside_1,
        leaving_JNRK,
        tokens,
        joints,
        *(stride for x in (k_TGK, v_TNV) for stride in x.stride()[:2]),
        HEADS_PER_KEY=heads // key_heads,
        CHUNK=CHUNK,
        **tiles.constants(heads, key_dim, value_dim),
    )
    return leaving_JNRK


def entering_gradients(
    q_TGK: Tensor,
    k_TGK: Tensor,
    do_TNV: Tensor,
    scores: ChunkScores,
    tables: DeltaRuleTables,
    inside_1: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    """Compute the gradient of the state at each joint from the outputs of the walk after it.

    Args:
        inside_1: as for `leaving_states`.
        out: ``(J, N, V, K)`` fp32, contiguous in the last two dimensions.
    """
    (tokens, heads, value_dim), (_, key_heads, key_dim) = do_TNV.shape, k_TGK.shape
    tiles = tiles_of("back", k_TGK.dtype, scores.matrices_2NTC.dtype, value_dim)
    blocks = heads * triton.cdiv(value_dim, tiles.values)
    joints = tables.joints_5J.shape[1]
    _entering_kernel[(blocks, joints)](
        q_TGK,
        k_TGK,
        do_TNV,
        scores.gates_6NT,
        scores.matrices_2NTC,
        tables.joints_5J,
        tables.counts_2,
        inside_1,
        out,
        tokens,
        joints,
        *(stride for x in (q_TGK, k_TGK, do_TNV) for stride in x.stride()[:2]),
        JOINT_STRIDE=out.stride(1),
        HEADS_PER_KEY=heads // key_heads,
        CHUNK=CHUNK,
        **tiles.constants(heads, key_dim, value_dim),
    )


def pass_on(
    states_JNVK: Tensor,
    maps_JNKK: Tensor,
    tables: DeltaRuleTables,
    dtype: torch.dtype,
    of_tiles: torch.dtype,
    inside_1: Tensor | None = None,
    *,
    back: bool = False,
    message_NRK: Tensor | None = None,
) -> None:
    """Make the states at the joints, from those that each walk reaches from zeros, in place.

    With ``back``, make the gradients of the states from those of `entering_gradients`.

    Args:
        states_JNVK: transposed states or gradients, contiguous in the last two dimensions. Joint 0 of a
            part has what other parts pass on.
        maps_JNKK: transposed matrices of `leaving_states`, contiguous in the last two dimensions.
        dtype: dtype of the inputs.
        of_tiles: dtype of the tiles; both determine the precision of the products.
        inside_1: as for `leaving_states`.
        message_NRK: ``(N, V + K, K)`` fp32. If given, the states stay, and this gets the message of
            the part: what it makes of zeros, and without ``back`` its matrix in the last K rows.
    """
    joints, heads, value_dim, key_dim = states_JNVK.shape
    borders = 0 if inside_1 is None else 1
    if message_NRK is None and joints == borders:
        return
    tiles = tiles_of("joints", dtype, of_tiles, value_dim)
    blocks = triton.cdiv(value_dim, tiles.values)
    if message_NRK is not None and not back:
        blocks += triton.cdiv(key_dim, tiles.values)
    _pass_on_kernel[(heads, blocks)](
        states_JNVK,
        maps_JNKK,
        message_NRK,
        tables.joints_5J,
        tables.counts_2,
        inside_1,
        joints,
        JOINT_STRIDE=states_JNVK.stride(1),
        MAP_STRIDE=maps_JNKK.stride(1),
        BORDERS=borders,
        BACK=back,
        **tiles.constants(heads, key_dim, value_dim),
    )


@triton.jit(do_not_specialize=["tokens", "joints"])
def _leaving_kernel(
    k_ptr,
    v_ptr,
    gates_ptr,
    scores_ptr,
    joints_ptr,
    counts_ptr,
    inside_ptr,
    leaving_ptr,
    tokens,
    joints,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk to the joints with a block of rows of values, or of the matrix."""
    VALUE_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = VALUE_BLOCKS + (K + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    key_head = head // HEADS_PER_KEY
    dtype = scores_ptr.dtype.element_ty
    gates = HEADS * tokens.to(tl.int64)
    of_values = block < VALUE_BLOCKS
    value = tl.where(of_values, block, block - VALUE_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    values = tl.where(of_values, V, 0)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    square = tile_of(token, CHUNK, token)
    k_tile = tile_of(token, k_stride, channel)
    v_tile = token[None, :] * v_stride + value[:, None]
    joint = tl.program_id(1)
    if joint < tl.load(counts_ptr + 1):
        first = tl.load(joints_ptr + joint).to(tl.int64)
        length = (tl.load(joints_ptr + joints + joint) - first).to(tl.int32)
        entered = tl.load(joints_ptr + 4 * joints + joint) != 0
        if inside_ptr is not None:
            entered = entered & ((first > 0) | (tl.load(inside_ptr) != 0))
        # Without a state that enters this walk the matrix stays zero, and no chunk is computed.
        length = tl.where(of_values | entered, length, 0)
        ones = tl.where(entered & (block >= VALUE_BLOCKS), K, 0)
        state = tl.where((value[:, None] == channel[None, :]) & (value < ones)[:, None], 1.0, 0.0)
        for chunk in tl.range((length + CHUNK - 1) // CHUNK, num_stages=STAGES):
            start = first + chunk * CHUNK
            row = head.to(tl.int64) * tokens + start
            real = token < length - chunk * CHUNK
            key_mask = mask_of(real, channel < K)
            k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
            v_base = v_ptr + (start * v_stride + head * v_head_stride)
            k = load(k_base + k_tile, key_mask).to(dtype)
            v = load(v_base + v_tile, mask_of(value < values, real)).to(dtype)
            solve = load(scores_ptr + (gates + row) * CHUNK + square, real[:, None])
            _, of_read_k, of_written_k = chunk_factors(gates_ptr + row, gates, token, real)
            whole = tl.minimum(length - chunk * CHUNK, CHUNK)
            total = tl.load(gates_ptr + row + whole - 1)
            read = tl.dot(state.to(dtype), tl.trans(k), input_precision=PRECISION)
            u = token_writes(read, v, solve, of_read_k, PRECISION)
            state = add_rows(state * tl.exp(total), u, of_written_k, k, PRECISION)
        out = leaving_ptr + (joint.to(tl.int64) * HEADS + head) * ((V + K) * K)
        out += tl.where(of_values, 0, V * K)
        stored = tl.where(of_values, V, K)
        tl.store(out + tile_of(value, K, channel), state, mask=mask_of(value < stored, channel < K))


@triton.jit(do_not_specialize=["tokens", "joints"])
def _entering_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    gates_ptr,
    scores_ptr,
    joints_ptr,
    counts_ptr,
    inside_ptr,
    entering_ptr,
    tokens,
    joints,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    do_stride,
    do_head_stride,
    JOINT_STRIDE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk backward to the joints, from a gradient of zeros; store zeros if no state enters a part."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    key_head = head // HEADS_PER_KEY
    dtype = scores_ptr.dtype.element_ty
    gates = HEADS * tokens.to(tl.int64)
    value = (tl.program_id(0) % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    square = tile_of(token, CHUNK, token)
    k_tile = tile_of(token, k_stride, channel)
    q_tile = tile_of(token, q_stride, channel)
    do_tile = token[None, :] * do_stride + value[:, None]
    joint = tl.program_id(1)
    if joint < tl.load(counts_ptr + 1):
        first = tl.load(joints_ptr + 2 * joints + joint).to(tl.int64)
        length = (tl.load(joints_ptr + 3 * joints + joint) - first).to(tl.int32)
        if inside_ptr is not None:
            length = tl.where((first > 0) | (tl.load(inside_ptr) != 0), length, 0)
        d_state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
        chunks = (length + CHUNK - 1) // CHUNK
        for done in tl.range(chunks, num_stages=STAGES):
            chunk = chunks - 1 - done
            start = first + chunk * CHUNK
            row = head.to(tl.int64) * tokens + start
            real = token < length - chunk * CHUNK
            key_mask = mask_of(real, channel < K)
            q_base = q_ptr + (start * q_stride + key_head * q_head_stride)
            k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
            do_base = do_ptr + (start * do_stride + head * do_head_stride)
            q = load(q_base + q_tile, key_mask).to(dtype)
            k = load(k_base + k_tile, key_mask).to(dtype)
            do = load(do_base + do_tile, mask_of(value < V, real)).to(dtype)
            scores = load(scores_ptr + row * CHUNK + square, real[:, None])
            solve = load(scores_ptr + (gates + row) * CHUNK + square, real[:, None])
            of_q, of_read_k, of_written_k = chunk_factors(gates_ptr + row, gates, token, real)
            # Before the last chunk the gradient is zero, so only whole chunks need their sum.
            total = load(gates_ptr + row + CHUNK - 1, chunk * CHUNK + CHUNK <= length)
            du = tl.dot(d_state.to(dtype), tl.trans(k), input_precision=PRECISION)
            dv = value_gradients(du, do, scores, solve, of_written_k, PRECISION)
            d_state = add_rows(d_state * tl.exp(total), dv, -of_read_k, k, PRECISION)
            d_state = add_rows(d_state, do, of_q, q, PRECISION)
        out = entering_ptr + (joint.to(tl.int64) * HEADS + head) * JOINT_STRIDE
        mask = mask_of(value < V, channel < K)
        tl.store(out + tile_of(value, K, channel), d_state, mask=mask)


@triton.jit(do_not_specialize=["joints"])
def _pass_on_kernel(
    states_ptr,
    maps_ptr,
    message_ptr,
    joints_ptr,
    counts_ptr,
    inside_ptr,
    joints,
    JOINT_STRIDE: tl.constexpr,
    MAP_STRIDE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    BORDERS: tl.constexpr,
    BACK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass a block of rows of a head from joint to joint; a message also passes the border of the part.

    The border is joint 0, and other joints are in the order of the pack. The walk before a joint begins at
    the joint before it, or at the border if a state enters there, or a document begins.
    """
    VALUE_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0)
    block = tl.program_id(1)
    of_values = block < VALUE_BLOCKS
    value = tl.where(of_values, block, block - VALUE_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    state_tile = tile_of(value, K, channel)
    state_mask = mask_of(value < tl.where(of_values, V, 0), channel < K)
    map_tile = tile_of(channel, K, channel)
    inner = tl.load(counts_ptr + 1) - BORDERS
    steps = inner
    if message_ptr is not None:
        # Values start from zeros, and the matrix from ones on the diagonal.
        steps += 1
        ones = tl.where(of_values, 0, K)
        state = tl.where((value[:, None] == channel[None, :]) & (value < ones)[:, None], 1.0, 0.0)
    elif BORDERS:
        state = load(states_ptr + head * JOINT_STRIDE + state_tile, state_mask)
    else:
        state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
    connected = True
    for step in tl.range(steps, num_stages=STAGES):
        # The walk between the joint of the step before and this one has its matrix at the later one.
        if BACK:
            joint = tl.where(step < inner, BORDERS + inner - 1 - step, 0)
            later = tl.where(step > 0, BORDERS + inner - step, 0)
            continues = load(joints_ptr + 4 * joints + later, BORDERS > 0 or step > 0) != 0
        else:
            joint = tl.where(step < inner, BORDERS + step, 0)
            later = joint
            continues = tl.load(joints_ptr + 4 * joints + later) != 0
        if inside_ptr is not None:
            first = tl.load(joints_ptr + later)
            continues = continues & ((first > 0) | (tl.load(inside_ptr) != 0))
        # At the first joint of a document the state before it is not used, even if it is not finite.
        connected = connected & continues
        state = tl.where(continues, state, 0.0)
        map_mask = mask_of(channel < tl.where(continues, K, 0), channel < K)
        map_ = load(
            maps_ptr + (later.to(tl.int64) * HEADS + head) * MAP_STRIDE + map_tile, map_mask
        )
        if BACK:
            map_ = tl.trans(map_)
        rows = states_ptr + (joint.to(tl.int64) * HEADS + head) * JOINT_STRIDE
        state = tl.dot(state, map_, load(rows + state_tile, state_mask), input_precision=PRECISION)
        if message_ptr is None:
            tl.store(rows + state_tile, state, mask=state_mask)
    if message_ptr is not None:
        # The product of zeros and matrices of another document need not be zero.
        state = tl.where(connected | of_values, state, 0.0)
        out = message_ptr + head * ((V + K) * K) + tl.where(of_values, 0, V * K)
        mask = mask_of(value < tl.where(of_values, V, K), channel < K)
        tl.store(out + state_tile, state, mask=mask)
