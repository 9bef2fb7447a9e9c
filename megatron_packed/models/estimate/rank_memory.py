"""Estimate of one rank's GPU memory, computed without a GPU.

The estimate has a static part, which the rank holds all the time, and the peak of a micro-batch.
Parameters, gradients and optimizer state are the sizes of the flat buffers, padding included; these
are exact. The peak is that of a step on the meta device (`step_memory.py`). Not included is the
fragmentation of the allocator. Memory outside of the allocator is assumed: `CONTEXT` for CUDA's
context and `COMMUNICATOR` for NCCL's buffers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS, CudaGraphConfig
from megatron_packed.distributed.flat_buffers import ALIGN_BYTES
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.low_precision_sums import MOST_UNDER_WAY
from megatron_packed.distributed.zero1_layout import FlatLayout
from megatron_packed.memory_purpose import Purpose
from megatron_packed.models.estimate.live_memory import Peak
from megatron_packed.models.estimate.step_memory import KnownUnits, MetaStep, StepMemory, Work
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.state_precision import FLOAT32_STATE, StatePrecision

GIB, MIB = 2**30, 2**20
CONTEXT = 600 * MIB
"""Assumed bytes of CUDA's context, loaded kernels and libraries of a process."""
COMMUNICATOR = 256 * MIB
"""Assumed bytes of NCCL's buffers for each communicator of a rank."""
DETERMINISTIC_WORKSPACES = 2 * 32 * MIB
"""Bytes of cuBLAS workspaces with ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, one for the forward and one
for the backward thread. Without ``--deterministic-mode`` there are no workspaces (``:0:0``).
"""
DEVICE = [kind for kind in Purpose if kind is not Purpose.HOST]
BYTES_PER_SLOT = 64
"""Bytes on the device for each slot of a micro-batch, rounded up: tokens, labels, mask, positions,
document numbers and tables.
"""


@dataclass(frozen=True, kw_only=True)
class Static:
    """Bytes that a rank holds all the time."""

    parameters: int
    gradients: int
    optimizer: int
    tables: int
    """Rotary tables and the tensors of the micro-batch."""
    workspaces: int
    """Workspaces of cuBLAS."""

    @property
    def bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.tables + self.workspaces


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory of one rank."""

    static: Static
    peak: Peak
    """Peak of the micro-batch, CUDA graphs included."""
    graph_pool: int
    """Bytes of ``peak`` that the graph pool holds all the time."""
    communicators: int
    host_bytes: int = 0
    """Bytes of pinned host memory for offloaded activations."""
    symmetric: int = 0
    """Bytes of symmetric memory, for fused products and for exchanges of equal parts."""

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak: ``torch.cuda.max_memory_allocated()`` and graph pool."""
        return self.static.bytes + self.peak.bytes

    @property
    def outside(self) -> int:
        """Bytes outside of torch's allocator: assumed bytes, and symmetric memory."""
        return CONTEXT + self.communicators * COMMUNICATOR + self.symmetric

    @property
    def total(self) -> int:
        return self.allocated + self.outside


def estimate(
    model: HybridModel,
    layout: FlatLayout,
    work: Work,
    *,
    tail: int = 0,
    graphs: CudaGraphConfig | None = None,
    with_optimizer: bool = True,
    precision: StatePrecision = FLOAT32_STATE,
    communicators: int = 0,
    symmetric: int = 0,
    known_units: KnownUnits | None = None,
    rounds_once: bool = False,
) -> Estimate:
    """Estimate the memory of one rank of a parallel layout.

    Args:
        model: this rank's model on the meta device.
        layout: layout of the rank's flat buffers.
        work: sizes of the packs that its layers process.
        tail: number of elements after the gradients in their buffer.
        graphs: configuration of CUDA graphs; None captures nothing.
        with_optimizer: False leaves out master weights and moments.
        precision: precision of master weights and moments.
        communicators: number of NCCL communicators of this rank.
        symmetric: bytes of symmetric memory of this rank.
        known_units: layers that estimates of other configurations have measured.
        rounds_once: several ranks sum bf16 gradients, with one rounding.
    """
    peak, pool, step = _peak(model, MetaStep(model, work, known_units), graphs)
    # Fused products and shared experts run on a second stream too, each on one of its own, and
    # cuBLAS has a workspace for each stream.
    beside = any(layer.mixer.overlaps_shared_expert for layer in model.moe_layers)
    # Frozen parameters are outside of the flat buffers.
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    rotary = () if model.rotary is None else (model.rotary.cos_PR, model.rotary.sin_PR)
    workspaces = DETERMINISTIC_WORKSPACES * (1 + bool(symmetric) + beside)
    return Estimate(
        static=Static(
            parameters=parameter_bytes(layout) + frozen,
            gradients=gradient_bytes(layout, tail, rounds_once=rounds_once),
            optimizer=optimizer_bytes(layout, precision) if with_optimizer else 0,
            tables=sum(table.nbytes for table in rotary) + work.tokens * BYTES_PER_SLOT,
            workspaces=workspaces if model.backends.deterministic else 0,
        ),
        peak=replace(peak, amounts={kind: peak.amounts.get(kind, 0) for kind in DEVICE}),
        graph_pool=pool,
        communicators=communicators,
        host_bytes=step.host,
        symmetric=symmetric,
    )


def parameter_bytes(layout: FlatLayout) -> int:
    """Return the bytes of the flat buffers of parameters."""
    spans = [(layout.span(part), part.dtype.itemsize) for part in layout.parts]
    return sum((end - start) * size + ALIGN_BYTES for (start, end), size in spans)


def gradient_bytes(layout: FlatLayout, tail: int, *, rounds_once: bool) -> int:
    """Return the bytes of gradients, and of the second buffers of sums that are rounded once.

    Args:
        tail: number of elements after the gradients in their buffer.
        rounds_once: several ranks sum bf16 gradients, with one rounding.
    """
    low = torch.bfloat16.itemsize
    full = (layout.numel - layout.low_numel + tail) * _wide(layout).itemsize + ALIGN_BYTES
    if not layout.low_numel:
        return full
    largest = max(end - start for part, start, end in layout.buckets if part.low)
    second = MOST_UNDER_WAY * largest * low if rounds_once else 0
    return full + layout.low_numel * low + ALIGN_BYTES + second


def optimizer_bytes(layout: FlatLayout, precision: StatePrecision = FLOAT32_STATE) -> int:
    """Return the bytes of optimizer state that one rank owns; equal on all ranks.

    Every owned parameter has two moments, and a bf16 parameter also has a master weight or a
    remainder.
    """
    moments = sum(
        (dtype if dtype == torch.bfloat16 else _wide(layout)).itemsize
        for dtype in (precision.exp_avg, precision.exp_avg_sq)
    )
    master = (torch.int16 if precision.remainders else torch.float32).itemsize
    total = 0
    for bucket in layout.buckets:
        start, end = layout.owned_span(bucket, 0)
        masters = master if bucket.part.dtype == torch.bfloat16 else 0
        total += (end - start) * (masters + moments)
    return total


def _wide(layout: FlatLayout) -> torch.dtype:
    """Return the dtype of gradients, and of moments that are not bf16."""
    return (
        torch.float64
        if any(part.dtype == torch.float64 for part in layout.parts)
        else torch.float32
    )


def communicators_of(groups: ParallelGroups) -> int:
    """Return the number of communicators of this rank.

    Groups of the same ranks share a communicator. Groups that reduce gradients do not share one
    with groups that the forward and backward pass wait for.
    """
    passes = (
        groups.tp.group,
        groups.cp.group,
        groups.tp_cp.group,
        groups.ep.group,
        groups.expert_tp.group,
        groups.expert_tp_ep.group,
    )
    gradients = (groups.dp.group, groups.dp_cp.group, groups.expert_dp.group)
    return sum(len({group for group in kind if group is not None}) for kind in (passes, gradients))


def _captured(model: HybridModel, graphs: CudaGraphConfig) -> frozenset[int]:
    """Return the numbers of completely captured layers. A captured router alone does not count."""
    captured_kinds = {MODULE_LAYERS[name] for name in graphs.modules if name != "moe_router"}
    symbols = model.config.layer_types
    return frozenset(
        n for n, symbol in enumerate(symbols) if not graphs.modules or symbol in captured_kinds
    )


def _peak(
    model: HybridModel, on_meta: MetaStep, graphs: CudaGraphConfig | None
) -> tuple[Peak, int, StepMemory]:
    """Return the peak, the bytes of it that belong to the graph pool, and the memory of a step.

    The graph pool always holds the peak of the captured layers. The peak of the eager layers is
    added to it.
    """
    captured = (
        _captured(model, graphs) if graphs is not None and graphs.enabled else frozenset[int]()
    )
    if not captured or graphs is None or graphs.captures_steps:
        step = on_meta.run()
        return step.eager, step.eager.bytes if captured else 0, step
    step = on_meta.run(captured)
    inside, outside = step.pool, step.eager
    # Graphs copy the first input and the last gradient to fixed addresses, and eager code gets a
    # copy of the last output. The first input is not offloaded. Graphs of TransformerEngine copy the
    # input of every layer.
    copies = 3 + model.memory.offloads_input(min(captured))
    if graphs.uses_transformer_engine:
        copies = 1 + len(captured)
    amounts = Counter(inside.amounts) + Counter(outside.amounts)
    amounts[Purpose.ACTIVATIONS] += copies * step.hidden
    where = f"graphs: {inside.where}; eager: {outside.where}"
    return Peak(where=where, amounts=amounts), inside.bytes, step
