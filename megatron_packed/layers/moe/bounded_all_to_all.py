"""All-to-all dispatcher with parts of equal, bounded size, which a CUDA graph can capture.

Letters: as in `dispatcher`; P rows of a part, L experts of this rank.

A rank sends one part of P rows to each rank. The used rows of a part come first, sorted by expert, and
the other rows are zeros. So no rank asks its device for a size. Symmetric memory leaves out most of
the other rows, so they are undefined where they arrive; no sum reads them. A gather of ``(e, E)`` integers gives
each rank the counts of all ranks. The counts determine the expert of each received row, and whether a
part or a buffer of any rank is too small.

The experts' rows have the order of `AllToAllDispatcher`: by expert, then by the sending rank, then by
token. So the results are the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.distributed.all_to_all import exchange_equal_parts
from megatron_packed.distributed.collectives import all_gather_rows
from megatron_packed.layers.moe.dispatcher import AllToAllDispatcher, Dispatched, rows_needed
from megatron_packed.layers.moe.expert_room import bounded_rows
from megatron_packed.ops.permute.api import permute, unpermute
from megatron_packed.ops.permute.used_rows import UsedRows, used_rows


class BoundedAllToAllDispatcher(AllToAllDispatcher):
    """`AllToAllDispatcher` with static sizes. See [Note: bounds of expert buffers]."""

    static = True

    def dispatch(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Dispatched:
        if not self.room.fixed:
            return super().dispatch(x_TD, topk_expert_ids_TK, topk_weights_TK)
        ranks, tokens = self.ep.size, x_TD.shape[0]
        part, rows = self.part_rows(tokens), self.buffer_rows(tokens)
        permuted = permute(
            x_TD,
            topk_expert_ids_TK,
            self.num_experts,
            rows_per_part=(ranks, part),
            backend=self.backend,
        )
        counts_eE = all_gather_rows(permuted.tokens_per_expert_E[None], self.ep.group)
        counts_eeL = counts_eE.view(ranks, ranks, self.num_local)
        # (e P, D) -> (e, P, D), part r for rank r -> (e, P, D), part s from rank s -> (e P, D)
        used = self._used(counts_eeL, permuted.x_RD, tokens)
        parts = permuted.x_RD.view(ranks, part, -1)
        x_SD = exchange_equal_parts(parts, self.ep.exchange, used).flatten(0, 1)
        ids_S1 = self._experts_of_rows(counts_eeL[:, self.ep.rank], part)
        arrived = permute(x_SD, ids_S1, self.num_local, rows=rows, backend=self.backend)
        rows_2 = rows_needed(counts_eeL)
        return Dispatched(
            x_RD=arrived.x_RD,
            offsets_E=arrived.offsets_E,
            overflow=((rows_2[0] > rows) | (rows_2[1] > part)).float(),
            rows_2=rows_2,
            permuted=permuted,
            weights_TK=topk_weights_TK,
            arrived=arrived,
            used=used,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        if dispatched.exchange is not None:
            return super().combine(y_RD, dispatched)
        arrived = dispatched.arrived
        assert arrived is not None, "combine() needs a result of dispatch()"
        y_SD = unpermute(y_RD, arrived, backend=self.backend)
        used = None if dispatched.used is None else dispatched.used.reversed
        parts = y_SD.view(self.ep.size, -1, y_SD.shape[1])
        back = exchange_equal_parts(parts, self.ep.exchange, used)
        return self.add_up(back.flatten(0, 1), dispatched)

    def _used(self, counts_eeL: Tensor, x_RD: Tensor, tokens: int) -> UsedRows | None:
        """Return the used rows of the parts: an even share is copied in any case.

        The result is None for a collective, which exchanges all rows.
        """
        if self.ep.exchange is None or self.ep.exchange.memory is None:
            return None
        even = tokens * self.config.moe_router_topk // self.ep.size
        counts_ee = counts_eeL.sum(dim=2)
        return used_rows(counts_ee, self.ep.rank, x_RD[0], even, self.part_rows(tokens))

    def part_rows(self, tokens: int) -> int:
        """Return P, the number of rows that this rank sends to each rank.

        Args:
            tokens: token slots that each rank dispatches.
        """
        worst, bounds = self.worst_rows(tokens) // self.ep.size, self.room.bounds
        assert bounds is not None, "this dispatcher is made for bounded buffers only"
        even = tokens * self.config.moe_router_topk / self.ep.size
        return bounded_rows(even, bounds.peer, worst)

    def buffer_rows(self, tokens: int) -> int:
        return self.bounded_rows(tokens)

    def _experts_of_rows(self, mine_eL: Tensor, part: int) -> Tensor:
        """Return ``(e P, 1)`` local expert of each received row; L for a row without a route."""
        ends_eL = mine_eL.cumsum(dim=1).contiguous()
        place_eP = torch.arange(part, device=mine_eL.device).expand(self.ep.size, part)
        return torch.searchsorted(ends_eL, place_eP.contiguous(), right=True).view(-1, 1)
