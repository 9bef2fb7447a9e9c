# mypy: disable-error-code="no-untyped-call"
"""Launches of mamba-ssm's backward kernels, without separate kernels that clear or reduce workspaces.

mamba-ssm's own launchers clear the workspace of each kernel before the launch and reduce it
afterwards, each with a torch kernel. With tensor parallelism the kernels of the scan take only
microseconds, and these torch kernels would take as long. In this module each kernel stores partial
sums instead of adding them with atomics, and ``chunk_sum`` reads the partial sums directly. Memory
that no kernel has written is never read.

So the gradients have the same bits in each run with the same tuned tiles
(``TRITON_CACHE_AUTOTUNING``), with or without ``MAMBA_DETERMINISTIC``.

Additional letters: X partial sums; a leading 1 is the batch dimension that the kernels require. All
sums are fp32.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from mamba_ssm.ops.triton.ssd_chunk_scan import (
    _chunk_scan_bwd_dc_kernel,
    _chunk_scan_bwd_dcb_kernel,
    _chunk_scan_bwd_ddAcs_stable_kernel,
)
from mamba_ssm.ops.triton.ssd_chunk_state import _chunk_state_bwd_db_kernel
from mamba_ssm.ops.triton.ssd_combined import TRITON_22, _chunk_scan_chunk_state_bwd_dx_kernel
from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_bwd_kernel
from torch import Tensor

from megatron_packed.ops.ssd.tuned_launch import block_of, launch, most_tiles, no_strides, strides

X = ("batch", "seqlen", "head", "hdim")
NQL = ("batch", "head", "chunk", "csize")
STATES = ("batch", "chunk", "head", "hdim", "dstate")
SEQ_IDX = ("batch", "seqlen")


class Scan(NamedTuple):
    """Tensors that several backward kernels read."""

    x: Tensor
    """``(1, T, N, P)``; x, b and c are views with stride 1 in the last dimension."""
    b: Tensor
    """``(1, T, G, S)``."""
    c: Tensor
    """``(1, T, G, S)``."""
    step: Tensor
    """``(1, N, Q, L)`` step sizes."""
    total: Tensor
    """``(1, N, Q, L)`` restarting sums of dt A."""
    seq_idx: Tensor
    """``(1, T)`` int32."""
    dy: Tensor
    """``(1, T, N, P)`` contiguous."""

    @property
    def sizes(self) -> dict[str, int]:
        """Chunk, head and state sizes, by the names of kernel arguments."""
        return {
            "chunk_size": self.step.shape[3],
            "hdim": self.x.shape[3],
            "dstate": self.b.shape[3],
        }

    @property
    def size(self) -> Hashable:
        """Key of the tuning: sizes, dtype and device."""
        return (*self.sizes.values(), self.x.dtype, self.x.device)

    def arguments(self) -> dict[str, Any]:
        """Return x, dy, step sizes and sums, their strides and sizes, by the names of kernel arguments."""
        return {
            "x_ptr": self.x,
            "dout_ptr": self.dy,
            "dt_ptr": self.step,
            "dA_cumsum_ptr": self.total,
            "batch": 1,
            "seqlen": self.x.shape[1],
            **strides("x", self.x, *X),
            **strides("dout", self.dy, *X),
            **strides("dt", self.step, *NQL),
            **strides("dA_cs", self.total, *NQL),
        }


def state_passing(scan: Scan, states: Tensor, d_entering: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the adjoint of the passing of states from chunk to chunk.

    Args:
        states: ``(1, Q, N, P, S)`` fp32, entering each chunk.
        d_entering: gradient of ``states`` from the outputs of the same chunk only.
    Returns:
        three tensors. The first two are the gradient of the states that each chunk adds, and the
        entering states, both in x's dtype and the shape of ``states``. The third has partial sums
        ``(N, Q, X)`` of the gradient of each chunk's last sum.
    """
    flat, d_flat = states.flatten(-2), d_entering.flatten(-2)
    (_, chunks, heads, dim), last = flat.shape, scan.total[..., -1]
    d_states, states_low = (
        torch.empty(flat.shape, dtype=scan.x.dtype, device=flat.device) for _ in range(2)
    )
    d_last = flat.new_empty(
        1, heads, chunks, most_tiles(_state_passing_bwd_kernel, dim, "BLOCK_SIZE")
    )
    blocks = launch(
        _state_passing_bwd_kernel,
        lambda meta: (triton.cdiv(dim, meta["BLOCK_SIZE"]), 1, heads),
        scan.size,
        dout_ptr=d_flat,
        out_ptr=flat,
        dA_cs_ptr=last,
        dfinal_states_ptr=None,
        seq_idx_ptr=scan.seq_idx,
        dstates_ptr=d_states,
        ddA_cs_ptr=d_last,
        dinitstates_ptr=None,
        states_converted_ptr=states_low,
        dim=dim,
        nchunks=chunks,
        seqlen=scan.x.shape[1],
        chunk_size=scan.step.shape[3],
        **strides("dout", d_flat, "batch", "chunk", "head", "dim"),
        **strides("out", flat, "batch", "chunk", "head", "dim"),
        **strides("dA_cs", last, "batch", "head", "chunk"),
        **no_strides("dfinal_states", "batch", "head", "dim"),
        **strides("seq_idx", scan.seq_idx, *SEQ_IDX),
        **strides("dstates", d_states, "batch", "chunk", "head", "dim"),
        **strides("ddA_cs", d_last[..., 0], "batch", "head", "chunk"),
        **no_strides("dinitstates", "batch", "head", "dim"),
        CONVERT_STATES=True,
        HAS_DFINAL_STATES=False,
        HAS_DINITSTATES=False,
        HAS_SEQ_IDX=True,
    )
    tiles = triton.cdiv(dim, blocks["BLOCK_SIZE"])
    return d_states.view(states.shape), states_low.view(states.shape), d_last[0, ..., :tiles]


def inputs(
    scan: Scan, scores: Tensor, d_states: Tensor, D_N: Tensor, dx: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of x into ``dx``.

    Returns:
        partial sums ``(X, N, Q, L)`` of the gradient of the step sizes through dt x only, and
        partial sums ``(X, X, Q, N)`` of the gradient of D.
    """
    (heads, head_dim), (chunks, length) = scan.x.shape[2:], scan.step.shape[2:]
    kernel = _chunk_scan_chunk_state_bwd_dx_kernel
    most = most_tiles(kernel, head_dim)
    d_step = scan.step.new_empty(most, *scan.step.shape)
    d_D = scan.step.new_empty(most_tiles(kernel, length, "BLOCK_SIZE_M"), most, 1, chunks, heads)
    blocks = launch(
        kernel,
        lambda meta: (
            triton.cdiv(length, meta["BLOCK_SIZE_M"]) * triton.cdiv(head_dim, meta["BLOCK_SIZE_N"]),
            chunks,
            heads,
        ),
        scan.size,
        cb_ptr=scores,
        seq_idx_ptr=scan.seq_idx,
        D_ptr=D_N,
        b_ptr=scan.b,
        dstates_ptr=d_states,
        dx_ptr=dx,
        ddt_ptr=d_step,
        dD_ptr=d_D,
        **scan.sizes,
        nheads_ngroups_ratio=heads // scan.b.shape[2],
        **scan.arguments(),
        # The kernel reads the transpose of the scores.
        **strides("cb", scores, "batch", "chunk", "head", "csize_k", "csize_m"),
        **strides("seq_idx", scan.seq_idx, *SEQ_IDX),
        **strides("D", D_N, "head"),
        **strides("b", scan.b, "batch", "seqlen", "head", "dstate"),
        **strides("dstates", d_states, *STATES),
        **strides("dx", dx, *X),
        **strides("ddt", d_step, "tile", *NQL),
        **strides("dD", d_D, "csize", "hdim", "batch", "chunk", "head"),
        HAS_D=True,
        D_HAS_HDIM=False,
        HAS_SEQ_IDX=True,
        BLOCK_SIZE_DSTATE=block_of(scan.b.shape[3]),
        IS_TRITON_22=TRITON_22,
        DETERMINISTIC_REDUCTION=True,
    )
    tiles_m = triton.cdiv(length, blocks["BLOCK_SIZE_M"])
    tiles = triton.cdiv(head_dim, blocks["BLOCK_SIZE_N"])
    return d_step[:tiles, 0], d_D[:tiles_m, :tiles, 0]


def projections(
    scan: Scan, states: Tensor, d_states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the part of the gradients of B and C that comes from the chunks' states.

    The caller adds the part from the products inside a chunk.

    Args:
        states: entering states in x's dtype.
        d_states: gradient of the states that each chunk adds.
    Returns:
        gradients of B and C, ``(1, T, G, S)`` fp32; the partial sums ``(X, N, Q, L)``
        ``d_reach_XNQL`` and ``d_sum_XNQL`` of `chunk_sum.PartialSums`.
    """
    (_, tokens, _, _), (groups, state_dim) = scan.x.shape, scan.b.shape[2:]
    _, splits = _split(scan)
    parts = scan.step.new_empty(2, 1, tokens, splits, groups, state_dim)
    split = ("batch", "seqlen", "split", "group", "dstate")
    group = ("batch", "seqlen", "head", "dstate")
    d_reach = _project(
        _chunk_state_bwd_db_kernel,
        scan,
        x_ptr=scan.x,
        dstates_ptr=d_states,
        b_ptr=scan.b,
        dt_ptr=scan.step,
        db_ptr=parts[0],
        **strides("x", scan.x, *X),
        **strides("dstates", d_states[:, :, 0, 0, 0], "batch", "chunk"),
        **strides("states", d_states[0, 0], "head", "hdim", "dstate"),
        **strides("b", scan.b, *group),
        **strides("dt", scan.step, *NQL),
        **strides("db", parts[0], *split),
    )
    d_sum = _project(
        _chunk_scan_bwd_dc_kernel,
        scan,
        dout_ptr=scan.dy,
        prev_states_ptr=states,
        C_ptr=scan.c,
        dc_ptr=parts[1],
        **strides("dout", scan.dy, *X),
        **strides("prev_states", states, *STATES),
        **strides("C", scan.c, *group),
        **strides("dc", parts[1], *split),
    )
    dB, dC = parts.sum(3) if splits > 1 else parts[:, :, :, 0]
    return dB, dC, d_reach, d_sum


def _project(kernel: Any, scan: Scan, **arguments: Any) -> Tensor:
    """Run one of the two kernels of `projections`.

    Args:
        arguments: arguments that the other kernel does not have.
    Returns:
        ``(X, N, Q, L)`` partial sums of the gradient of the sums of dt A.
    """
    (_, tokens, heads, head_dim), (groups, state_dim) = scan.x.shape, scan.b.shape[2:]
    chunks, length = scan.step.shape[2:]
    per_program, splits = _split(scan)
    d_logs = scan.step.new_empty(most_tiles(kernel, state_dim), *scan.step.shape)
    blocks = launch(
        kernel,
        lambda meta: (
            triton.cdiv(length, meta["BLOCK_SIZE_M"])
            * triton.cdiv(state_dim, meta["BLOCK_SIZE_N"]),
            chunks,
            splits * groups,
        ),
        scan.size,
        dA_cumsum_ptr=scan.total,
        seq_idx_ptr=scan.seq_idx,
        ddA_cumsum_ptr=d_logs,
        **scan.sizes,
        batch=1,
        seqlen=tokens,
        nheads=heads,
        nheads_per_program=per_program,
        ngroups=groups,
        **strides("dA_cs", scan.total, *NQL),
        **strides("seq_idx", scan.seq_idx, *SEQ_IDX),
        **strides("ddA_cs", d_logs[0], *NQL),
        stride_ddA_tile=d_logs.stride(0),
        **arguments,
        HAS_DDA_CS=True,
        HAS_SEQ_IDX=True,
        DETERMINISTIC_REDUCTION=True,
        BLOCK_SIZE_K=block_of(head_dim),
    )
    return d_logs[: triton.cdiv(state_dim, blocks["BLOCK_SIZE_N"]), 0]


def scores(scan: Scan) -> Tensor:
    """Compute the gradient of ``C B^T`` inside each chunk, ``(1, Q, G, L, L)`` fp32."""
    (heads, head_dim), groups = scan.x.shape[2:], scan.b.shape[2]
    chunks, length = scan.step.shape[2:]
    per_program, splits = _split(scan)
    parts = scan.step.new_empty(1, chunks, splits, groups, length, length)
    launch(
        _chunk_scan_bwd_dcb_kernel,
        lambda meta: (
            triton.cdiv(length, meta["BLOCK_SIZE_M"]) * triton.cdiv(length, meta["BLOCK_SIZE_N"]),
            chunks,
            splits * groups,
        ),
        scan.size,
        cb_ptr=None,
        seq_idx_ptr=scan.seq_idx,
        dcb_ptr=parts,
        ddA_cumsum_ptr=None,
        chunk_size=length,
        hdim=head_dim,
        nheads=heads,
        nheads_per_program=per_program,
        ngroups=groups,
        **scan.arguments(),
        **no_strides("cb", "batch", "chunk", "head", "csize_m", "csize_n"),
        **strides("seq_idx", scan.seq_idx, *SEQ_IDX),
        **strides("dcb", parts, "batch", "chunk", "split", "group", "csize_m", "csize_n"),
        **no_strides("ddA_cs", "batch", "chunk", "head", "csize_m", "csize_n"),
        HAS_DDA_CS=False,
        HAS_SEQ_IDX=True,
        BLOCK_SIZE_K=block_of(head_dim),
    )
    return parts.sum(2) if splits > 1 else parts[:, :, 0]


def logs(scan: Scan, scores: Tensor) -> Tensor:
    """Compute the gradient of the terms dt A that comes from the decay inside a chunk.

    Returns:
        partial sums ``(X, N, Q, L)``.
    """
    (heads, head_dim), (chunks, length) = scan.x.shape[2:], scan.step.shape[2:]
    kernel = _chunk_scan_bwd_ddAcs_stable_kernel
    d_logs = scan.step.new_empty(most_tiles(kernel, length, "BLOCK_SIZE_M"), *scan.step.shape)
    blocks = launch(
        kernel,
        lambda meta: (triton.cdiv(length, meta["BLOCK_SIZE_M"]), chunks, heads),
        scan.size,
        cb_ptr=scores,
        ddA_cumsum_ptr=d_logs,
        chunk_size=length,
        hdim=head_dim,
        nheads_ngroups_ratio=heads // scan.b.shape[2],
        **scan.arguments(),
        **strides("cb", scores, "batch", "chunk", "head", "csize_m", "csize_n"),
        **strides("ddA_cs", d_logs, "csize_m", "batch", "head", "chunk", "csize_n"),
        BLOCK_SIZE_K=block_of(head_dim),
    )
    return d_logs[: triton.cdiv(length, blocks["BLOCK_SIZE_M"]), 0]


def _split(scan: Scan) -> tuple[int, int]:
    """Return the heads of a group that one program handles, and the programs per group.

    The split gives enough programs to fill the GPU, if there are enough heads.
    """
    per_group = scan.x.shape[2] // scan.b.shape[2]
    programs = scan.step.shape[2] * scan.x.shape[2]
    per_program = max(min(-(-programs // _multiprocessors(scan.x.device)), per_group), 1)
    return per_program, -(-per_group // per_program)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
