"""Log record of a step: numbers known on the host, numbers read from the device, and rates."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from megatron_packed.layers.moe.expert_room import ExpertRoom, Load

if TYPE_CHECKING:
    from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters
    from megatron_packed.memory.offload_figures import OffloadFigures


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Peak memory of this process, in GiB."""

    used: float
    """Memory of tensors on a GPU; the resident set on a CPU."""
    reserved: float | None
    """Memory that torch's allocator has reserved on the GPU; None on a CPU."""
    host: float
    """Resident set of the process."""

    @classmethod
    def now(cls, device: torch.device) -> MemoryFigures:
        """Return the peaks up to now, without a device sync."""
        # ``ru_maxrss`` is in KiB on Linux and in bytes on macOS.
        unit = 1024 if sys.platform != "darwin" else 1
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
        if device.type != "cuda":
            return cls(used=host, reserved=None, host=host)
        # The allocator's counters are on the host. A query of the driver might wait for the device.
        peaks = torch.cuda.memory_stats(device)
        used, reserved = (
            peaks.get(f"{what}_bytes.all.peak", 0) / 2**30 for what in ("allocated", "reserved")
        )
        return cls(used=used, reserved=reserved, host=host)


_WHERE_THERE_IS_ONE = (
    "expert_load",
    "expert_dropped",
    "expert_dropped_share",
    "expert_dropped_by_layer",
    "expert_rank_load",
    "expert_rank_bound",
    "expert_peer_load",
    "expert_peer_bound",
    "expert_repeats",
    "weight_decay",
    "params_norm",
    "num_zeros",
    "skip_reason",
    "loss_median",
    "grad_norm_median",
)
"""Fields that a line of the log has only if they have a value."""
LOADS_PER_LINE = 512
"""Largest number of loads of single experts that a line of the log holds on average."""


@dataclass(frozen=True, kw_only=True)
class ExpertFigures:
    """Assignments of tokens to experts in one step, over all ranks.

    A load is the assignments of an expert divided by the mean over the experts of its layer.
    """

    load_max: float
    """Load of the busiest expert of all layers."""
    load_min: float
    """Load of the least busy expert of all layers."""
    load: list[list[float]] | None
    """``[E layers][experts]``: load of each expert.

    A model with more than `LOADS_PER_LINE` experts in all its layers reports it only in some steps.
    """
    dropped: int | None = None
    """Assignments dropped because their expert was full; None without a capacity."""
    dropped_share: float | None = None
    """Share of assignments that were dropped; None without a capacity."""
    dropped_by_layer: list[float] | None = None
    """``[E layers]``: dropped share of each layer, rounded to 0.000001; None without a capacity."""
    rank_load: float | None = None
    """Most rows that the experts of a rank need, divided by an even share; None without bounds."""
    rank_bound: float | None = None
    """Bound of these rows, divided by an even share."""
    peer_load: float | None = None
    """Most rows that a rank sends to the experts of another rank, divided by an even share."""
    peer_bound: float | None = None
    """Bound of these rows, divided by an even share."""
    repeats: int | None = None
    """Steps of the run so far that were repeated because a bound was too small."""

    def in_room(self, room: ExpertRoom, load: Load) -> ExpertFigures:
        """Return the figures with the load of the step and the bounds of expert buffers."""
        assert room.bounds is not None, "loads are counted only with bounds"
        of_peer = (round(load.peer, 3), round(room.bounds.peer, 3)) if load.peer else (None, None)
        return replace(
            self,
            rank_load=round(load.rank, 3),
            rank_bound=round(room.bounds.rank, 3),
            peer_load=of_peer[0],
            peer_bound=of_peer[1],
            repeats=room.repeats,
        )

    @classmethod
    def from_counts(
        cls,
        counts: Sequence[float],
        layers: int,
        iteration: int,
        dropped: Sequence[float] | None = None,
    ) -> ExpertFigures | None:
        """Return the figures of a step; None without experts.

        Args:
            counts: assignments of each expert, layer by layer.
            layers: number of E layers.
            iteration: number of the step.
            dropped: dropped assignments of each layer; None without a capacity.
        """
        if not counts:
            return None
        experts = len(counts) // layers
        of_layers = (counts[first : first + experts] for first in range(0, len(counts), experts))
        load = [[count * experts / max(sum(layer), 1) for count in layer] for layer in of_layers]
        # If every step logged the loads of all experts, they would make up most of a long log.
        shown = iteration % -(-len(counts) // LOADS_PER_LINE) == 0
        figures = cls(
            load_max=max(map(max, load)),
            load_min=min(map(min, load)),
            load=[[round(value, 3) for value in layer] for layer in load] if shown else None,
        )
        if dropped is None:
            return figures
        # A layer of multi-token prediction assigns fewer tokens than one of the main model.
        assigned = [max(sum(counts[at : at + experts]), 1) for at in range(0, len(counts), experts)]
        return replace(
            figures,
            dropped=int(sum(dropped)),
            dropped_share=sum(dropped) / sum(assigned),
            dropped_by_layer=[round(count / all_, 6) for count, all_ in zip(dropped, assigned)],
        )


@dataclass(frozen=True, kw_only=True)
class GraphFigures:
    """CUDA graphs in one step, on one rank. In the log, names begin with ``graph_``."""

    replays: int
    """Micro-batches of this step that were replayed."""
    fallbacks: int
    """Micro-batches of this step that ran eagerly."""
    captures: int
    """Graphs captured since the start of the run."""
    memory_mib: float
    """Memory that all graphs hold now, in MiB."""
    hit_rate: float
    """Share of this step's micro-batches that were replayed."""

    @classmethod
    def since(cls, previous: tuple[int, int], counters: GraphCounters) -> GraphFigures:
        """Return the figures of a step; ``previous`` is `replays_and_fallbacks` at its beginning."""
        replays, fallbacks = (
            new - old for new, old in zip(replays_and_fallbacks(counters), previous)
        )
        return cls(
            replays=replays,
            fallbacks=fallbacks,
            captures=counters.captures,
            memory_mib=counters.memory_mib,
            hit_rate=replays / max(replays + fallbacks, 1),
        )


def replays_and_fallbacks(counters: GraphCounters) -> tuple[int, int]:
    """Return the numbers of micro-batches since the start that were replayed and that ran eagerly."""
    return counters.replays, counters.fallbacks.total()


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Numbers of a step that the host knows before the device runs it.

    All counts are over all data-parallel ranks.
    """

    iteration: int
    learning_rate: float
    real_tokens: int
    target_tokens: int
    padded_tokens: int
    consumed_tokens: int
    num_seqs: int
    num_packs: int
    epoch: int
    flops: float
    plan_hash: str
    # A constant value would only repeat the flag, so its field is left out of the log.
    weight_decay: float | None = None
    """Weight decay of the step, if it changes between steps; otherwise None."""
    dp_imbalance: float = 1.0
    """Estimated work of the busiest data-parallel rank, divided by the mean of all ranks."""
    data_wait_ms: float = 0.0
    """Time that this rank's host waited for its micro-batches."""
    graphs: GraphFigures | None = None
    """Graphs of this rank; None without graphs."""
    offload: OffloadFigures | None = None
    """Offload of this rank in the last step with known figures; None without offload."""


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepFacts):
    """One line of the log: the facts of a step, and what was measured.

    Units are tokens, milliseconds, GiB, and nats per target token.
    """

    lm_loss: float
    aux_loss: float
    grad_norm: float
    step_time_ms: float
    docs_per_pack: float
    pack_fill: float
    tokens_per_second: float
    tflops_per_gpu: float
    mfu: float | None
    memory_gib: float
    memory_reserved_gib: float | None
    host_memory_gib: float
    skipped: bool
    """True if the update was not applied."""
    experts: ExpertFigures | None
    params_norm: float | None = None
    """Norm of the parameters after the step; None without ``--log-params-norm``."""
    num_zeros: int | None = None
    """Gradient elements that are exactly zero; None without ``--log-num-zeros-in-grad``."""
    skip_reason: str | None = None
    """Reason why the update was not applied; None if it was applied."""
    mtp_losses: tuple[float, ...] = ()
    """Loss of each depth of multi-token prediction; in the log ``mtp_1_loss``, ``mtp_2_loss``, ..."""
    loss_median: float | None = None
    """Running median of the loss, if the loss is a spike; otherwise None."""
    grad_norm_median: float | None = None
    """Running median of the gradient norm, if the gradient norm is a spike; otherwise None."""
    callback_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that callbacks have added."""

    def as_dict(self) -> dict[str, object]:
        """Return the record as one flat JSON object; optional fields without a value are left out."""
        # A reader of a line looks for the loss first.
        values = {"iteration": self.iteration, "lm_loss": self.lm_loss, **asdict(self)}
        del values["num_packs"], values["flops"]
        for depth, loss in enumerate(values.pop("mtp_losses"), start=1):
            values[f"mtp_{depth}_loss"] = loss
        groups = {
            "expert": values.pop("experts"),
            "graph": values.pop("graphs"),
            "offload": values.pop("offload"),
        }
        for prefix, group in groups.items():
            values |= {f"{prefix}_{name}": value for name, value in (group or {}).items()}
        for name in _WHERE_THERE_IS_ONE:
            if values.get(name, ()) is None:
                del values[name]
        values.update(values.pop("callback_metrics"))
        return values


def step_record(
    facts: StepFacts,
    *,
    loss: float,
    aux_loss: float,
    grad_norm: float,
    seconds: float,
    world_size: int,
    peak: float | None,
    memory: MemoryFigures,
    experts: ExpertFigures | None = None,
    params_norm: float | None = None,
    num_zeros: int | None = None,
    skip_reason: str | None = None,
    mtp_losses: tuple[float, ...] = (),
    medians: Mapping[str, float] | None = None,
) -> StepRecord:
    """Build the record of a step from numbers known on the host and values from the device.

    Args:
        seconds: time from the end of the previous step to the end of this step.
        peak: dense bf16 peak of a GPU in FLOP/s; None reports no MFU.
        experts: figures of the experts; None without experts.
        medians: ``loss`` or ``grad_norm`` -> the running median that it exceeded as a spike.
    """
    flops_per_second = facts.flops / seconds / world_size
    slots = facts.real_tokens + facts.padded_tokens
    spikes = {f"{name}_median": value for name, value in (medians or {}).items()}
    return StepRecord(
        **(vars(facts) | spikes),
        lm_loss=loss,
        aux_loss=aux_loss,
        grad_norm=grad_norm,
        step_time_ms=seconds * 1e3,
        docs_per_pack=facts.num_seqs / max(1, facts.num_packs),
        pack_fill=facts.real_tokens / slots if slots else 0.0,
        tokens_per_second=facts.real_tokens / seconds,
        tflops_per_gpu=flops_per_second / 1e12,
        mfu=flops_per_second / peak if peak else None,
        memory_gib=memory.used,
        memory_reserved_gib=memory.reserved,
        host_memory_gib=memory.host,
        skipped=skip_reason is not None,
        experts=experts,
        params_norm=params_norm,
        num_zeros=num_zeros,
        skip_reason=skip_reason,
        mtp_losses=mtp_losses,
    )
