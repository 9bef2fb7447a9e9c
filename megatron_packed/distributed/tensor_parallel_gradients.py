"""Sum over tensor-parallel ranks of the gradients of parameters that several of them hold.

[Note: gradients of shared parameters]
Ranks that hold a copy each find their own term of its gradient where they use it for different
heads or different rows. The terms are summed once per step, after the last micro-batch and before
data parallelism's sum, all of them in one all-reduce (``SharedGradients``), so that accumulation
stays local and the weight gradients' kernels stay as they are. Every rank sums the same terms in
the same order, so that copies stay bitwise equal. Parameters that all ranks use alike (norms
without sequence parallelism) get equal gradients by themselves, up to what kernels round otherwise
that are tuned on each rank or add in a changing order; the mean of the copies goes along, or they
would drift apart over a long run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.tensor_parallel_shards import Shard, ShardPiece, shard_of
from megatron_packed.torch_private import foreach_copy_, foreach_mul_


class SharedGradients:
    """The sum over tensor-parallel ranks of what each found of the gradients of parameters they
    hold together; the mean where each has found all of it.

    Call ``sum`` once per optimizer step, when the last micro-batch's gradients are there and before
    they are summed over data-parallel ranks. Static shapes, one all-reduce, no host read; nothing
    at all for one rank. See [Note: gradients of shared parameters].

    Args:
        parameters: all of the model, in the same order on all ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        tp_rank: int,
        tp_size: int,
    ) -> None:
        self.group = group
        self.numel = 0
        self._places: list[_SharedTerm] = []
        for parameter in parameters:
            shard = shard_of(parameter, tp_size)
            for begin, piece in shard.local_pieces():
                if piece.shared_by > 1 and parameter.requires_grad:
                    self._add(parameter, shard, begin, piece, tp_rank, tp_size)

    def _add(
        self,
        parameter: nn.Parameter,
        shard: Shard,
        begin: int,
        piece: ShardPiece,
        rank: int,
        size: int,
    ) -> None:
        dim, numel = shard.dim, parameter.narrow(shard.dim, begin, piece.length).numel()
        weight = 1.0 if shard.own_gradients else 1 / piece.shared_by
        # Other ranks share other pieces of the same kind: each has a place of its own in the one
        # buffer, and adding zeros elsewhere keeps a single all-reduce for all of them.
        mine = self.numel + rank // piece.shared_by * numel
        self._places.append(
            _SharedTerm(parameter, dim, begin, piece.length, mine, mine + numel, weight)
        )
        self.numel += size // piece.shared_by * numel

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those with something to sum, each once."""
        return list({id(place.parameter): place.parameter for place in self._places}.values())

    @torch.no_grad()
    def sum(self) -> None:
        """Sum ``main_grad`` where a parameter has one, else ``grad``, in place; in float32 (float64
        for float64).
        """
        found = [
            (place, gradient)
            for place in self._places
            if (gradient := _gradient(place.parameter)) is not None
        ]
        if self.group is None or not found:
            return
        gradients = [
            gradient.narrow(place.dim, place.begin, place.length) for place, gradient in found
        ]
        # At least float32: a sum in bf16 would round differently for every number of ranks.
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        buffer = torch.zeros(self.numel, dtype=dtype, device=gradients[0].device)
        terms = [
            buffer[place.start : place.end].view(g.shape) for (place, _), g in zip(found, gradients)
        ]
        # Lists of tensors in one kernel: these parameters are many and small (norms, biases).
        foreach_copy_(terms, gradients)
        foreach_mul_(terms, [place.weight for place, _ in found])
        all_reduce_sum(buffer, self.group)
        foreach_copy_(gradients, terms)


@dataclass(frozen=True)
class _SharedTerm:
    parameter: nn.Parameter
    dim: int
    begin: int
    length: int
    start: int
    """Begin of this rank's term in the buffer, in elements."""
    end: int
    weight: float
    """By which the term counts."""


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad
