"""Layout of the numbers that one copy a step takes to the host: names, slots, sums over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.spikes import WATCHED
from megatron_packed.optim.statistics import ZEROS_UNIT


class Reduction(Enum):
    """Ranks over which a metric is summed. See [Note: which ranks a sum goes over]."""

    REPLICAS = "replicas"
    """Ranks of ``dp_cp``, together with the gradients; tensor-parallel ranks found the same."""
    ALL_RANKS = "all ranks"
    """As ``REPLICAS``, and before that ranks of ``tp``: each rank has a value of its own."""
    NONE = "none"
    """No sum: every rank computes the same from what was summed."""


class Metric(NamedTuple):
    """Slots of one name in the vector."""

    name: str
    reduction: Reduction
    size: int = 1


class Spike(NamedTuple):
    """A value far above its running median."""

    name: str
    """Name of a field of `StepValues`: ``loss`` or ``grad_norm``."""
    median: float


@dataclass(frozen=True)
class MetricsLayout:
    """Layout of the vector of metrics and of the counters that follow it.

    The vector begins with the extras: slots that lie after the gradients and are summed with them.
    The other metrics are computed after the sums. Counters are exact integers of the E layers.
    """

    world_size: int
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counters that are summed with the gradients: name -> number."""

    @classmethod
    def of(cls, groups: ParallelGroups, model: HybridModel) -> MetricsLayout:
        counters = {"expert_counts": model.num_moe_layers * (model.config.num_experts or 0)}
        if model.config.moe_expert_capacity_factor is not None:
            counters["dropped_assignments"] = model.num_moe_layers
        return cls(groups.world_size, counters)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics in the order of the vector."""
        # Sums of floating-point numbers depend on where a ring cuts the buffer: another order of
        # the extras would change the last bit of a loss.
        return (
            Metric("loss", Reduction.REPLICAS),
            Metric("targets", Reduction.REPLICAS),
            Metric("aux_loss", Reduction.REPLICAS),
            # Signs of ranks lie side by side, so that one collective over ``tp`` sums them.
            Metric("stop_requested", Reduction.ALL_RANKS),
            Metric("weights_moved", Reduction.ALL_RANKS),
            # Of each rank: 1 + the number of its first bad micro-batch, or 0.
            Metric("bad_micro_batches", Reduction.ALL_RANKS, self.world_size),
            Metric("overflow", Reduction.REPLICAS),
            Metric("micro_batches", Reduction.REPLICAS),
            Metric("grad_norm", Reduction.NONE),
            Metric("nonfinite", Reduction.NONE),
            Metric("held", Reduction.NONE),
            Metric("params_norm", Reduction.NONE),
            # A float32 counts up to 2**24: units of that, and the rest.
            Metric("grad_zeros", Reduction.NONE, 2),
            Metric("spikes", Reduction.NONE, len(WATCHED)),
        )

    @cached_property
    def slots(self) -> dict[str, slice]:
        """Slots of each metric in the vector; those of the extras are theirs in the buffer, too."""
        ends = list(accumulate(metric.size for metric in self.metrics))
        return {
            metric.name: slice(end - metric.size, end) for metric, end in zip(self.metrics, ends)
        }

    @property
    def size(self) -> int:
        """Elements of the vector of metrics."""
        return sum(metric.size for metric in self.metrics)

    @property
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
            extras: begins with the summed slots.
            computed: the metrics without a reduction, by name.
        """
        parts = [
            computed[metric.name].reshape(-1)
            for metric in self.metrics
            if metric.reduction is Reduction.NONE
        ]
        # One kernel, into the memory that the copy to the host reads; both addresses are fixed.
        torch.cat([extras[: sum(self.extras.values())], *parts], out=out)

    def counts_of(self, numbers: Sequence[float]) -> dict[str, Sequence[float]]:
        """Return the counters that follow the vector in ``numbers``, by name."""
        borders = list(accumulate(self.counters.values(), initial=self.size))
        return {
            name: numbers[start:end]
            for name, start, end in zip(self.counters, borders, borders[1:])
        }


class StepValues(NamedTuple):
    """Values that a step reports."""

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
    """The step, or one before it, needed more room for experts than there was: it changed nothing
    and must be done again. See [Note: steps that are done again].
    """
    weights_moved: bool = False
    """On some rank, tensors used by graphs were reallocated; that rank ran eagerly."""
    params_norm: float = 0.0
    """Norm of the parameters after the step; 0 where it is not asked for."""
    grad_zeros: int = 0
    """Gradients that are exactly zero; 0 where they are not counted."""
    no_targets: bool = False
    """No micro-batch of any rank had a target token: the step changed nothing."""
    spikes: tuple[Spike, ...] = ()
    """The values of this step that lie far above their running medians."""

    @classmethod
    def from_list(cls, values: Sequence[float]) -> StepValues:
        """Return the values of a vector that `MetricsLayout.write` filled."""
        layout = MetricsLayout(len(values) - MetricsLayout(0).size)
        found = {name: values[slots] for name, slots in layout.slots.items()}
        units, remainder = found["grad_zeros"]
        return cls(
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
        )
