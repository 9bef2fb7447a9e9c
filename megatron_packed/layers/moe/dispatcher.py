"""Dispatchers: they bring tokens to their experts, and the results back.

Letters: T tokens of this rank, D hidden size, E experts, K experts per token, e ranks that share
the experts, G = e T tokens of all of them, R rows sorted by expert, S rows on their way.

A dispatcher brings the tokens that are routed to this rank's experts to it (``dispatch``). From
the experts' results it returns, for each token, the weighted sum over its experts (``combine``).
Routes to ``NOWHERE`` (of the tail, of tokens beyond a capacity) have no row and add nothing.

| dispatcher  | what is sent, forward and backward alike                     | shapes           | host sync        |
|-------------|--------------------------------------------------------------|------------------|------------------|
| `local`     | nothing: all experts are here                                | static           | none             |
| `allgather` | all tokens to all ranks, sums of rows back                   | static           | none             |
| `alltoall`  | each token to the ranks of its experts, and their rows back  | follow the pack  | one, the counts  |
| the same, experts padded to a capacity                                     | static           | none             |

[Note: static expert buffer]
Under `allgather` a rank finds out on the device how many rows its experts need. The buffer for them
has a fixed size: the worst case, ``G min(K, E / e)`` rows, or ``factor T K`` with
``--moe-expert-rank-capacity-factor`` (1 is a balanced load). Rows that find no room in it are left
out, and ``overflow`` is raised, on the device, by every rank that shares these experts (each knows
all routes). Such a step must not count: do it again inside ``HybridModel.full_expert_buffers()``,
where every buffer has its worst size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.all_to_all import exchange_equal_parts, exchange_rows
from megatron_packed.distributed.collectives import all_gather_rows
from megatron_packed.distributed.differentiable import gather_rows, scatter_rows
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.moe.capacity import expert_capacity
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.ops.permute.api import Permuted, permute, unpermute


class Exchange(NamedTuple):
    """Rows that every rank sent and received, for the way back."""

    sent: list[int]
    """Rows that this rank sent to each rank."""
    received: list[int]
    """Rows that this rank received from each rank."""
    arrived: Permuted
    """The received rows in the order of this rank's experts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """Rows for this rank's experts, and what ``combine`` needs to bring their results back."""

    x_RD: Tensor
    """``(R, D)`` rows sorted by expert; zeros where no route needs a row."""
    offsets_E: Tensor
    """int32: row number after the last row of each of this rank's experts."""
    overflow: Tensor
    """0-d float32: 1 if rows found no room. See [Note: static expert buffer]."""
    permuted: Permuted
    """Rows of the tokens that this rank combines, and the order they came from."""
    weights_TK: Tensor
    """``(T, K)`` weights of the routes; ``(G, K)`` where all ranks' tokens are combined here."""
    exchange: Exchange | None = None
    """Only where the number of rows that travel follows the routing."""


@dataclass(frozen=True, kw_only=True)
class ExpertBuffer:
    """Size of the static buffer in front of a rank's experts. See [Note: static expert buffer]."""

    rows: int
    worst_rows: int
    """Rows with which nothing can overflow."""
    bytes_per_row: int
    """Bytes of one row's hidden state."""


class Dispatcher(ABC):
    """Base of the dispatchers: sizes of their buffers, and the two halves of the way.

    The experts run between ``dispatch`` and ``combine``. The two halves share no state but what
    ``dispatch`` returns, so other work can run between them as well.

    Args:
        config: numbers of experts, capacities.
        ep: the ranks that share the experts.
    """

    static = True
    """True if shapes are the same for every pack."""

    def __init__(self, config: ModelConfig, ep: ExpertParallel, backends: Backends) -> None:
        assert config.num_experts is not None, "a config with an E layer has num_experts"
        self.config = config
        self.ep = ep
        self.backend = backends.permute
        self.num_experts = config.num_experts
        self.num_local = config.num_experts // ep.size
        self.full_buffer = False
        """True if the buffer has its worst size, whatever the configuration. Host only; graphs are
        captured without.
        """

    @abstractmethod
    def dispatch(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Dispatched:
        """Bring the tokens of all ranks to the experts of this one.

        Args:
            x_TD: ``(T, D)``, equally many tokens on all ranks.
            topk_expert_ids_TK: ``(T, K)`` int64, in [0, E) or ``NOWHERE``.
            topk_weights_TK: ``(T, K)``.
        """

    @abstractmethod
    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return the weighted sum of its experts' results for each token of this rank.

        Args:
            y_RD: ``(R, D)``, the experts' results for ``dispatched.x_RD``.
            dispatched: what ``dispatch`` returned.
        Returns:
            ``(T, D)``.
        """

    def add_up(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return the weighted sums of rows that all lie on this rank."""
        weights_TK = dispatched.weights_TK
        return unpermute(y_RD, dispatched.permuted, weights_TK, backend=self.backend)

    def capacity(self, tokens: int) -> int:
        """Return the rows of one expert that the tokens of one rank may need, of ``tokens`` slots
        each.
        """
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return tokens
        # Where tensor-parallel ranks dispatch rows of their own, all of an expert's may be among
        # those of one.
        known = tokens * (self.ep.tp.size if self.ep.whole_experts else 1)
        return min(
            tokens, expert_capacity(known, self.config.moe_router_topk, self.num_experts, factor)
        )

    def worst_rows(self, tokens: int) -> int:
        """Return the rows that this rank's experts may need at most, of ``tokens`` slots of every
        rank.
        """
        by_token = tokens * min(self.config.moe_router_topk, self.num_local)
        return self.ep.size * min(by_token, self.num_local * self.capacity(tokens))

    def buffer_rows(self, tokens: int) -> int:
        """Return the rows of the buffer in front of this rank's experts, R."""
        return self.worst_rows(tokens)


class LocalDispatcher(Dispatcher):
    """All experts live on this rank: the exchange is a permutation of rows."""

    def dispatch(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Dispatched:
        rows = self.buffer_rows(x_TD.shape[0])
        permuted = permute(
            x_TD, topk_expert_ids_TK, self.num_experts, rows=rows, backend=self.backend
        )
        return Dispatched(
            x_RD=permuted.x_RD,
            offsets_E=permuted.offsets_E,
            overflow=_never(x_TD),
            permuted=permuted,
            weights_TK=topk_weights_TK,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        return self.add_up(y_RD, dispatched)


class AllGatherDispatcher(Dispatcher):
    """Every rank sees all tokens and adds up, for each, what its own experts make of it."""

    def dispatch(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Dispatched:
        group, rows = self.ep.group, self.buffer_rows(x_TD.shape[0])
        # Weights and numbers of experts in one message; float32 holds every number of an expert
        # exactly.
        routes_T2K = torch.cat(
            [topk_weights_TK, topk_expert_ids_TK.to(topk_weights_TK.dtype)], dim=1
        )
        x_GD, routes_G2K = gather_rows(x_TD, group), gather_rows(routes_T2K, group)
        weights_GK, numbers_GK = routes_G2K.chunk(2, dim=1)
        ids_GK = numbers_GK.detach().to(torch.int32)
        # The numbers of other ranks' experts become negative or too large: they lead nowhere here.
        local_GK = ids_GK - self.ep.rank * self.num_local
        permuted = permute(x_GD, local_GK, self.num_local, rows=rows, backend=self.backend)
        return Dispatched(
            x_RD=permuted.x_RD,
            offsets_E=permuted.offsets_E,
            overflow=self._overflow(ids_GK, rows),
            permuted=permuted,
            weights_TK=weights_GK,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        return scatter_rows(self.add_up(y_RD, dispatched), self.ep.group)

    def buffer_rows(self, tokens: int) -> int:
        worst, factor = self.worst_rows(tokens), self.config.moe_expert_rank_capacity_factor
        if factor is None or self.full_buffer:
            return worst
        return min(worst, math.ceil(tokens * self.config.moe_router_topk * factor))

    def _overflow(self, ids_GK: Tensor, rows: int) -> Tensor:
        """Return 1 if any rank's experts need more rows; alike on all ranks."""
        if rows == self.worst_rows(ids_GK.shape[0] // self.ep.size):
            return _never(ids_GK)
        # -1 for NOWHERE
        rank_S = torch.div(ids_GK.flatten(), self.num_local, rounding_mode="floor")
        load_e = (rank_S[:, None] == torch.arange(self.ep.size, device=rank_S.device)).sum(dim=0)
        return (load_e > rows).any().to(torch.float32)


class AllToAllDispatcher(Dispatcher):
    """Each token travels to the ranks of its experts, once for each expert, and its rows travel
    back.

    How many go where is asked of the device once per layer and pass: the one host sync, which a
    CUDA graph cannot hold.
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
        loads = counts_eeL.sum(dim=2).tolist()  # the host sync
        sent = loads[self.ep.rank]
        received = [row[self.ep.rank] for row in loads]
        x_SD = exchange_rows(permuted.x_RD[: sum(sent)], sent, received, self.ep.group)
        # Rows arrive by rank, of each rank by expert.
        expert_eL = torch.arange(local, device=x_TD.device).expand_as(mine_eL)
        ids_S = torch.repeat_interleave(
            expert_eL.flatten(), mine_eL.flatten(), output_size=sum(received)
        )
        arrived = permute(
            x_SD, ids_S[:, None], local, rows=max(sum(received), 1), backend=self.backend
        )
        return Dispatched(
            x_RD=arrived.x_RD,
            offsets_E=arrived.offsets_E,
            overflow=_never(x_TD),
            permuted=permuted,
            weights_TK=topk_weights_TK,
            exchange=Exchange(sent, received, arrived),
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        assert dispatched.exchange is not None, "this dispatcher's dispatch() sets it"
        sent, received, arrived = dispatched.exchange
        y_SD = unpermute(y_RD, arrived, backend=self.backend)
        back_SD = exchange_rows(y_SD, received, sent, self.ep.group)
        rows = dispatched.permuted.token_R.shape[0]
        return self.add_up(F.pad(back_SD, (0, 0, 0, rows - sum(sent))), dispatched)


class PaddedAllToAllDispatcher(Dispatcher):
    """As `AllToAllDispatcher`, with as many rows for every expert as its capacity: nothing is asked
    of the device.
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
        there = exchange_equal_parts(permuted.x_RD.view(ranks, local, capacity, -1), self.ep.group)
        ends_L = torch.arange(1, local + 1, dtype=torch.int32, device=x_TD.device)
        return Dispatched(
            x_RD=there.transpose(0, 1).reshape(local * ranks * capacity, -1),
            offsets_E=ends_L * (ranks * capacity),
            overflow=_never(x_TD),
            permuted=permuted,
            weights_TK=topk_weights_TK,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        by_expert = y_RD.view(self.num_local, self.ep.size, -1, y_RD.shape[1])  # (L, e, C, D)
        back = exchange_equal_parts(by_expert.transpose(0, 1), self.ep.group)
        return self.add_up(back.reshape(dispatched.permuted.x_RD.shape), dispatched)

    def worst_rows(self, tokens: int) -> int:
        return self.num_local * self.ep.size * self.capacity(tokens)


def make_dispatcher(config: ModelConfig, ep: ExpertParallel, backends: Backends) -> Dispatcher:
    """Return the dispatcher that ``config`` names; the local one with all experts on one rank."""
    if ep.group is None:
        return LocalDispatcher(config, ep, backends)
    padded = (
        PaddedAllToAllDispatcher if config.moe_pad_expert_input_to_capacity else AllToAllDispatcher
    )
    kinds: dict[str, type[Dispatcher]] = {"allgather": AllGatherDispatcher, "alltoall": padded}
    return kinds[config.moe_token_dispatcher_type](config, ep, backends)


def _never(x: Tensor) -> Tensor:
    """Return 0: no overflow is possible."""
    return torch.zeros((), dtype=torch.float32, device=x.device)
