"""MoE dispatchers: they send tokens to the ranks of their experts and combine the results.

Letters: T tokens of this rank, D hidden size, E experts, K experts per token, R rows sorted by
expert, S rows sent between ranks. There are e expert-parallel ranks. Together they have G = e T
tokens. The dispatchers of several ranks are in `dispatchers_between_ranks`.

``send`` starts to send each token to the ranks of its experts, in one or more parts of the token slots.
A part arrives as `Dispatched` rows. ``send_back`` starts to return the results of a part, whose token
gets the weighted sum of its experts' results. Routes to ``NOWHERE`` (of the tail, or of tokens beyond a
capacity) have no row and add nothing to the sum.

| dispatcher          | transfer, in forward and in backward             | shapes  | host sync    |
|---------------------|--------------------------------------------------|---------|--------------|
| `local`             | none: this rank has all experts                  | static  | none         |
| `allgather`         | all tokens to all ranks, then sums of rows back  | static  | none         |
| `alltoall`          | tokens to the ranks of their experts, then back  | dynamic | one (counts) |
| `alltoall`, bounded | the same, in equal parts of a bounded size       | static  | none         |
| `alltoall`, padded  | the same, padded to each expert's capacity       | static  | none         |

[Note: static expert buffer]
Under `allgather` the number of rows that a rank's experts need is known only on the device. So the
buffer for these rows has a fixed size. The default is the worst case, ``G min(K, E / e)`` rows.
``--moe-expert-rank-capacity-factor`` sets smaller bounds, also for the parts that `alltoall` sends.
See [Note: bounds of expert buffers]. Rows that do not fit are left out. All ranks of the
expert-parallel group then set ``overflow`` to 1 on the device; each of them knows all counts, so
their values agree. The results of such a step are wrong and must be discarded. Repeat the step
inside ``HybridModel.full_expert_buffers()``, which gives every buffer the size that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.moe.capacity import expert_capacity
from megatron_packed.layers.moe.expert_room import ExpertRoom, bounded_rows
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.ops.permute.api import Permuted, permute, unpermute

if TYPE_CHECKING:
    from megatron_packed.ops.permute.used_rows import UsedRows


_Arrived = TypeVar("_Arrived")
Arrival = Callable[[], _Arrived]
"""Waits for rows on their way and returns them; call it once. The host does not wait for the device."""


class Exchange(NamedTuple):
    """Numbers of rows that ``send`` sent and received; ``send_back`` sends the rows back."""

    sent: list[int]
    """Rows that this rank sent to each rank."""
    received: list[int]
    """Rows that this rank received from each rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """Rows of a part for this rank's experts, and what ``send_back`` needs to send results back.

    Below, T and G are the token slots of the part.
    """

    x_RD: Tensor
    """``(R, D)`` rows sorted by expert; unused rows are zeros."""
    offsets_E: Tensor
    """int32: end of the rows of each of this rank's experts."""
    overflow: Tensor
    """0-d float32: 1 if rows did not fit into the buffer. See [Note: static expert buffer]."""
    rows_2: Tensor
    """``(2,)`` float32: most rows of a rank and of a peer that a pack of such parts needs; 0 if no
    bound limits them. See [Note: bounds of expert buffers].
    """
    permuted: Permuted
    """Rows of the tokens that this rank combines, with their original order."""
    weights_TK: Tensor
    """``(T, K)`` weights of the routes, or ``(G, K)`` if this rank combines all ranks' tokens."""
    exchange: Exchange | None = None
    """Numbers of exchanged rows, if they depend on the routing; else None."""
    arrived: Permuted | None = None
    """Received rows, sorted by this rank's experts; None if no rows are sent to them alone."""
    used: UsedRows | None = None
    """Used rows of these parts; None if all rows are exchanged."""


@dataclass(frozen=True, kw_only=True)
class ExpertBuffer:
    """Size of the static buffers of a pack for rows of experts. See [Note: static expert buffer]."""

    rows: int
    worst_rows: int
    """Number of rows with which the buffers cannot overflow."""
    bytes_per_row: int
    """Bytes of one row before the experts."""


class Dispatcher(ABC):
    """Base class of the dispatchers: ``send``, ``send_back`` and the sizes of the buffers.

    The experts run between the arrival of a part and ``send_back``. ``send_back`` depends only on
    the part, so other work can also run between the two. See [Note: experts in parts].

    Args:
        config: numbers of experts, capacities, number of parts.
        ep: expert parallelism of this rank.
        backends: backend of each op.
    """

    static = True
    """True if shapes are the same for every pack."""
    in_parts = True
    """True if ``--moe-comm-overlap-parts`` divides the token slots."""
    overlaps_weights = False
    """True if gradients of rows travel beside the products for the gradients of the weights."""
    even_on_meta = True
    """False routes all tokens to the experts of this rank on the meta device. It has an effect if the
    shapes follow the routing.
    """

    def __init__(self, config: ModelConfig, ep: ExpertParallel, backends: Backends) -> None:
        assert config.num_experts is not None, "a config with an E layer must set num_experts"
        self.config = config
        self.ep = ep
        self.backend = backends.permute
        self.num_experts = config.num_experts
        self.num_local = config.num_experts // ep.size
        self.parts = config.moe_comm_overlap_parts if self.in_parts else 1
        self.room = ExpertRoom.from_factor(config.moe_expert_rank_capacity_factor)
        """Bounds of the buffers; the model sets the same object for all its layers."""

    @abstractmethod
    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        """Start to send each token to the ranks of its experts.

        Args:
            x_TD: ``(T, D)``; the same number of tokens on all ranks.
            topk_expert_ids_TK: ``(T, K)`` int64, in [0, E) or ``NOWHERE``.
            topk_weights_TK: ``(T, K)`` weights of the routes.
        Returns:
            the rows of each part for this rank's experts. All ranks take them in this order.
        """

    @abstractmethod
    def send_back(self, y_RD: Tensor, dispatched: Dispatched) -> Arrival[Tensor]:
        """Start to send the experts' results back.

        Args:
            y_RD: ``(R, D)``, the experts' results for ``dispatched.x_RD``.
            dispatched: an arrived part.
        Returns:
            the weighted sum of the results for each token of the part, ``(T, D)``.
        """

    def part_sizes(self, tokens: int) -> list[int]:
        """Return the token slots of each part: consecutive slots, at least one and about equally many.

        Args:
            tokens: token slots that each rank dispatches.
        Example:
            3 parts of 8 slots: 3, 3, 2.
        """
        parts = max(min(self.parts, tokens), 1)
        return [tokens // parts + (number < tokens % parts) for number in range(parts)]

    def split(self, x_TX: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """Return the slots of each part in dimension ``dim``; one part is ``x_TX`` itself."""
        sizes = self.part_sizes(x_TX.shape[dim])
        return (x_TX,) if len(sizes) == 1 else torch.split(x_TX, sizes, dim)

    def add_up(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return the weighted sum per token over rows that are all on this rank."""
        weights_TK = dispatched.weights_TK
        return unpermute(y_RD, dispatched.permuted, weights_TK, backend=self.backend)

    def capacity(self, tokens: int) -> int:
        """Return the largest number of rows that one rank can send to one expert.

        Args:
            tokens: token slots that each rank dispatches in a part.
        """
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return tokens
        # Each tensor-parallel rank may dispatch only a part of the rows, at several times, but the
        # capacity counts all rows. All rows of an expert may come from a single rank and part.
        counted_tokens = tokens * self.ep.token_parts * self.parts
        return min(
            tokens,
            expert_capacity(counted_tokens, self.config.moe_router_topk, self.num_experts, factor),
        )

    def worst_rows(self, tokens: int) -> int:
        """Return the largest number of rows that this rank's experts can receive from all ranks.

        Args:
            tokens: token slots that each rank dispatches.
        """
        by_token = tokens * min(self.config.moe_router_topk, self.num_local)
        return self.ep.size * min(by_token, self.num_local * self.capacity(tokens))

    def buffer_rows(self, tokens: int) -> int:
        """Return R, the number of rows of the buffer for this rank's experts.

        Args:
            tokens: token slots that each rank dispatches.
        """
        return self.worst_rows(tokens)

    def buffer(self, tokens: int, bytes_per_row: int) -> ExpertBuffer:
        """Return the sizes of the buffers for this rank's experts.

        Args:
            tokens: token slots of a pack that each rank dispatches.
        """
        sizes = self.part_sizes(tokens)
        return ExpertBuffer(
            rows=sum(map(self.buffer_rows, sizes)),
            worst_rows=sum(map(self.worst_rows, sizes)),
            bytes_per_row=bytes_per_row,
        )

    def bounded_rows(self, tokens: int) -> int:
        """Return the rows of the buffer for this rank's experts under the bound of their number."""
        worst, bounds = self.worst_rows(tokens), self.room.bounds
        if bounds is None:
            return worst
        even = self.even_rows(tokens)
        return self.room.same_tiles(bounded_rows(even, bounds.rank, worst), self.num_local, worst)

    def even_rows(self, tokens: int) -> int:
        """Return the rows of this rank's experts if all ranks get equally many.

        This is also the routing on the meta device, whose tensors have no values.
        """
        return tokens * self.config.moe_router_topk

    def even_part(self, tokens: int) -> float:
        """Return the rows that a rank sends to another one if all ranks get equally many.

        Args:
            tokens: token slots that each rank dispatches.
        """
        return tokens * self.config.moe_router_topk / self.ep.size

    def rows_on_meta(self, tokens: int) -> int:
        """Return the rows of this rank's experts on the meta device, whose routing has no values."""
        worst = self.worst_rows(tokens)
        return min(self.even_rows(tokens), worst) if self.even_on_meta else worst

    def exact_rows(self, needed: int, tokens: int) -> int:
        """Return the rows of a buffer for ``needed`` rows."""
        return self.room.same_tiles(max(needed, 1), self.num_local, self.worst_rows(tokens))


class LocalDispatcher(Dispatcher):
    """Dispatcher for one rank with all experts: a permutation of rows without communication."""

    in_parts = False

    def send(
        self, x_TD: Tensor, topk_expert_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> list[Arrival[Dispatched]]:
        rows = self.buffer_rows(x_TD.shape[0])
        overflow, rows_2 = no_overflow(x_TD), no_rows(x_TD)
        permuted = permute(
            x_TD, topk_expert_ids_TK, self.num_experts, rows=rows, backend=self.backend
        )
        dispatched = Dispatched(
            x_RD=permuted.x_RD,
            offsets_E=permuted.offsets_E,
            overflow=overflow,
            rows_2=rows_2,
            permuted=permuted,
            weights_TK=topk_weights_TK,
        )
        return [lambda: dispatched]

    def send_back(self, y_RD: Tensor, dispatched: Dispatched) -> Arrival[Tensor]:
        return partial(self.add_up, y_RD, dispatched)


def no_overflow(x: Tensor) -> Tensor:
    """Return a 0-d zero on the device of ``x``, for a buffer that cannot overflow."""
    return torch.zeros((), dtype=torch.float32, device=x.device)


def no_rows(x: Tensor) -> Tensor:
    """Return ``(2,)`` zeros on the device of ``x``, for rows that no bound limits."""
    return torch.zeros(2, dtype=torch.float32, device=x.device)
