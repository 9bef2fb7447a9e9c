"""MoE dispatchers that move tokens between the ranks of an expert-parallel group.

Letters: as in `dispatcher`; P rows of a part, L experts of this rank.

[Note: parts of a bounded size]
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
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.distributed.all_to_all import exchange_equal_parts, exchange_rows
from megatron_packed.distributed.collectives import all_gather_rows
from megatron_packed.distributed.differentiable import Group, gather_rows, scatter_rows
from megatron_packed.layers.moe.dispatcher import (
    Dispatched,
    Dispatcher,
    Exchange,
    no_overflow,
    no_rows,
)
from megatron_packed.layers.moe.expert_room import bounded_rows
from megatron_packed.ops.permute.api import permute, unpermute
from megatron_packed.ops.permute.used_rows import UsedRows, used_rows


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that gathers all tokens on every rank of the expert-parallel group.

    Each rank sums its own experts' results for all tokens. A reduce-scatter then sums over the
    ranks.
    """

    def dispatch(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Dispatched:
        group, rows = self.ep.group, self.buffer_rows(x_TD.shape[0])
        x_GD = gather_rows(x_TD, group)
        ids_GK, weights_GK = gathered_routes(topk_expert_ids_TK, topk_weights_TK, group)
        # Ids of experts on other ranks become negative or too large, so `permute` ignores them.
        local_GK = ids_GK - self.ep.rank * self.num_local
        rows_e = self._rows_of_ranks(ids_GK) if self.room.bounds is not None else None
        if rows_e is not None and self.room.exact:
            needed = (
                self.even_rows(x_TD.shape[0]) if rows_e.is_meta else rows_e[self.ep.rank].item()
            )
            rows = self.exact_rows(int(needed), x_TD.shape[0])
        permuted = permute(x_GD, local_GK, self.num_local, rows=rows, backend=self.backend)
        rows_2 = (
            no_rows(x_TD) if rows_e is None else F.pad(rows_e.amax(dim=0, keepdim=True), (0, 1))
        )
        return Dispatched(
            x_RD=permuted.x_RD,
            offsets_E=permuted.offsets_E,
            overflow=(rows_2[0] > rows).float() if self.room.fixed else no_overflow(x_TD),
            rows_2=rows_2,
            permuted=permuted,
            weights_TK=weights_GK,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        return scatter_rows(self.add_up(y_RD, dispatched), self.ep.group)

    def buffer_rows(self, tokens: int) -> int:
        return self.bounded_rows(tokens)

    def _rows_of_ranks(self, ids_GK: Tensor) -> Tensor:
        """Return ``(e,)`` float32 numbers of rows that the experts of each rank need.

        Every rank has all routes, so it returns the same numbers.
        """
        # `rank_S` is -1 for a route without an expert (NOWHERE), which no rank counts.
        rank_S = torch.div(ids_GK.flatten(), self.num_local, rounding_mode="floor")
        counted_Se = rank_S[:, None] == torch.arange(self.ep.size, device=rank_S.device)
        return counted_Se.sum(dim=0).float()


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends each token to the ranks of its experts, once per expert, and back.

    The host reads the numbers of rows from the device once per layer and forward pass. This host
    sync cannot be captured in a CUDA graph, but `BoundedAllToAllDispatcher` can.
    """

    static = False

    def dispatch(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Dispatched:
        permuted = permute(x_TD, topk_expert_ids_TK, self.num_experts, backend=self.backend)
        ranks, local = self.ep.size, self.num_local
        counts_eE = all_gather_rows(permuted.tokens_per_expert_E[None], self.ep.group)
        counts_eeL = counts_eE.view(ranks, ranks, local)  # from rank, to rank, L local experts
        mine_eL = counts_eeL[:, self.ep.rank]
        if counts_eeL.is_meta:
            sent = [self.even_rows(x_TD.shape[0]) // ranks] * ranks
            received = [self.rows_on_meta(x_TD.shape[0]) // ranks] * ranks
        else:
            loads = counts_eeL.sum(dim=2).tolist()  # the host sync
            sent = loads[self.ep.rank]
            received = [row[self.ep.rank] for row in loads]
        x_SD = exchange_rows(permuted.x_RD[: sum(sent)], sent, received, self.ep.group)
        # Rows arrive sorted by sending rank, and for each rank by expert.
        expert_eL = torch.arange(local, device=x_TD.device).expand_as(mine_eL)
        ids_S = torch.repeat_interleave(
            expert_eL.flatten(), mine_eL.flatten(), output_size=sum(received)
        )
        arrived = permute(
            x_SD,
            ids_S[:, None],
            local,
            rows=self.exact_rows(sum(received), x_TD.shape[0]),
            backend=self.backend,
        )
        return Dispatched(
            x_RD=arrived.x_RD,
            offsets_E=arrived.offsets_E,
            overflow=no_overflow(x_TD),
            rows_2=rows_needed(counts_eeL),
            permuted=permuted,
            weights_TK=topk_weights_TK,
            exchange=Exchange(sent, received),
            arrived=arrived,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        assert dispatched.exchange is not None and dispatched.arrived is not None, (
            "combine() needs a result of this dispatcher's dispatch()"
        )
        sent, received = dispatched.exchange
        y_SD = unpermute(y_RD, dispatched.arrived, backend=self.backend)
        back_SD = exchange_rows(y_SD, received, sent, self.ep.group)
        rows = dispatched.permuted.token_R.shape[0]
        return self.add_up(F.pad(back_SD, (0, 0, 0, rows - sum(sent))), dispatched)


class BoundedAllToAllDispatcher(AllToAllDispatcher):
    """`AllToAllDispatcher` with parts of equal, bounded size, which a CUDA graph can capture.

    See [Note: parts of a bounded size] and [Note: bounds of expert buffers].
    """

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
        even = int(self.even_part(tokens))
        counts_ee = counts_eeL.sum(dim=2)
        return used_rows(counts_ee, self.ep.rank, x_RD[0], even, self.part_rows(tokens))

    def part_rows(self, tokens: int) -> int:
        """Return P, the number of rows that this rank sends to each rank.

        Args:
            tokens: token slots that each rank dispatches.
        """
        worst, bounds = self.worst_rows(tokens) // self.ep.size, self.room.bounds
        assert bounds is not None, "this dispatcher is made for bounded buffers only"
        return bounded_rows(self.even_part(tokens), bounds.peer, worst)

    def buffer_rows(self, tokens: int) -> int:
        return self.bounded_rows(tokens)

    def _experts_of_rows(self, mine_eL: Tensor, part: int) -> Tensor:
        """Return ``(e P, 1)`` local expert of each received row; L for a row without a route."""
        ends_eL = mine_eL.cumsum(dim=1).contiguous()
        place_eP = torch.arange(part, device=mine_eL.device).expand(self.ep.size, part)
        return torch.searchsorted(ends_eL, place_eP.contiguous(), right=True).view(-1, 1)


class PaddedAllToAllDispatcher(Dispatcher):
    """`AllToAllDispatcher` that pads the rows of every expert to its capacity.

    ``--moe-pad-expert-input-to-capacity`` selects this dispatcher. All sizes are constant, so there
    is no host sync.
    """

    def dispatch(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Dispatched:
        ranks, local, capacity = self.ep.size, self.num_local, self.capacity(x_TD.shape[0])
        permuted = permute(
            x_TD,
            topk_expert_ids_TK,
            self.num_experts,
            rows_per_expert=capacity,
            backend=self.backend,
        )
        # (E C, D) -> (e, L, C, D), part r for rank r -> (e, L, C, D), part s from rank s
        # -> (L, e C, D)
        received = exchange_equal_parts(
            permuted.x_RD.view(ranks, local, capacity, -1), self.ep.exchange
        )
        ends_L = torch.arange(1, local + 1, dtype=torch.int32, device=x_TD.device)
        return Dispatched(
            x_RD=received.transpose(0, 1).reshape(local * ranks * capacity, -1),
            offsets_E=ends_L * (ranks * capacity),
            overflow=no_overflow(x_TD),
            rows_2=no_rows(x_TD),
            permuted=permuted,
            weights_TK=topk_weights_TK,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        by_expert = y_RD.view(self.num_local, self.ep.size, -1, y_RD.shape[1])  # (L, e, C, D)
        back = exchange_equal_parts(by_expert.transpose(0, 1), self.ep.exchange)
        return self.add_up(back.reshape(dispatched.permuted.x_RD.shape), dispatched)

    def worst_rows(self, tokens: int) -> int:
        return self.num_local * self.ep.size * self.capacity(tokens)


def gathered_routes(
    ids_TK: Tensor, weights_TK: Tensor, group: Group | None
) -> tuple[Tensor, Tensor]:
    """Return ``(G, K)`` int32 expert numbers and weights of the tokens of all ranks."""
    # One gather of float32, which represents every expert number exactly.
    routes_T2K = torch.cat([weights_TK, ids_TK.to(weights_TK.dtype)], dim=1)
    weights_GK, numbers_GK = gather_rows(routes_T2K, group).chunk(2, dim=1)
    return numbers_GK.detach().to(torch.int32), weights_GK


def rows_needed(counts_eeL: Tensor) -> Tensor:
    """Return ``(2,)`` float32: the most rows of a rank's experts, and the most rows of a peer.

    Args:
        counts_eeL: rows from each rank to each rank, by expert of the receiving rank.
    """
    counts_ee = counts_eeL.sum(dim=2)
    return torch.stack([counts_ee.sum(dim=0).amax(), counts_ee.amax()]).float()
