"""Bounds of expert buffers in a run: first observation of the routing, and raises after overflows.

[Note: bounds that follow the routing]
With ``--moe-expert-rank-capacity-factor auto`` a run sets its bounds in two places. Before the first
capture, packs of the next step pass through the model once, without gradients, and the bounds
get head room over the rows that they need. After a step that overflowed, the step is repeated, its
true loads arrive with its metrics, and the bounds that they exceed are raised before the next step.
The loads are sums over all ranks, so all ranks raise the same bounds and capture together. A
checkpoint keeps the bounds, so a resumed run begins with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from megatron_packed.distributed.collectives import all_reduce_max
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import generators_kept
from megatron_packed.layers.moe.expert_room import ExpertRoom, Load
from megatron_packed.models.metrics_layout import ROWS, most_rows
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.train_step import TrainStep

_MOST_MICRO_BATCHES = 8
"""Micro-batches of a rank whose routing is observed before the first capture."""


@dataclass
class ExpertBounds:
    """Bounds of the expert buffers of a run. See [Note: bounds that follow the routing]."""

    step: TrainStep
    groups: ParallelGroups
    packs_per_step: int
    """Packs of a step on all ranks, for captures."""
    say: Callable[[str], None]
    """Function that prints a line."""

    @property
    def room(self) -> ExpertRoom:
        return self.step.model.expert_room

    @property
    def unknown(self) -> bool:
        """True if the bounds follow the routing and no routing was observed yet."""
        return self.room.measured and not self.room.observed

    @torch.no_grad()
    def observe(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the bounds from the routing of some micro-batches; a collective of all ranks.

        Args:
            micro_batches: micro-batches of this rank; all ranks have equally many.
        """
        model, device = self.step.model, self.groups.device
        most_2 = torch.zeros(2, dtype=torch.float32, device=device)
        # The model stays in training mode: only then do the depths of multi-token prediction run, and
        # a balanced routing is forced. The generators are restored, so this pass takes no numbers
        # from the dropout masks of the run.
        with model.full_expert_buffers(), generators_kept(device):
            for micro_batch in micro_batches[:_MOST_MICRO_BATCHES]:
                output = model(micro_batch.to(device))
                most_2 = torch.maximum(most_2, output.expert_rows)
        # The maximum over all ranks, so that all ranks choose the same bounds.
        most_2 = all_reduce_max(most_2, self.groups.world_group)
        load = self.room.load_of(most_2.tolist())
        self.room.fit(load)
        self.say(f"expert buffers: the first packs need {_words(load)}; {self._bounds}")

    def make_room(self) -> None:
        """Free the graphs before a step is repeated, if they will be captured again after it.

        A graph pool holds the activations of a micro-batch, and the repeated step needs memory for
        the same activations.
        """
        if self.room.measured and self.step.graphs is not None:
            self.step.buffers.wait_params()  # gathers of parameters may still run on the device
            self.step.graphs.forget()

    def raise_for(self, counters: Mapping[str, Sequence[float]]) -> None:
        """Raise the bounds for the rows that a repeated step needed, and capture graphs again.

        Args:
            counters: counters of the repeated step, which are equal on all ranks.
        """
        if ROWS not in counters or not self.room.measured:
            return
        load = self.room.load_of(most_rows(counters[ROWS]))
        self.room.raise_to(load)
        begun, graphs = perf_counter(), self.step.graphs
        again = ""
        if graphs is not None:
            from megatron_packed.training.build_graphs import capture_graphs

            # Captures run on another stream, and the repeated step may still gather parameters.
            self.step.buffers.wait_params()
            capture_graphs(graphs, self.step, self.packs_per_step, self.groups)
            again = f", and CUDA graphs were captured again in {perf_counter() - begun:.1f} s"
        self.say(f"expert buffers: the repeated step needed {_words(load)}; {self._bounds}{again}")

    @property
    def _bounds(self) -> str:
        assert self.room.bounds is not None
        return f"the bound is now {_words(self.room.bounds)}"


def _words(load: Load) -> str:
    peer = f" and {load.peer:.2f} of an even part" if load.peer else ""
    return f"{load.rank:.2f} of an even share{peer}"
