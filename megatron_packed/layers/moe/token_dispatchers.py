"""All-to-all dispatchers that send a token once to each rank, whichever of the rank's experts it needs.

`dispatchers_between_ranks` sends a row for each route instead. With 128 experts on 4 ranks and 6 experts
per token, a token then has 6 rows, of which 4.5 leave the rank. Here it has 3.3 rows, of which 2.5 leave
the rank.

[Note: one row for each token and rank]
A gather gives every rank the routes of all tokens: expert numbers, and weights in fp32. So each rank
knows which tokens arrive, in the order of the sending ranks and of their tokens. It copies an arrived
row to the rows of its experts, which are in the order of `AllToAllDispatcher`: by expert, then by the
sending rank, then by token. It then sums the weighted results of its experts for the token, in the order
of the token's routes, and sends one row back. The token's rank adds the rows of all ranks in the order
of the ranks. A weight's gradient is computed where the expert is, and the gather's backward pass brings
it back in fp32.

In comparison with a row for each route, the sum of a rank is rounded to the dtype of the rows before it
travels. All forms of this module have the same bits.

Letters: as in `dispatcher`; P rows of a part, L experts of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.distributed.all_to_all import InMotion
from megatron_packed.layers.moe.capacity import NOWHERE
from megatron_packed.layers.moe.dispatcher import (
    Arrival,
    Dispatched,
    Exchange,
    no_overflow,
    no_rows,
)
from megatron_packed.layers.moe.dispatchers_between_ranks import (
    ExchangingDispatcher,
    gathered_routes,
    of_pack,
)
from megatron_packed.ops.permute.api import permute, unpermute
from megatron_packed.ops.permute.gathers import copy_rows, sum_rows
from megatron_packed.ops.permute.used_rows import UsedRows, used_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class AllRoutes:
    """Routes of the tokens of all ranks in a part."""

    ids_GK: Tensor
    """``(G, K)`` int32 expert numbers, or ``NOWHERE``."""
    weights_GK: Tensor
    """``(G, K)`` weights, with gradient."""
    reached_eTe: Tensor
    """``(e, T, e)`` bool: whether a token of a rank has an expert on each rank."""
    counts_ee: Tensor
    """``(e, e)`` int64: rows from each rank to each rank."""
    rows_e: Tensor
    """``(e,)`` int64: rows of the experts of each rank."""

    @property
    def needed_2(self) -> Tensor:
        """``(2,)`` float32: the most rows of a rank's experts, and the most rows of a peer."""
        return torch.stack([self.rows_e.amax(), self.counts_ee.amax()]).float()


class TokenDispatcher(ExchangingDispatcher):
    """Dispatcher that sends each token once to every rank with one of its experts, and back.

    The host reads the numbers of rows from the device once per layer and forward pass.
    """

    static = False

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        parts, slots = self.split(x_TD), x_TD.shape[0]
        routes = self.routes_of_all(topk_expert_ids_TK, topk_weights_TK)
        return [
            self._start(part_TD, routes_of_part, loads, slots)
            for part_TD, routes_of_part, loads in zip(
                parts, routes, self._loads(routes), strict=True
            )
        ]

    def _loads(self, routes: list[AllRoutes]) -> list[tuple[list[int], list[int], int]]:
        """Return for each part the rows that this rank sends and receives, and those of its experts."""
        me, ranks = self.ep.rank, self.ep.size
        if routes[0].ids_GK.is_meta:
            sizes = [part.reached_eTe.shape[1] for part in routes]
            sent = [[math.ceil(self.even_part(tokens))] * ranks for tokens in sizes]
            return list(zip(sent, sent, map(self.rows_on_meta, sizes), strict=True))
        loads = [torch.cat([part.counts_ee.flatten(), part.rows_e[me, None]]) for part in routes]
        return [
            (counts[me * ranks : (me + 1) * ranks], counts[me::ranks], rows)
            for *counts, rows in torch.stack(loads).tolist()  # The host sync, for all parts.
        ]

    def _start(
        self,
        x_TD: Tensor,
        routes: AllRoutes,
        loads: tuple[list[int], list[int], int],
        slots: int,
    ) -> Arrival[Dispatched]:
        """Start to send a part of ``slots`` slots."""
        tokens, (sent, received, rows) = x_TD.shape[0], loads
        permuted = permute(
            x_TD, self._ranks_of(routes), self.ep.size, rows=sum(sent), backend=self.backend
        )
        moving = self._rows_in_motion(sent, received, to_experts=True)
        moving.send(permuted.x_RD)

        def arrive() -> Dispatched:
            x_SD = moving.receive()
            reached_G = routes.reached_eTe[:, :, self.ep.rank].flatten()
            place_G = torch.where(reached_G, reached_G.cumsum(0) - 1, sum(received))
            ids_SK, weights_SK = self._arrived_routes(routes, place_G, sum(received))
            arrived = permute(
                x_SD,
                ids_SK,
                self.num_local,
                rows=self.exact_rows(rows, tokens),
                backend=self.backend,
            )
            return Dispatched(
                x_RD=arrived.x_RD,
                offsets_E=arrived.offsets_E,
                overflow=no_overflow(x_SD),
                rows_2=of_pack(routes.needed_2, tokens, slots),
                permuted=permuted,
                weights_TK=weights_SK,
                exchange=Exchange(sent, received),
                arrived=arrived,
            )

        return arrive

    def send_back(self, y_RD: Tensor, dispatched: Dispatched) -> Arrival[Tensor]:
        assert dispatched.arrived is not None, "send_back() needs an arrived part"
        y_SD = unpermute(y_RD, dispatched.arrived, dispatched.weights_TK, backend=self.backend)
        moving = self._back(y_SD, dispatched)
        permuted = dispatched.permuted
        return lambda: sum_rows(moving.receive().flatten(0, -2), permuted, backend=self.backend)

    def _back(self, y_SD: Tensor, dispatched: Dispatched) -> InMotion:
        """Start to send rows back to the ranks of their tokens."""
        assert dispatched.exchange is not None
        sent, received = dispatched.exchange
        moving = self._rows_in_motion(received, sent, to_experts=False)
        return moving.send(y_SD)

    def routes_of_all(self, ids_TK: Tensor, weights_TK: Tensor) -> list[AllRoutes]:
        """Gather the routes of all ranks, and return those of each part.

        See [Note: one row for each token and rank].
        """
        ids_GK, weights_GK = gathered_routes(ids_TK, weights_TK, self.ep.group)
        # (G, K) -> (e, T, K) -> (e, T of a part, K) -> (G of a part, K)
        ids, weights = (
            self.split(x_GK.view(self.ep.size, -1, x_GK.shape[1]), dim=1)
            for x_GK in (ids_GK, weights_GK)
        )
        return [
            self._routes(ids_eTK.flatten(0, 1), weights_eTK.flatten(0, 1))
            for ids_eTK, weights_eTK in zip(ids, weights, strict=True)
        ]

    def _routes(self, ids_GK: Tensor, weights_GK: Tensor) -> AllRoutes:
        ranks = self.ep.size
        # -1 for a route without an expert (NOWHERE), which no rank counts.
        rank_GK1 = torch.div(ids_GK, self.num_local, rounding_mode="floor")[:, :, None]
        chosen_GKe = rank_GK1 == torch.arange(ranks, dtype=torch.int32, device=ids_GK.device)
        reached_eTe = chosen_GKe.any(dim=1).view(ranks, -1, ranks)
        return AllRoutes(
            ids_GK=ids_GK,
            weights_GK=weights_GK,
            reached_eTe=reached_eTe,
            counts_ee=reached_eTe.sum(dim=1),
            rows_e=chosen_GKe.sum(dim=(0, 1)),
        )

    def _ranks_of(self, routes: AllRoutes) -> Tensor:
        """Return ``(T, e)`` ranks to which this rank's tokens go; ``NOWHERE`` for the others."""
        rank_e = torch.arange(self.ep.size, device=routes.ids_GK.device)
        return rank_e.expand_as(routes.reached_eTe[0]).masked_fill(
            ~routes.reached_eTe[self.ep.rank], NOWHERE
        )

    def _arrived_routes(
        self, routes: AllRoutes, place_G: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Return ``(S, K)`` local expert numbers and weights of the S arrived rows.

        Routes to experts of other ranks have other numbers, so `permute` ignores them.

        Args:
            place_G: ``(G,)`` int64 row of each token of all ranks; ``rows`` for tokens without a row.
            rows: S.
        """
        # Tokens without a row all write to one extra element, which is cut off.
        number_G = torch.arange(place_G.shape[0], device=place_G.device)
        token_S = place_G.new_full((rows + 1,), -1).scatter_(0, place_G, number_G)[:rows]
        ids_SK = routes.ids_GK[token_S.clamp(min=0)] - self.ep.rank * self.num_local
        row_G = place_G.masked_fill(place_G == rows, -1)
        weights_SK = copy_rows(routes.weights_GK, token_S, row_G, backend=self.backend)
        return ids_SK.masked_fill((token_S < 0)[:, None], NOWHERE), weights_SK

    def even_part(self, tokens: int) -> float:
        return tokens * reach(self.config.moe_router_topk, self.num_experts, self.num_local)

    def worst_part(self, tokens: int) -> int:
        return min(tokens, self.num_local * self.capacity(tokens))


class BoundedTokenDispatcher(TokenDispatcher):
    """`TokenDispatcher` with parts of equal, bounded size, which a CUDA graph can capture.

    See [Note: parts of a bounded size] and [Note: bounds of expert buffers].
    """

    static = True

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        if not self.room.fixed:
            return super().send(x_TD, topk_expert_ids_TK, topk_weights_TK)
        routes = self.routes_of_all(topk_expert_ids_TK, topk_weights_TK)
        parts = zip(self.split(x_TD), routes, strict=True)
        return [self._start_bounded(*part, len(x_TD)) for part in parts]

    def _start_bounded(self, x_TD: Tensor, routes: AllRoutes, slots: int) -> Arrival[Dispatched]:
        """Start to send a part of ``slots`` slots."""
        tokens = x_TD.shape[0]
        part, rows = self.part_rows(tokens), self.buffer_rows(tokens)
        permuted = permute(
            x_TD,
            self._ranks_of(routes),
            self.ep.size,
            rows_per_part=(self.ep.size, part),
            backend=self.backend,
        )
        used = self._used(routes, permuted.x_RD, tokens)
        moving = self._in_motion(used, to_experts=True).send(self._parts(permuted.x_RD))

        def arrive() -> Dispatched:
            x_SD = moving.receive().flatten(0, 1)
            place_G = self._places_in_parts(routes, part)
            ids_SK, weights_SK = self._arrived_routes(routes, place_G, self.ep.size * part)
            arrived = permute(x_SD, ids_SK, self.num_local, rows=rows, backend=self.backend)
            return self._arrived_in_bounds(
                permuted,
                arrived,
                weights_SK,
                routes.needed_2,
                tokens=tokens,
                slots=slots,
                used=used,
            )

        return arrive

    def _back(self, y_SD: Tensor, dispatched: Dispatched) -> InMotion:
        if dispatched.exchange is not None:
            return super()._back(y_SD, dispatched)
        used = None if dispatched.used is None else dispatched.used.reversed
        return self._in_motion(used, to_experts=False).send(self._parts(y_SD))

    def _parts(self, rows_SD: Tensor) -> Tensor:
        """Return rows ``(e P, D)`` as the parts for the ranks, ``(e, P, D)``."""
        return rows_SD.view(self.ep.size, -1, rows_SD.shape[1])

    def _places_in_parts(self, routes: AllRoutes, part: int) -> Tensor:
        """Return ``(G,)`` row of each token in the arrived parts; e P for a token without a row."""
        reached_eT = routes.reached_eTe[:, :, self.ep.rank]
        place_eT = reached_eT.cumsum(dim=1) - 1
        first_e1 = torch.arange(self.ep.size, device=place_eT.device)[:, None] * part
        fits_eT = reached_eT & (place_eT < part)
        return torch.where(fits_eT, place_eT + first_e1, self.ep.size * part).flatten()

    def _used(self, routes: AllRoutes, x_RD: Tensor, tokens: int) -> UsedRows | None:
        """Return the used rows of the parts: an even share is copied in any case.

        The result is None for a collective, which exchanges all rows.
        """
        if self.ep.exchange is None or self.ep.exchange.memory is None:
            return None
        certain = math.ceil(self.even_part(tokens))
        return used_rows(routes.counts_ee, self.ep.rank, x_RD[0], certain, self.part_rows(tokens))

    def buffer_rows(self, tokens: int) -> int:
        return self.bounded_rows(tokens)


class PaddedTokenDispatcher(BoundedTokenDispatcher):
    """`TokenDispatcher` that pads the rows of every expert to its capacity.

    The rows of an expert from one rank have a fixed size, as in `PaddedAllToAllDispatcher`.
    """

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        routes = self.routes_of_all(topk_expert_ids_TK, topk_weights_TK)
        return [self._start_padded(*part) for part in zip(self.split(x_TD), routes, strict=True)]

    def _start_padded(self, x_TD: Tensor, routes: AllRoutes) -> Arrival[Dispatched]:
        """Start to send a part."""
        tokens, ranks = x_TD.shape[0], self.ep.size
        part, capacity = self.worst_part(tokens), self.capacity(tokens)
        permuted = permute(
            x_TD,
            self._ranks_of(routes),
            ranks,
            rows_per_part=(ranks, part),
            backend=self.backend,
        )
        moving = self._in_motion(to_experts=True).send(self._parts(permuted.x_RD))

        def arrive() -> Dispatched:
            x_SD = moving.receive().flatten(0, 1)
            place_G = self._places_in_parts(routes, part)
            ids_SK, weights_SK = self._arrived_routes(routes, place_G, self.ep.size * part)
            # The rows of an expert are those of rank 0, then those of rank 1, each padded.
            from_S1 = torch.arange(ranks, device=ids_SK.device).repeat_interleave(part)[:, None]
            local_SK = (ids_SK >= 0) & (ids_SK < self.num_local)
            places_SK = torch.where(local_SK, ids_SK * ranks + from_S1, NOWHERE)
            arrived = permute(
                x_SD,
                places_SK,
                self.num_local * ranks,
                rows_per_expert=capacity,
                backend=self.backend,
            )
            ends_L = torch.arange(1, self.num_local + 1, dtype=torch.int32, device=x_SD.device)
            return Dispatched(
                x_RD=arrived.x_RD,
                offsets_E=ends_L * (ranks * capacity),
                overflow=no_overflow(x_SD),
                rows_2=no_rows(x_SD),
                permuted=permuted,
                weights_TK=weights_SK,
                arrived=arrived,
            )

        return arrive

    def worst_rows(self, tokens: int) -> int:
        return self.num_local * self.ep.size * self.capacity(tokens)

    def buffer_rows(self, tokens: int) -> int:
        return self.worst_rows(tokens)


def reach(routes: int, experts: int, local: int) -> float:
    """Return the probability that a token has one of the ``local`` experts of a rank.

    Its experts are ``routes`` different ones of ``experts``, chosen at random.
    """
    return 1 - math.comb(experts - local, routes) / math.comb(experts, routes)
