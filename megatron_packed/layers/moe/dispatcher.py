"""Bringing tokens to their experts and back.

Letters: T tokens of this rank, D hidden size, E experts, K experts per token, e ranks that share
the experts, G = e T tokens of all of them, R rows sorted by expert, S rows on their way.

A dispatcher takes the tokens that a rank has, lets the experts see those that are routed to them,
and returns for each token the weighted sum of what its experts made of it. Routes to ``NOWHERE``
(of the tail, of tokens beyond a capacity) have no row and add nothing.

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
all routes). Such a step must not count: do it again inside ``HybridModel. full_expert_buffers()``,
where every buffer has its worst size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
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
from megatron_packed.ops.permute.api import permute, unpermute

Experts = Callable[[Tensor, Tensor], Tensor]
"""Rows sorted by expert, and the row after the last of each expert -> rows."""


class Dispatched(NamedTuple):
    """What came back from the experts."""

    y_TD: Tensor
    """``(T, D)``: for each token the weighted sum of its experts' results."""
    overflow: Tensor
    """0-d float32: 1 if rows found no room. See [Note: static expert buffer]."""


@dataclass(frozen=True, kw_only=True)
class ExpertBuffer:
    """Size of the static buffer in front of a rank's experts. See [Note: static expert buffer]."""

    rows: int
    worst_rows: int
    """Rows with which nothing can overflow."""
    bytes_per_row: int
    """Of its hidden state."""


class Dispatcher(ABC):
    """What all dispatchers know.

    Args:
        config: numbers of experts, capacities.
        ep: the ranks that share the experts.
    """

    static = True
    """Whether shapes are the same for every pack."""

    def __init__(self, config: ModelConfig, ep: ExpertParallel, backends: Backends) -> None:
        assert config.num_experts is not None, "a config with an E layer has num_experts"
        self.config, self.ep, self.backend = config, ep, backends.permute
        self.num_experts, self.num_local = config.num_experts, config.num_experts // ep.size
        self.full_buffer = False
        """Whether the buffer has its worst size, whatever the configuration. Host only; graphs are
        captured without.
        """

    @abstractmethod
    def __call__(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor, experts: Experts
    ) -> Dispatched:
        """There and back.

        Args:
            x_TD: ``(T, D)``, equally many tokens on all ranks.
            topk_expert_ids_TK: ``(T, K)`` int64, in [0, E) or ``NOWHERE``.
            topk_weights_TK: ``(T, K)``.
            experts: those of this rank.
        """

    def capacity(self, tokens: int) -> int:
        """Rows of one expert that the tokens of one rank may need, of ``tokens`` slots each."""
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
        """Rows that this rank's experts may need at most, of ``tokens`` slots of every rank."""
        by_token = tokens * min(self.config.moe_router_topk, self.num_local)
        return self.ep.size * min(by_token, self.num_local * self.capacity(tokens))

    def buffer_rows(self, tokens: int) -> int:
        """Rows of the buffer in front of this rank's experts, R."""
        return self.worst_rows(tokens)


class LocalDispatcher(Dispatcher):
    """All experts live on this rank: the exchange is a permutation of rows."""

    def __call__(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor, experts: Experts
    ) -> Dispatched:
        rows = self.buffer_rows(x_TD.shape[0])
        permuted = permute(
            x_TD, topk_expert_ids_TK, self.num_experts, rows=rows, backend=self.backend
        )
        y_RD = experts(permuted.x_RD, permuted.offsets_E)
        return Dispatched(
            unpermute(y_RD, permuted, topk_weights_TK, backend=self.backend), _never(x_TD)
        )


class AllGatherDispatcher(Dispatcher):
    """Every rank sees all tokens and adds up, for each, what its own experts make of it."""

    def __call__(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor, experts: Experts
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
        local_GK = (
            ids_GK - self.ep.rank * self.num_local
        )  # others' are below 0 or too large: they lead nowhere here
        permuted = permute(x_GD, local_GK, self.num_local, rows=rows, backend=self.backend)
        y_RD = experts(permuted.x_RD, permuted.offsets_E)
        y_GD = unpermute(y_RD, permuted, weights_GK, backend=self.backend)
        return Dispatched(scatter_rows(y_GD, group), self._overflow(ids_GK, rows))

    def buffer_rows(self, tokens: int) -> int:
        worst, factor = self.worst_rows(tokens), self.config.moe_expert_rank_capacity_factor
        if factor is None or self.full_buffer:
            return worst
        return min(worst, math.ceil(tokens * self.config.moe_router_topk * factor))

    def _overflow(self, ids_GK: Tensor, rows: int) -> Tensor:
        """Whether any rank's experts need more rows, found alike by all."""
        if rows == self.worst_rows(ids_GK.shape[0] // self.ep.size):
            return _never(ids_GK)
        rank_S = torch.div(
            ids_GK.flatten(), self.num_local, rounding_mode="floor"
        )  # -1 for NOWHERE
        load_e = (rank_S[:, None] == torch.arange(self.ep.size, device=rank_S.device)).sum(dim=0)
        return (load_e > rows).any().to(torch.float32)


class AllToAllDispatcher(Dispatcher):
    """Each token travels to the ranks of its experts, once for each expert, and its rows travel
    back.

    How many go where is asked of the device once per layer and pass: the one host sync, which a
    CUDA graph cannot hold.
    """

    static = False

    def __call__(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor, experts: Experts
    ) -> Dispatched:
        group, rows = self.ep.group, x_TD.shape[0] * topk_expert_ids_TK.shape[1]
        permuted = permute(x_TD, topk_expert_ids_TK, self.num_experts, backend=self.backend)
        counts_eE = all_gather_rows(permuted.tokens_per_expert_E[None], group)
        mine_eL = counts_eE.view(self.ep.size, self.ep.size, self.num_local)[
            :, self.ep.rank
        ]  # L local experts
        loads = (
            counts_eE.view(self.ep.size, self.ep.size, self.num_local).sum(dim=2).tolist()
        )  # the host sync
        sent, received = loads[self.ep.rank], [row[self.ep.rank] for row in loads]
        x_SD = exchange_rows(permuted.x_RD[: sum(sent)], sent, received, group)
        # Rows arrive by rank, of each rank by expert.
        expert_eL = torch.arange(self.num_local, device=x_TD.device).expand_as(mine_eL)
        ids_S = torch.repeat_interleave(
            expert_eL.flatten(), mine_eL.flatten(), output_size=sum(received)
        )
        arrived = permute(
            x_SD, ids_S[:, None], self.num_local, rows=max(sum(received), 1), backend=self.backend
        )
        y_SD = unpermute(experts(arrived.x_RD, arrived.offsets_E), arrived, backend=self.backend)
        y_RD = F.pad(exchange_rows(y_SD, received, sent, group), (0, 0, 0, rows - sum(sent)))
        return Dispatched(
            unpermute(y_RD, permuted, topk_weights_TK, backend=self.backend), _never(x_TD)
        )


class PaddedAllToAllDispatcher(Dispatcher):
    """As `AllToAllDispatcher`, with as many rows for every expert as its capacity: nothing is asked
    of the device.
    """

    def __call__(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor, experts: Experts
    ) -> Dispatched:
        ranks, local, capacity = self.ep.size, self.num_local, self.capacity(x_TD.shape[0])
        permuted = permute(
            x_TD,
            topk_expert_ids_TK,
            self.num_experts,
            rows_per_expert=capacity,
            backend=self.backend,
        )
        # (E C, D) -> (e, L, C, D), part r for rank r -> (e, L, C, D), part s from rank s -> (L, e
        # C, D)
        there = exchange_equal_parts(permuted.x_RD.view(ranks, local, capacity, -1), self.ep.group)
        x_RD = there.transpose(0, 1).reshape(local * ranks * capacity, -1)
        offsets_L = torch.arange(1, local + 1, dtype=torch.int32, device=x_TD.device) * (
            ranks * capacity
        )
        y_RD = experts(x_RD, offsets_L)
        back = exchange_equal_parts(
            y_RD.view(local, ranks, capacity, -1).transpose(0, 1), self.ep.group
        )
        y_TD = unpermute(
            back.reshape(permuted.x_RD.shape), permuted, topk_weights_TK, backend=self.backend
        )
        return Dispatched(y_TD, _never(x_TD))

    def worst_rows(self, tokens: int) -> int:
        return self.num_local * self.ep.size * self.capacity(tokens)


def make_dispatcher(config: ModelConfig, ep: ExpertParallel, backends: Backends) -> Dispatcher:
    """The dispatcher that ``config`` asks for; with all experts on one rank there is nothing to
    choose.
    """
    if ep.group is None:
        return LocalDispatcher(config, ep, backends)
    padded = (
        PaddedAllToAllDispatcher if config.moe_pad_expert_input_to_capacity else AllToAllDispatcher
    )
    kinds: dict[str, type[Dispatcher]] = {"allgather": AllGatherDispatcher, "alltoall": padded}
    return kinds[config.moe_token_dispatcher_type](config, ep, backends)


def _never(x: Tensor) -> Tensor:
    """No overflow."""
    return torch.zeros((), dtype=torch.float32, device=x.device)
