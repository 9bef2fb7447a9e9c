"""Counts of E layers in one step: assignments, dropped assignments, and rows of expert buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.lm_head_and_loss import HybridOutput

ASSIGNED, DROPPED, ROWS = "expert_counts", "dropped_assignments", "expert_rows"
"""Names of counters. See `MetricsLayout.of`."""


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


def most_rows(counters: Mapping[str, Sequence[float]]) -> tuple[float, float] | None:
    """Return the most rows of a rank and of a peer in a step; None without bounds.

    Args:
        counters: counters that the host received (`MetricsLayout.counts_of`).
    """
    rows = counters.get(ROWS)
    return None if rows is None else (max(rows[::2]), max(rows[1::2]))
