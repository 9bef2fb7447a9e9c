# mypy: disable-error-code="no-untyped-call"
"""mamba-ssm's backward kernels, launched one by one and followed by nothing.

The package's own launchers clear each kernel's workspace and reduce it afterwards, with a torch
kernel each: at the size of a tensor-parallel rank, where the scan's kernels take microseconds,
these cost as much as they. Here every kernel runs in the mode that stores partial sums instead of
adding them atomically, ``chunk_sum`` reads the partial sums as they are, and what was never written
is never read. So the gradients are the same bits in every run, for the same tuned tiles
(``TRITON_CACHE_AUTOTUNING``), with ``MAMBA_DETERMINISTIC`` or without.

Letters besides the op's: X partial sums; a leading 1 is the batch dimension that the kernels want.
All sums are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
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

X = ("batch", "seqlen", "head", "hdim")
NQL = ("batch", "head", "chunk", "csize")
STATES = ("batch", "chunk", "head", "hdim", "dstate")
SEQ_IDX = ("batch", "seqlen")


class Scan(NamedTuple):
    """What all kernels read."""

    x: Tensor
    """``(1, T, N, P)``, like b and c a view with any strides but 1 for the last dimension."""
    b: Tensor
    """``(1, T, G, S)``"""
    c: Tensor
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
        """Chunk, head and state sizes, by the kernels' names."""
        return {
            "chunk_size": self.step.shape[3],
            "hdim": self.x.shape[3],
            "dstate": self.b.shape[3],
        }


def state_passing(scan: Scan, states: Tensor, d_entering: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Back through the passing of states from chunk to chunk.

    Args:
        states: ``(1, Q, N, P, S)`` fp32, entering each chunk.
        d_entering: their gradient, by the outputs of the chunk alone.
    Returns:
        gradient of the states that each chunk adds, and the entering states, both in x's dtype and
        ``states``' shape; partial sums ``(N, Q, X)`` of the gradient of each chunk's last sum.
    """
    flat, d_flat = states.flatten(-2), d_entering.flatten(-2)
    (_, chunks, heads, dim), last = flat.shape, scan.total[..., -1]
    d_states, states_low = (
        torch.empty(flat.shape, dtype=scan.x.dtype, device=flat.device) for _ in range(2)
    )
    d_last = flat.new_empty(
        1, heads, chunks, _most_tiles(_state_passing_bwd_kernel, dim, "BLOCK_SIZE")
    )
    blocks = _launch(
        _state_passing_bwd_kernel,
        lambda meta: (triton.cdiv(dim, meta["BLOCK_SIZE"]), 1, heads),
        scan,
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
        **_strides("dout", d_flat, "batch", "chunk", "head", "dim"),
        **_strides("out", flat, "batch", "chunk", "head", "dim"),
        **_strides("dA_cs", last, "batch", "head", "chunk"),
        **_no_strides("dfinal_states", "batch", "head", "dim"),
        **_strides("seq_idx", scan.seq_idx, *SEQ_IDX),
        **_strides("dstates", d_states, "batch", "chunk", "head", "dim"),
        **_strides("ddA_cs", d_last[..., 0], "batch", "head", "chunk"),
        **_no_strides("dinitstates", "batch", "head", "dim"),
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
    """The gradient of x, written into ``dx``.

    Returns:
        partial sums ``(X, N, Q, L)`` of the step sizes' gradient (by x alone), and ``(X, X, Q, N)``
        of that of D.
    """
    (_, tokens, heads, head_dim), (chunks, length) = scan.x.shape, scan.step.shape[2:]
    kernel = _chunk_scan_chunk_state_bwd_dx_kernel
    most = _most_tiles(kernel, head_dim)
    d_step = scan.step.new_empty(most, *scan.step.shape)
    d_D = scan.step.new_empty(_most_tiles(kernel, length, "BLOCK_SIZE_M"), most, 1, chunks, heads)
    blocks = _launch(
        kernel,
        lambda meta: (
            triton.cdiv(length, meta["BLOCK_SIZE_M"]) * triton.cdiv(head_dim, meta["BLOCK_SIZE_N"]),
            chunks,
            heads,
        ),
        scan,
        x_ptr=scan.x,
        cb_ptr=scores,
        dout_ptr=scan.dy,
        dt_ptr=scan.step,
        dA_cumsum_ptr=scan.total,
        seq_idx_ptr=scan.seq_idx,
        D_ptr=D_N,
        b_ptr=scan.b,
        dstates_ptr=d_states,
        dx_ptr=dx,
        ddt_ptr=d_step,
        dD_ptr=d_D,
        **scan.sizes,
        batch=1,
        seqlen=tokens,
        nheads_ngroups_ratio=heads // scan.b.shape[2],
        **_strides("x", scan.x, *X),
        **_strides(
            "cb", scores, "batch", "chunk", "head", "csize_k", "csize_m"
        ),  # it reads the transpose
        **_strides("dout", scan.dy, *X),
        **_strides("dt", scan.step, *NQL),
        **_strides("dA_cs", scan.total, *NQL),
        **_strides("seq_idx", scan.seq_idx, *SEQ_IDX),
        **_strides("D", D_N, "head"),
        **_strides("b", scan.b, "batch", "seqlen", "head", "dstate"),
        **_strides("dstates", d_states, *STATES),
        **_strides("dx", dx, *X),
        **_strides("ddt", d_step, "tile", *NQL),
        **_strides("dD", d_D, "csize", "hdim", "batch", "chunk", "head"),
        HAS_D=True,
        D_HAS_HDIM=False,
        HAS_SEQ_IDX=True,
        BLOCK_SIZE_DSTATE=_block(scan.b.shape[3]),
        IS_TRITON_22=TRITON_22,
        DETERMINISTIC_REDUCTION=True,
    )
    tiles_m, tiles = (
        triton.cdiv(length, blocks["BLOCK_SIZE_M"]),
        triton.cdiv(head_dim, blocks["BLOCK_SIZE_N"]),
    )
    return d_step[:tiles, 0], d_D[:tiles_m, :tiles, 0]


def projections(
    scan: Scan, states: Tensor, d_states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of B and C by the chunks' states; the products inside a chunk come on top of them.

    Args:
        states: entering states in x's dtype.
        d_states: gradient of the states that each chunk adds.
    Returns:
        gradients of B and C, ``(1, T, G, S)`` fp32; partial sums ``(X, N, Q, L)`` of what
        ``chunk_sum_backward`` calls ``d_reach`` and ``d_sum``.
    """
    (_, tokens, heads, head_dim), (groups, state_dim) = scan.x.shape, scan.b.shape[2:]
    chunks, length = scan.step.shape[2:]
    per_program, splits = _split(scan)
    parts = scan.step.new_empty(2, 1, tokens, splits, groups, state_dim)

    def run(kernel: Any, **arguments: Any) -> Tensor:
        d_logs = scan.step.new_empty(_most_tiles(kernel, state_dim), *scan.step.shape)
        blocks = _launch(
            kernel,
            lambda meta: (
                triton.cdiv(length, meta["BLOCK_SIZE_M"])
                * triton.cdiv(state_dim, meta["BLOCK_SIZE_N"]),
                chunks,
                splits * groups,
            ),
            scan,
            dA_cumsum_ptr=scan.total,
            seq_idx_ptr=scan.seq_idx,
            ddA_cumsum_ptr=d_logs,
            **scan.sizes,
            batch=1,
            seqlen=tokens,
            nheads=heads,
            nheads_per_program=per_program,
            ngroups=groups,
            **_strides("dA_cs", scan.total, *NQL),
            **_strides("seq_idx", scan.seq_idx, *SEQ_IDX),
            **_strides("ddA_cs", d_logs[0], *NQL),
            stride_ddA_tile=d_logs.stride(0),
            **arguments,
            HAS_DDA_CS=True,
            HAS_SEQ_IDX=True,
            DETERMINISTIC_REDUCTION=True,
            BLOCK_SIZE_K=_block(head_dim),
        )
        return d_logs[: triton.cdiv(state_dim, blocks["BLOCK_SIZE_N"]), 0]

    split = ("batch", "seqlen", "split", "group", "dstate")
    group = ("batch", "seqlen", "head", "dstate")
    d_reach = run(
        _chunk_state_bwd_db_kernel,
        x_ptr=scan.x,
        dstates_ptr=d_states,
        b_ptr=scan.b,
        dt_ptr=scan.step,
        db_ptr=parts[0],
        **_strides("x", scan.x, *X),
        **_strides("dstates", d_states[:, :, 0, 0, 0], "batch", "chunk"),
        **_strides("states", d_states[0, 0], "head", "hdim", "dstate"),
        **_strides("b", scan.b, *group),
        **_strides("dt", scan.step, *NQL),
        **_strides("db", parts[0], *split),
    )
    d_sum = run(
        _chunk_scan_bwd_dc_kernel,
        dout_ptr=scan.dy,
        prev_states_ptr=states,
        C_ptr=scan.c,
        dc_ptr=parts[1],
        **_strides("dout", scan.dy, *X),
        **_strides("prev_states", states, *STATES),
        **_strides("C", scan.c, *group),
        **_strides("dc", parts[1], *split),
    )
    dB, dC = parts.sum(3) if splits > 1 else parts[:, :, :, 0]
    return dB, dC, d_reach, d_sum


def scores(scan: Scan) -> Tensor:
    """The gradient of ``C B^T`` inside each chunk, ``(1, Q, G, L, L)`` fp32."""
    (_, tokens, heads, head_dim), groups = scan.x.shape, scan.b.shape[2]
    chunks, length = scan.step.shape[2:]
    per_program, splits = _split(scan)
    parts = scan.step.new_empty(1, chunks, splits, groups, length, length)
    _launch(
        _chunk_scan_bwd_dcb_kernel,
        lambda meta: (
            triton.cdiv(length, meta["BLOCK_SIZE_M"]) * triton.cdiv(length, meta["BLOCK_SIZE_N"]),
            chunks,
            splits * groups,
        ),
        scan,
        x_ptr=scan.x,
        dout_ptr=scan.dy,
        cb_ptr=None,
        dt_ptr=scan.step,
        dA_cumsum_ptr=scan.total,
        seq_idx_ptr=scan.seq_idx,
        dcb_ptr=parts,
        ddA_cumsum_ptr=None,
        chunk_size=length,
        hdim=head_dim,
        batch=1,
        seqlen=tokens,
        nheads=heads,
        nheads_per_program=per_program,
        ngroups=groups,
        **_strides("x", scan.x, *X),
        **_strides("dout", scan.dy, *X),
        **_no_strides("cb", "batch", "chunk", "head", "csize_m", "csize_n"),
        **_strides("dt", scan.step, *NQL),
        **_strides("dA_cs", scan.total, *NQL),
        **_strides("seq_idx", scan.seq_idx, *SEQ_IDX),
        **_strides("dcb", parts, "batch", "chunk", "split", "group", "csize_m", "csize_n"),
        **_no_strides("ddA_cs", "batch", "chunk", "head", "csize_m", "csize_n"),
        HAS_DDA_CS=False,
        HAS_SEQ_IDX=True,
        BLOCK_SIZE_K=_block(head_dim),
    )
    return parts.sum(2) if splits > 1 else parts[:, :, 0]


def logs(scan: Scan, scores: Tensor) -> Tensor:
    """Partial sums ``(X, N, Q, L)`` of the gradient of the terms dt A by the decay inside a chunk."""
    (_, tokens, heads, head_dim), (chunks, length) = scan.x.shape, scan.step.shape[2:]
    kernel = _chunk_scan_bwd_ddAcs_stable_kernel
    d_logs = scan.step.new_empty(_most_tiles(kernel, length, "BLOCK_SIZE_M"), *scan.step.shape)
    blocks = _launch(
        kernel,
        lambda meta: (triton.cdiv(length, meta["BLOCK_SIZE_M"]), chunks, heads),
        scan,
        x_ptr=scan.x,
        dout_ptr=scan.dy,
        dt_ptr=scan.step,
        dA_cumsum_ptr=scan.total,
        cb_ptr=scores,
        ddA_cumsum_ptr=d_logs,
        chunk_size=length,
        hdim=head_dim,
        batch=1,
        seqlen=tokens,
        nheads_ngroups_ratio=heads // scan.b.shape[2],
        **_strides("x", scan.x, *X),
        **_strides("dout", scan.dy, *X),
        **_strides("dt", scan.step, *NQL),
        **_strides("dA_cs", scan.total, *NQL),
        **_strides("cb", scores, "batch", "chunk", "head", "csize_m", "csize_n"),
        **_strides("ddA_cs", d_logs, "csize_m", "batch", "head", "chunk", "csize_n"),
        BLOCK_SIZE_K=_block(head_dim),
    )
    return d_logs[: triton.cdiv(length, blocks["BLOCK_SIZE_M"]), 0]


_tuned: dict[tuple[object, ...], Any] = {}


def _launch(
    kernel: Any, grid: Callable[[Any], tuple[int, ...]], scan: Scan, **arguments: Any
) -> dict[str, int]:
    """Run a kernel, by the names of its arguments; returns the block sizes it ran with.

    The first call for a size tunes the kernel; later ones leave the tuner out, which saves the host
    its bookkeeping.
    """
    key = (kernel, *scan.sizes.values(), scan.x.dtype, scan.x.device)
    config = _tuned.get(key)
    if config is None:
        tuner = _without_hooks(kernel)
        tuner[grid](**arguments)
        config = _tuned[key] = tuner.best_config
    else:
        kernel.fn[grid](**arguments, **config.all_kwargs())
    blocks: dict[str, int] = config.kwargs
    return blocks


def _without_hooks(kernel: Any) -> Any:
    """The kernel's tuner over configurations that clear nothing before a launch.

    The storing variants need no cleared workspace, and Triton keeps a tuning result on disk, as
    ``TRITON_CACHE_AUTOTUNING`` asks, only of configurations without a hook.
    """
    configs = [copy(config) for config in kernel.configs]
    for config in configs:
        config.pre_hook = None
    return triton.autotune(configs=configs, key=kernel.keys)(kernel.fn)


def _strides(name: str, tensor: Tensor, *dims: str) -> dict[str, int]:
    return {
        f"stride_{name}_{dim}": stride for dim, stride in zip(dims, tensor.stride(), strict=True)
    }


def _no_strides(name: str, *dims: str) -> dict[str, int]:
    return {f"stride_{name}_{dim}": 0 for dim in dims}


def _most_tiles(kernel: Any, size: int, block: str = "BLOCK_SIZE_N") -> int:
    """How many tiles there are if the tuner takes the smallest block."""
    smallest: int = min(config.kwargs[block] for config in kernel.configs)
    return -(-size // smallest)


def _block(size: int) -> int:
    block: int = max(triton.next_power_of_2(size), 16)
    return block


def _split(scan: Scan) -> tuple[int, int]:
    """Heads of one group that one program goes through, and programs per group: enough to fill the
    GPU.
    """
    per_group = scan.x.shape[2] // scan.b.shape[2]
    programs = scan.step.shape[2] * scan.x.shape[2]
    per_program = max(min(-(-programs // _multiprocessors(scan.x.device)), per_group), 1)
    return per_program, -(-per_group // per_program)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )
