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

from megatron_packed.distributed.all_to_all import (
    InMotion,
    Overlaps,
    parts_in_motion,
    rows_in_motion,
)
from megatron_packed.distributed.collectives import all_gather_rows
from megatron_packed.distributed.differentiable import Group, gather_rows, scatter_rows
from megatron_packed.layers.moe.dispatcher import (
    Arrival,
    Dispatched,
    Dispatcher,
    Exchange,
    no_overflow,
    no_rows,
)
from megatron_packed.layers.moe.expert_room import bounded_rows
from megatron_packed.ops.permute.api import Permuted, permute, unpermute
from megatron_packed.ops.permute.used_rows import UsedRows, used_rows


class ExchangingDispatcher(Dispatcher):
    """Base class of the dispatchers that exchange rows, each rank with each other one."""

    overlaps_weights = True

    def _rows_in_motion(
        self, sent: list[int], received: list[int], *, to_experts: bool
    ) -> InMotion:
        """Return rows in motion: ``sent[r]`` of them go to rank r."""
        assert self.ep.group is not None, "ranks that exchange rows have a group"
        return rows_in_motion(sent, received, self.ep.group, overlaps=self._overlaps(to_experts))

    def _in_motion(self, used: UsedRows | None = None, *, to_experts: bool) -> InMotion:
        """Return parts ``(e, ...)`` in motion: part r goes to rank r."""
        assert self.ep.exchange is not None, "ranks that exchange parts have an exchange"
        return parts_in_motion(self.ep.exchange, used, overlaps=self._overlaps(to_experts))

    def _overlaps(self, to_experts: bool) -> Overlaps:
        """Return whether other work runs beside an exchange. See [Note: experts in parts].

        Gradients of the rows that went to experts travel beside the products for the gradients of
        the experts' weights, also in one part.
        """
        several = self.parts > 1
        return Overlaps(several, several or to_experts)

    def worst_part(self, tokens: int) -> int:
        """Return the largest number of rows that a rank can send to another one.

        Args:
            tokens: token slots that each rank dispatches.
        """
        return self.worst_rows(tokens) // self.ep.size

    def part_rows(self, tokens: int) -> int:
        """Return P, the number of rows that this rank sends to each rank, with bounds of buffers.

        Args:
            tokens: token slots that each rank dispatches.
        """
        bounds = self.room.bounds
        assert bounds is not None, "only parts of bounded buffers have a size"
        return bounded_rows(self.even_part(tokens), bounds.peer, self.worst_part(tokens))

    def _arrived_in_bounds(
        self,
        permuted: Permuted,
        arrived: Permuted,
        weights_TK: Tensor,
        rows_2: Tensor,
        *,
        tokens: int,
        slots: int,
        used: UsedRows | None,
    ) -> Dispatched:
        """Return a part of bounded size. See [Note: parts of a bounded size].

        Args:
            permuted: rows that this rank sent, equally many to each rank.
            arrived: received rows, sorted by expert.
            weights_TK: weights with which this rank adds up the results.
            rows_2: rows that the routing of the part needs, as `rows_needed` returns them.
            tokens: token slots of the part.
            slots: token slots of the pack.
            used: used rows of the exchange.
        """
        room = (arrived.token_R.shape[0], permuted.token_R.shape[0] // self.ep.size)
        return Dispatched(
            x_RD=arrived.x_RD,
            offsets_E=arrived.offsets_E,
            overflow=((rows_2[0] > room[0]) | (rows_2[1] > room[1])).float(),
            rows_2=of_pack(rows_2, tokens, slots),
            permuted=permuted,
            weights_TK=weights_TK,
            arrived=arrived,
            used=used,
        )


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that gathers all tokens on every rank of the expert-parallel group.

    Each rank sums its own experts' results for all tokens. A reduce-scatter then sums over the
    ranks.
    """

    in_parts = False

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
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
        dispatched = Dispatched(
            x_RD=permuted.x_RD,
            offsets_E=permuted.offsets_E,
            overflow=(rows_2[0] > rows).float() if self.room.fixed else no_overflow(x_TD),
            rows_2=rows_2,
            permuted=permuted,
            weights_TK=weights_GK,
        )
        return [lambda: dispatched]

    def send_back(self, y_RD: Tensor, dispatched: Dispatched) -> Arrival[Tensor]:
        return lambda: scatter_rows(self.add_up(y_RD, dispatched), self.ep.group)

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


class AllToAllDispatcher(ExchangingDispatcher):
    """Dispatcher that sends each token to the ranks of its experts, once per expert, and back.

    The host reads the numbers of rows from the device once per layer and forward pass. This host
    sync cannot be captured in a CUDA graph, but `BoundedAllToAllDispatcher` can.
    """

    static = False

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        permuted = [
            permute(*part, self.num_experts, backend=self.backend)
            for part in zip(self.split(x_TD), self.split(topk_expert_ids_TK), strict=True)
        ]
        counts = self.counts_of_all(permuted)
        # The host sync, for all parts.
        loads = None if x_TD.is_meta else torch.stack(counts).sum(dim=3).tolist()
        return [
            self._start(
                own, weights_TK, counts_eeL, None if loads is None else loads[number], len(x_TD)
            )
            for number, (own, weights_TK, counts_eeL) in enumerate(
                zip(permuted, self.split(topk_weights_TK), counts, strict=True)
            )
        ]

    def counts_of_all(self, permuted: list[Permuted]) -> list[Tensor]:
        """Return for each part ``(e, e, L)`` rows from each rank to each rank, by local expert."""
        counts_NE = torch.stack([part.tokens_per_expert_E for part in permuted])
        counts_eNE = all_gather_rows(counts_NE[None], self.ep.group)
        ranks, local = self.ep.size, self.num_local
        # (e, N, E) -> (e, N, e, L) -> N times (e, e, L): from rank, to rank, L local experts
        return list(counts_eNE.view(ranks, len(permuted), ranks, local).unbind(dim=1))

    def _start(
        self,
        permuted: Permuted,
        weights_TK: Tensor,
        counts_eeL: Tensor,
        loads: list[list[int]] | None,
        slots: int,
    ) -> Arrival[Dispatched]:
        """Start to send a part; ``loads[r][s]`` rows go from rank r to rank s, of ``slots`` slots."""
        ranks, local, tokens = self.ep.size, self.num_local, weights_TK.shape[0]
        if loads is None:
            sent = [self.even_rows(tokens) // ranks] * ranks
            received = [self.rows_on_meta(tokens) // ranks] * ranks
        else:
            sent = loads[self.ep.rank]
            received = [row[self.ep.rank] for row in loads]
        moving = self._rows_in_motion(sent, received, to_experts=True)
        moving.send(permuted.x_RD[: sum(sent)])

        def arrive() -> Dispatched:
            # Rows arrive sorted by sending rank, and for each rank by expert.
            x_SD, mine_eL = moving.receive(), counts_eeL[:, self.ep.rank]
            expert_eL = torch.arange(local, device=x_SD.device).expand_as(mine_eL)
            ids_S = torch.repeat_interleave(
                expert_eL.flatten(), mine_eL.flatten(), output_size=sum(received)
            )
            arrived = permute(
                x_SD,
                ids_S[:, None],
                local,
                rows=self.exact_rows(sum(received), tokens),
                backend=self.backend,
            )
            return Dispatched(
                x_RD=arrived.x_RD,
                offsets_E=arrived.offsets_E,
                overflow=no_overflow(x_SD),
                rows_2=of_pack(rows_needed(counts_eeL), tokens, slots),
                permuted=permuted,
                weights_TK=weights_TK,
                exchange=Exchange(sent, received),
                arrived=arrived,
            )

        return arrive

    def send_back(self, y_RD: Tensor, dispatched: Dispatched) -> Arrival[Tensor]:
        assert dispatched.exchange is not None and dispatched.arrived is not None, (
            "send_back() needs an arrived part of this dispatcher"
        )
        sent, received = dispatched.exchange
        y_SD = unpermute(y_RD, dispatched.arrived, backend=self.backend)
        moving = self._rows_in_motion(received, sent, to_experts=False).send(y_SD)
        unused = dispatched.permuted.token_R.shape[0] - sum(sent)
        return lambda: self.add_up(F.pad(moving.receive(), (0, 0, 0, unused)), dispatched)


class BoundedAllToAllDispatcher(AllToAllDispatcher):
    """`AllToAllDispatcher` with parts of equal, bounded size, which a CUDA graph can capture.

    See [Note: parts of a bounded size] and [Note: bounds of expert buffers].
    """

    static = True

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        if not self.room.fixed:
            return super().send(x_TD, topk_expert_ids_TK, topk_weights_TK)
        permuted = [
            permute(
                part_TD,
                ids_TK,
                self.num_experts,
                rows_per_part=(self.ep.size, self.part_rows(len(part_TD))),
                backend=self.backend,
            )
            for part_TD, ids_TK in zip(
                self.split(x_TD), self.split(topk_expert_ids_TK), strict=True
            )
        ]
        counts, weights = self.counts_of_all(permuted), self.split(topk_weights_TK)
        parts = zip(permuted, weights, counts, strict=True)
        return [self._start_bounded(*part, len(x_TD)) for part in parts]

    def _start_bounded(
        self, permuted: Permuted, weights_TK: Tensor, counts_eeL: Tensor, slots: int
    ) -> Arrival[Dispatched]:
        """Start to send a part of ``slots`` slots."""
        tokens = weights_TK.shape[0]
        part, rows = self.part_rows(tokens), self.buffer_rows(tokens)
        used = self._used(counts_eeL, permuted.x_RD, tokens)
        moving = self._in_motion(used, to_experts=True)
        # (e P, D) -> (e, P, D), part r for rank r
        moving.send(permuted.x_RD.view(self.ep.size, part, -1))

        def arrive() -> Dispatched:
            # (e, P, D), part s from rank s -> (e P, D)
            x_SD = moving.receive().flatten(0, 1)
            ids_S1 = self._experts_of_rows(counts_eeL[:, self.ep.rank], part)
            arrived = permute(x_SD, ids_S1, self.num_local, rows=rows, backend=self.backend)
            return self._arrived_in_bounds(
                permuted,
                arrived,
                weights_TK,
                rows_needed(counts_eeL),
                tokens=tokens,
                slots=slots,
                used=used,
            )

        return arrive

    def send_back(self, y_RD: Tensor, dispatched: Dispatched) -> Arrival[Tensor]:
        if dispatched.exchange is not None:
            return super().send_back(y_RD, dispatched)
        arrived = dispatched.arrived
        assert arrived is not None, "send_back() needs an arrived part"
        y_SD = unpermute(y_RD, arrived, backend=self.backend)
        used = None if dispatched.used is None else dispatched.used.reversed
        moving = self._in_motion(used, to_experts=False)
        moving.send(y_SD.view(self.ep.size, -1, y_SD.shape[1]))
        return lambda: self.add_up(moving.receive().flatten(0, 1), dispatched)

    def _used(self, counts_eeL: Tensor, x_RD: Tensor, tokens: int) -> UsedRows | None:
        """Return the used rows of the parts: an even share is copied in any case.

        The result is None for a collective, which exchanges all rows.
        """
        if self.ep.exchange is None or self.ep.exchange.memory is None:
            return None
        even = int(self.even_part(tokens))
        counts_ee = counts_eeL.sum(dim=2)
        return used_rows(counts_ee, self.ep.rank, x_RD[0], even, self.part_rows(tokens))

    def buffer_rows(self, tokens: int) -> int:
        return self.bounded_rows(tokens)

    def _experts_of_rows(self, mine_eL: Tensor, part: int) -> Tensor:
        """Return ``(e P, 1)`` local expert of each received row; L for a row without a route."""
        ends_eL = mine_eL.cumsum(dim=1).contiguous()
        place_eP = torch.arange(part, device=mine_eL.device).expand(self.ep.size, part)
        return torch.searchsorted(ends_eL, place_eP.contiguous(), right=True).view(-1, 1)


class PaddedAllToAllDispatcher(ExchangingDispatcher):
    """`AllToAllDispatcher` that pads the rows of every expert to its capacity.

    ``--moe-pad-expert-input-to-capacity`` selects this dispatcher. All sizes are constant, so there
    is no host sync.
    """

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        parts = map(self.split, (x_TD, topk_expert_ids_TK, topk_weights_TK))
        return [self._start(*part) for part in zip(*parts, strict=True)]

    def _start(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Arrival[Dispatched]:
        """Start to send a part."""
        ranks, local, capacity = self.ep.size, self.num_local, self.capacity(x_TD.shape[0])
        permuted = permute(
            x_TD, ids_TK, self.num_experts, rows_per_expert=capacity, backend=self.backend
        )
        # (E C, D) -> (e, L, C, D), part r for rank r -> (e, L, C, D), part s from rank s
        # -> (L, e C, D)
        moving = self._in_motion(to_experts=True).send(
            permuted.x_RD.view(ranks, local, capacity, -1)
        )

        def arrive() -> Dispatched:
            received = moving.receive()
            ends_L = torch.arange(1, local + 1, dtype=torch.int32, device=received.device)
            return Dispatched(
                x_RD=received.transpose(0, 1).reshape(local * ranks * capacity, -1),
                offsets_E=ends_L * (ranks * capacity),
                overflow=no_overflow(received),
                rows_2=no_rows(received),
                permuted=permuted,
                weights_TK=weights_TK,
            )

        return arrive

    def send_back(self, y_RD: Tensor, dispatched: Dispatched) -> Arrival[Tensor]:
        by_expert = y_RD.view(self.num_local, self.ep.size, -1, y_RD.shape[1])  # (L, e, C, D)
        moving = self._in_motion(to_experts=False).send(by_expert.transpose(0, 1))
        shape = dispatched.permuted.x_RD.shape
        return lambda: self.add_up(moving.receive().reshape(shape), dispatched)

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


def of_pack(rows_2: Tensor, tokens: int, slots: int) -> Tensor:
    """Return the rows that a pack of ``slots`` needs if all parts need those of ``tokens`` slots."""
    return rows_2 if tokens == slots else rows_2 * (slots / tokens)


def rows_needed(counts_eeL: Tensor) -> Tensor:
    """Return ``(2,)`` float32: the most rows of a rank's experts, and the most rows of a peer.

    Args:
        counts_eeL: rows from each rank to each rank, by expert of the receiving rank.
    """
    counts_ee = counts_eeL.sum(dim=2)
    return torch.stack([counts_ee.sum(dim=0).amax(), counts_ee.amax()]).float()
