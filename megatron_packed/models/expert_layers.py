"""E layers of a model taken together: their reports, the bounds of their buffers, their biases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.hybrid_layer import HybridLayers, HybridMoELayer
from megatron_packed.layers.moe.dispatcher import ExpertBuffer
from megatron_packed.layers.moe.expert_room import ROWS_OF_LARGE_TILES, ExpertRoom, Load
from megatron_packed.layers.moe.global_balance import GlobalBalance
from megatron_packed.layers.moe.layer import MoEReport
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.moe.router import update_expert_bias

if TYPE_CHECKING:
    from megatron_packed.models.multi_token_prediction import MultiTokenPrediction


class ExpertTotals(NamedTuple):
    """Totals of all E layers."""

    aux_loss: Tensor
    counts: tuple[Tensor, Tensor, Tensor, Tensor]
    """Fields of `HybridOutput` from ``tokens_per_expert`` to ``expert_rows``."""


def _shared_room(
    layers: Sequence[HybridMoELayer],
    config: ModelConfig,
    ep: ExpertParallel,
    device: torch.device | str,
) -> ExpertRoom:
    """Return the bounds of expert buffers, the same object for all E layers."""
    factor = None if ep.group is None else config.moe_expert_rank_capacity_factor
    room = ExpertRoom.from_factor(factor)
    if torch.device(device).type == "cuda":
        room.rows_per_expert = ROWS_OF_LARGE_TILES
    for layer in layers:
        layer.mixer.dispatcher.room = room
    return room


class ExpertLayers:
    """Base class of models with E layers: properties and methods for all E layers together."""

    config: ModelConfig
    cp: ContextParallel
    ep: ExpertParallel
    dtype: torch.dtype
    layers: HybridLayers
    moe_layers: list[HybridMoELayer]
    num_moe_layers: int
    expert_room: ExpertRoom
    global_balance: GlobalBalance | None
    mtp: MultiTokenPrediction | None
    training: bool

    def _join_experts(self, groups: ParallelGroups | None, device: torch.device | str) -> None:
        """Set the attributes that all E layers share; call it after the layers are built."""
        self.moe_layers = [layer for layer in self.layers if isinstance(layer, HybridMoELayer)]
        self.num_moe_layers = len(self.moe_layers)
        self.expert_room = _shared_room(self.moe_layers, self.config, self.ep, device)
        self.global_balance = GlobalBalance.from_config(
            self.config, len(self.moe_layers), groups, device
        )

    def totals_of(self, reports: Sequence[MoEReport]) -> ExpertTotals:
        """Combine the reports of at least one E layer."""
        overflow = torch.stack([report.overflow for report in reports]).amax()
        rows_2 = reports[0].rows_2
        if self.expert_room.bounds is not None:
            rows_2 = torch.stack([report.rows_2 for report in reports]).amax(dim=0)
            agreed_3 = self.ep.agree(torch.cat([overflow.view(1), rows_2]))
            overflow, rows_2 = agreed_3[0], agreed_3[1:]
        aux_loss = torch.stack([report.aux_loss for report in reports]).sum()
        if not self.training:
            # Replays of graphs, which are captured in training mode, report losses of evaluations.
            aux_loss = torch.zeros_like(aux_loss)
        elif self.global_balance is not None:
            aux_loss = aux_loss + self.global_balance([report.balance for report in reports])
        counts_LE = torch.stack([report.tokens_per_expert_E for report in reports])
        dropped_L = torch.stack([report.dropped for report in reports])
        return ExpertTotals(aux_loss, (counts_LE, dropped_L, overflow, rows_2))

    def expert_buffer(self, total_tokens: int) -> ExpertBuffer | None:
        """Return the sizes of the static buffer for rows of experts; None without such a buffer.

        Args:
            total_tokens: number of slots of a pack.
        """
        if not self.moe_layers or not self.moe_layers[0].mixer.dispatcher.static:
            return None
        row = self.config.routed_width * self.dtype.itemsize
        return self.moe_layers[0].mixer.dispatcher.buffer(self._dispatched(total_tokens), row)

    def even_expert_rows(self, total_tokens: int) -> Load:
        """Return the rows of the even shares of a pack. See [Note: bounds of expert buffers]."""
        rows = self._dispatched(total_tokens) * self.config.moe_router_topk
        return Load(rows, rows / self.ep.size)

    def _dispatched(self, total_tokens: int) -> int:
        """Return the number of token slots of a pack that this rank dispatches."""
        return total_tokens // (self.cp.size * self.ep.token_parts)

    @property
    def bounds_expert_buffers(self) -> bool:
        """True if a pack can need more rows of experts than the expert buffers have."""
        return bool(self.moe_layers) and self.expert_room.bounds is not None

    @contextmanager
    def full_expert_buffers(self) -> Iterator[None]:
        """Give every bounded expert buffer the size that it needs inside a ``with`` block.

        ``expert_overflow`` is then 0, but the host waits for the device in each E layer. Use it for a
        micro-batch that overflowed: discard its results and run it again inside, on all ranks.
        """
        self.expert_room.exact = True
        try:
            yield
        finally:
            self.expert_room.exact = False

    def update_expert_bias(self, tokens_per_expert: Tensor, *, skip: Tensor | None = None) -> None:
        """Adjust the expert biases of all E layers after an optimizer step, if there are any.

        Args:
            tokens_per_expert: ``(L, E)`` or flat: assignments of the global batch, summed over
                ranks and micro-batches.
            skip: 0-d bool on the device. True leaves the biases unchanged, because the optimizer
                step was not taken either.
        """
        all_biases = [layer.mixer.router.expert_bias for layer in self.moe_layers]
        biases: Sequence[Tensor] = [bias for bias in all_biases if bias is not None]
        if biases:
            counts_LE = tokens_per_expert.view(len(biases), -1)
            if self.mtp is not None and self.config.mtp_use_repeated_layer:
                biases, counts_LE = self.mtp.joined_counts(biases, counts_LE)
            update_expert_bias(biases, counts_LE, self.config.moe_router_bias_update_rate, skip)
