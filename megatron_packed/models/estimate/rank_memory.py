"""Estimate of one rank's GPU memory, computed without a GPU.

The estimate has a static part, which the rank holds all the time, and the peak of a micro-batch.
Parameters, gradients and optimizer state are the sizes of the flat buffers, padding included; these
are exact. The peak is the largest of the moments of all layers (`activations.py`). Not included is
the fragmentation of the allocator. Memory outside of the allocator is assumed: `CONTEXT` for CUDA's
context and `COMMUNICATOR` for NCCL's buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS, CudaGraphConfig
from megatron_packed.distributed.flat_buffers import ALIGN_BYTES
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import FlatLayout
from megatron_packed.layers.attention import Rotary
from megatron_packed.models.estimate.activations import ends, footprints
from megatron_packed.models.estimate.footprint import Amounts, Footprint, Purpose, Work
from megatron_packed.models.estimate.offloaded_activations import resident_activations
from megatron_packed.models.hybrid_model import HybridModel

GIB, MIB = 2**30, 2**20
CONTEXT = 600 * MIB
"""Assumed bytes of CUDA's context, loaded kernels and libraries of a process."""
COMMUNICATOR = 256 * MIB
"""Assumed bytes of NCCL's buffers for each communicator of a rank."""
DETERMINISTIC_WORKSPACES = 2 * 32 * MIB
"""Bytes of cuBLAS workspaces with ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, one for the forward and one
for the backward thread. Without ``--deterministic-mode`` there are no workspaces (``:0:0``).
"""
BYTES_PER_SLOT = 64
"""Bytes on the device for each slot of a micro-batch, rounded up: tokens, labels, mask, positions,
document numbers and tables.
"""


class ResidentActivations(Protocol):
    """Rule that decides which saved tensors stay on the device from forward to backward.

    [Note: resident activations]
    A tensor that does not stay is recomputed, or it is offloaded and reloaded. It exists again
    while the backward pass of its layer runs. Layers that are recomputed as a group exist again
    together, until the backward pass of the group's first layer has run. The rule also counts the
    memory that replaces such tensors.
    """

    def stays(self, layer: int, symbol: str, term: str) -> bool:
        """Return True if a term of `footprint.Footprint.saved` stays on the device."""

    def group_start(self, layer: int) -> int:
        """Return the first layer of the group that is recomputed together with ``layer``.

        It is ``layer`` itself if there are no groups.
        """

    def replacement_bytes(self, layers: Sequence[Footprint]) -> int:
        """Return the bytes that are held all the time in place of tensors that do not stay."""

    def in_flight_bytes(self, layer: int) -> int:
        """Return the device bytes of earlier layers' tensors in transfer while ``layer`` runs.

        The number after the last layer stands for the loss.
        """

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Moment of a micro-batch with the largest memory."""

    where: str
    amounts: Mapping[Purpose, int]

    @property
    def bytes(self) -> int:
        return sum(self.amounts.values())


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
    communicators: int = 0,
    symmetric: int = 0,
    resident: ResidentActivations | None = None,
) -> Estimate:
    """Estimate the memory of one rank of a parallel layout.

    Args:
        model: this rank's model, on any device including the meta device.
        layout: layout of the rank's flat buffers.
        work: sizes of the packs that its layers process.
        tail: number of elements after the gradients in their buffer.
        graphs: configuration of CUDA graphs; None captures nothing.
        with_optimizer: False leaves out master weights and moments.
        communicators: number of NCCL communicators of this rank.
        symmetric: bytes of symmetric memory of this rank.
        resident: rule for activations that stay on the device; by default the rule of the model's
            recomputation and offload options.
    """
    layers, around = footprints(model, work), ends(model, work)
    resident = resident or resident_activations(model, work, layers)
    captured = (
        _captured(model, graphs) if graphs is not None and graphs.enabled else frozenset[int]()
    )
    peak, pool = _peak(layers, around, resident, captured, graphs)
    # Fused products and shared experts run on a second stream too, each on one of its own, and
    # cuBLAS has a workspace for each stream.
    beside = any(layer.mixer.overlaps_shared_expert for layer in model.moe_layers)
    workspaces = DETERMINISTIC_WORKSPACES * (1 + bool(symmetric) + beside)
    return Estimate(
        static=Static(
            parameters=parameter_bytes(layout),
            gradients=(layout.numel + tail) * _wide(layout).itemsize + ALIGN_BYTES,
            optimizer=optimizer_bytes(layout) if with_optimizer else 0,
            tables=_rotary_bytes(model.rotary) + work.tokens * BYTES_PER_SLOT,
            workspaces=workspaces if model.backends.deterministic else 0,
        ),
        peak=peak,
        graph_pool=pool,
        communicators=communicators,
        host_bytes=resident.host_bytes,
        symmetric=symmetric,
    )


def parameter_bytes(layout: FlatLayout) -> int:
    """Return the bytes of the flat buffers of parameters."""
    spans = [(layout.span(part), part.dtype.itemsize) for part in layout.parts]
    return sum((end - start) * size + ALIGN_BYTES for (start, end), size in spans)


def optimizer_bytes(layout: FlatLayout) -> int:
    """Return the bytes of optimizer state that one rank owns; equal on all ranks.

    Every owned parameter has two moments, and a bf16 parameter also has a master weight.
    """
    total = 0
    for bucket in layout.buckets:
        start, end = layout.owned_span(bucket, 0)
        masters = torch.float32.itemsize if bucket.part.dtype == torch.bfloat16 else 0
        total += (end - start) * (masters + 2 * _wide(layout).itemsize)
    return total


def _wide(layout: FlatLayout) -> torch.dtype:
    """Return the dtype of gradients and moments."""
    return (
        torch.float64
        if any(part.dtype == torch.float64 for part in layout.parts)
        else torch.float32
    )


def _rotary_bytes(rotary: Rotary | None) -> int:
    return 0 if rotary is None else rotary.cos_PR.nbytes + rotary.sin_PR.nbytes


def communicators_of(groups: ParallelGroups) -> int:
    """Return the number of communicators of this rank.

    Groups of the same ranks share a communicator. Groups that reduce gradients do not share one
    with groups that the forward and backward pass wait for.
    """
    passes = (
        groups.tp_group,
        groups.cp_group,
        groups.tp_cp_group,
        groups.ep_group,
        groups.expert_tp_group,
        groups.expert_tp_ep_group,
    )
    gradients = (groups.dp_group, groups.dp_cp_group, groups.expert_dp_group)
    return sum(len({group for group in kind if group is not None}) for kind in (passes, gradients))


def _captured(model: HybridModel, graphs: CudaGraphConfig) -> frozenset[int]:
    """Return the numbers of completely captured layers. A captured router alone does not count."""
    whole = {MODULE_LAYERS[name] for name in graphs.modules if name != "moe_router"}
    symbols = model.config.layer_types
    return frozenset(n for n, symbol in enumerate(symbols) if not graphs.modules or symbol in whole)


def _peak(
    layers: Sequence[Footprint],
    around: Footprint,
    resident: ResidentActivations,
    captured: Collection[int],
    graphs: CudaGraphConfig | None,
) -> tuple[Peak, int]:
    """Return the peak, and the bytes of it that belong to the graph pool.

    The graph pool always holds the peak of the captured layers. The peak of the eager layers is
    added to it.
    """
    everything = [*enumerate(layers), (len(layers), around)]
    held = resident.replacement_bytes(layers)
    if not captured:
        peak, pool = _walk(everything, resident), 0
    elif graphs is not None and graphs.captures_steps:
        peak = _walk(everything, resident)
        pool = peak.bytes
    else:
        inside = _walk([item for item in everything if item[0] in captured], resident)
        outside = _walk([item for item in everything if item[0] not in captured], resident)
        # Graphs copy the first input and the last gradient to fixed addresses. Graphs of
        # TransformerEngine copy the input of every layer.
        hidden = layers[0].saved["norm.input"].bytes
        copies = hidden * (
            1 + len(captured) if graphs is not None and graphs.uses_transformer_engine else 2
        )
        amounts = (
            Counter(inside.amounts)
            + Counter(outside.amounts)
            + Counter({Purpose.ACTIVATIONS: copies})
        )
        where = f"graphs: {inside.where}; eager: {outside.where}"
        peak, pool = Peak(where=where, amounts=amounts), inside.bytes
    of_all = {kind: peak.amounts.get(kind, 0) for kind in Purpose}
    of_all[Purpose.ACTIVATIONS] += held
    return Peak(where=peak.where, amounts=of_all), pool


def _walk(parts: Sequence[tuple[int, Footprint]], resident: ResidentActivations) -> Peak:
    """Return the largest moment, including what earlier layers have saved. See [Note: moments]."""
    worst: tuple[int, str, Amounts] = (0, "", {})
    before: Counter[Purpose] = Counter()
    back: Counter[Purpose] = Counter()
    """Recomputed or reloaded tensors of earlier layers in the same group."""
    for number, part in parts:
        kept: Counter[Purpose] = Counter()
        removed: Counter[Purpose] = Counter()
        for name, term in part.saved.items():
            stays = resident.stays(number, part.symbol, name)
            (kept if stays else removed)[term.kind] += term.bytes
        if not part.symbol or resident.group_start(number) == number:
            back = Counter()
        in_flight = resident.in_flight_bytes(number)
        for moment in part.moments:
            amounts = before + back + Counter(moment.extra)
            amounts[Purpose.ACTIVATIONS] += in_flight
            for name, term in part.saved.items():
                if name not in moment.absent:
                    amounts[term.kind] += term.bytes
            total = sum(amounts.values())
            if total > worst[0]:
                worst = (
                    total,
                    f"{moment.name} in {part.name}" if part.symbol else moment.name,
                    dict(amounts),
                )
        before += kept
        back += removed
    return Peak(where=worst[1], amounts=worst[2])
