"""Layout of the vector of metrics that one copy per step takes to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lm_head_and_loss import HybridOutput
from megatron_packed.optim.clipping import ZEROS_UNIT
from megatron_packed.optim.spikes import WATCHED

ASSIGNED, DROPPED, ROWS = "expert_counts", "dropped_assignments", "expert_rows"
"""Names of counters. See `MetricsLayout.from_model`."""


class Reduction(Enum):
    """Ranks over which a metric is summed. See [Note: which ranks a sum goes over]."""

    REPLICAS = "replicas"
    """Summed over ``dp_cp`` with the gradients; tensor-parallel ranks have equal values."""
    ALL_RANKS = "all ranks"
    """Summed over ``tp``, then over ``dp_cp``; each rank has a different value."""
    NONE = "none"
    """Not summed: every rank computes the same value from sums."""


class Metric(NamedTuple):
    """Named slots in the vector of metrics."""

    name: str
    reduction: Reduction
    size: int = 1


class Spike(NamedTuple):
    """Value far above its running median."""

    name: str
    """Name of a field of `StepValues`: ``loss`` or ``grad_norm``."""
    median: float


@dataclass(frozen=True)
class MetricsLayout:
    """Layout of the vector of metrics and of the counters that follow it.

    The vector begins with the extras. They are summed together with the gradients, since their
    slots follow the gradients in the flat buffer. The other metrics are computed after the sums.
    Counters are exact integers of the E layers.
    """

    world_size: int
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counters that are summed with the gradients: name -> number of counters."""
    depths: int = 0
    """Number of depths of multi-token prediction."""

    @classmethod
    def from_model(cls, model: HybridModel, groups: ParallelGroups) -> MetricsLayout:
        """Return the layout of a model's metrics and counters on ``groups``."""
        counters = {ASSIGNED: model.num_moe_layers * (model.config.num_experts or 0)}
        if model.config.moe_expert_capacity_factor is not None:
            counters[DROPPED] = model.num_moe_layers
        if model.bounds_expert_buffers:
            counters[ROWS] = 2 * groups.dp_cp.size
        return cls(groups.world_size, counters, model.config.mtp_depths)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics in the order of the vector."""
        # Do not reorder: floating-point sums depend on where a ring all-reduce cuts the buffer, so
        # another order of the extras would change the last bit of a loss.
        return (
            Metric("loss", Reduction.REPLICAS),
            Metric("targets", Reduction.REPLICAS),
            Metric("aux_loss", Reduction.REPLICAS),
            # Metrics with ALL_RANKS are adjacent, so that one collective over ``tp`` sums them.
            Metric("stop_requested", Reduction.ALL_RANKS),
            Metric("weights_moved", Reduction.ALL_RANKS),
            # One slot per rank: 1 + the number of the rank's first bad micro-batch, or 0.
            Metric("bad_micro_batches", Reduction.ALL_RANKS, self.world_size),
            Metric("overflow", Reduction.REPLICAS),
            Metric("micro_batches", Reduction.REPLICAS),
            *self._of_depths,
            Metric("grad_norm", Reduction.NONE),
            Metric("nonfinite", Reduction.NONE),
            Metric("held", Reduction.NONE),
            Metric("params_norm", Reduction.NONE),
            # A float32 counts exactly only up to 2**24, so the count is split into multiples of
            # 2**24 and a remainder.
            Metric("grad_zeros", Reduction.NONE, 2),
            Metric("spikes", Reduction.NONE, len(WATCHED)),
        )

    @property
    def _of_depths(self) -> tuple[Metric, ...]:
        if not self.depths:
            return ()
        return (Metric("mtp_losses", Reduction.REPLICAS, self.depths),)

    @cached_property
    def slots(self) -> dict[str, slice]:
        """Slots of each metric in the vector; extras have the same slots in the buffer's tail."""
        ends = list(accumulate(metric.size for metric in self.metrics))
        return {
            metric.name: slice(end - metric.size, end) for metric, end in zip(self.metrics, ends)
        }

    @cached_property
    def size(self) -> int:
        """Elements of the vector of metrics."""
        return sum(metric.size for metric in self.metrics)

    @cached_property
    def extras(self) -> dict[str, int]:
        """Float32 slots that are summed with the gradients: name -> number of elements."""
        return {
            metric.name: metric.size
            for metric in self.metrics
            if metric.reduction is not Reduction.NONE
        }

    @property
    def signs(self) -> slice:
        """Slots that are summed over all ranks."""
        names = [m.name for m in self.metrics if m.reduction is Reduction.ALL_RANKS]
        return slice(self.slots[names[0]].start, self.slots[names[-1]].stop)

    def write(self, extras: Tensor, computed: Mapping[str, Tensor], out: Tensor) -> None:
        """Fill the vector ``out``.

        Args:
            extras: tail of the gradient buffer, which begins with the summed slots.
            computed: name -> value of the metrics without a reduction.
            out: the vector.
        """
        parts = [
            computed[metric.name].reshape(-1)
            for metric in self.metrics
            if metric.reduction is Reduction.NONE
        ]
        # One kernel writes into the memory that is copied to the host. Source and destination have
        # fixed addresses, so a graph can capture it.
        torch.cat([extras[: sum(self.extras.values())], *parts], out=out)

    def values_of(self, numbers: Sequence[float]) -> StepValues:
        """Return the values in a vector that `write` has filled; further numbers may follow it."""
        found = {name: numbers[slots] for name, slots in self.slots.items()}
        units, remainder = found["grad_zeros"]
        return StepValues(
            loss=found["loss"][0],
            aux_loss=found["aux_loss"][0],
            grad_norm=found["grad_norm"][0],
            nonfinite=found["nonfinite"][0] != 0,
            stop_requested=found["stop_requested"][0] != 0,
            bad_micro_batches={
                rank: int(number) - 1
                for rank, number in enumerate(found["bad_micro_batches"])
                if number > 0
            },
            held=found["held"][0] != 0,
            weights_moved=found["weights_moved"][0] != 0,
            params_norm=found["params_norm"][0],
            grad_zeros=int(units) * ZEROS_UNIT + int(remainder),
            no_targets=found["targets"][0] == 0,
            spikes=tuple(
                Spike(name, median)
                for name, median in zip(WATCHED, found["spikes"], strict=True)
                if median != 0
            ),
            mtp_losses=tuple(found.get("mtp_losses", ())),
        )

    def counts_of(self, numbers: Sequence[float]) -> dict[str, Sequence[float]]:
        """Return the counters that follow the vector in ``numbers``, by name."""
        borders = list(accumulate(self.counters.values(), initial=self.size))
        return {
            name: numbers[start:end]
            for name, start, end in zip(self.counters, borders, borders[1:])
        }


class StepValues(NamedTuple):
    """Values that a step reports to the host."""

    loss: float
    aux_loss: float
    grad_norm: float
    nonfinite: bool
    stop_requested: bool
    bad_micro_batches: dict[int, int]
    """Rank -> number (from 0) of the first micro-batch in which it saw a non-finite loss or input
    gradient.
    """
    held: bool = False
    """An expert buffer overflowed in this step or in an earlier held step: the step changed nothing
    and must be repeated. See [Note: steps that are done again].
    """
    weights_moved: bool = False
    """On some rank, tensors used by graphs were reallocated; that rank ran eagerly."""
    params_norm: float = 0.0
    """Norm of the parameters after the step; 0 if it is not requested."""
    grad_zeros: int = 0
    """Gradient elements that are exactly zero; 0 if they are not counted."""
    no_targets: bool = False
    """No micro-batch of any rank had a target token: the step changed nothing."""
    spikes: tuple[Spike, ...] = ()
    """Values of this step that are far above their running medians."""
    mtp_losses: tuple[float, ...] = ()
    """Loss of each depth of multi-token prediction."""

    @classmethod
    def from_list(cls, values: Sequence[float], depths: int = 0) -> StepValues:
        """Return the values in a vector that `MetricsLayout.write` has filled.

        Args:
            depths: number of depths of multi-token prediction.
        """
        fixed = MetricsLayout(0, depths=depths).size
        return MetricsLayout(len(values) - fixed, depths=depths).values_of(values)


class ExpertCounts:
    """Counters of the E layers, which are zeroed with the gradients and summed with them.

    The rows that expert buffers need are maxima, not sums. So each rank of ``dp_cp`` has separate
    counters, and the sum over ranks leaves the maximum of each rank.

    Args:
        buffers: flat buffers with the counters.
        groups: process groups of this rank.
    """

    def __init__(self, buffers: FlatBuffers, groups: ParallelGroups) -> None:
        self._counters = buffers.counters
        # One at this rank's counters, so that the counters of other ranks stay zero here.
        self._own_R2 = torch.zeros(groups.dp_cp.size, 2, device=buffers.device)
        self._own_R2[groups.dp_cp.rank] = 1

    def add(self, output: HybridOutput) -> None:
        self._counters[ASSIGNED].add_(output.tokens_per_expert)
        if DROPPED in self._counters:
            self._counters[DROPPED].add_(output.dropped_assignments)
        if ROWS in self._counters:
            self._counters[ROWS].maximum_(self._own_R2 * output.expert_rows)

    def sums(self) -> dict[str, Tensor]:
        """Return the counters after the sum over ranks, by name."""
        return {name: counter.value() for name, counter in self._counters.items()}


def most_rows(rows: Sequence[float]) -> tuple[float, float]:
    """Return the most rows of a rank and of a peer in a step.

    Args:
        rows: counters of the name `ROWS` that the host received (`MetricsLayout.counts_of`).
    """
    return max(rows[::2]), max(rows[1::2])
