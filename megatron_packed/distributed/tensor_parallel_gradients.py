"""Reduction over tensor-parallel ranks for gradients of parameters that several ranks hold.

[Note: gradients of shared parameters]
Several tensor-parallel ranks may hold copies of a parameter and use them for different heads or
different rows. Each rank then computes only its own term of the gradient. ``SharedGradients`` sums
the terms of all such parameters in one all-reduce per step. The sum comes after the last
micro-batch and before the data-parallel reduction. So accumulation over micro-batches stays local,
and the kernels of weight gradients need no change. Every rank adds the same terms in the same
order, so the copies stay bitwise equal.

Other parameters are used identically by all ranks (norms without sequence parallelism), so each
rank computes the complete gradient. These gradients may still differ by rounding: kernels are tuned
on each rank, or add in a changing order. The same all-reduce replaces such gradients by their mean.
Otherwise the copies would drift apart over a long run.
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
    """Reduction of the gradients of parameters that several tensor-parallel ranks hold.

    If each rank computes its own term of a gradient, the result is the sum of the terms. If each
    rank computes the complete gradient, the result is the mean.

    Call ``sum`` once per optimizer step, after the backward pass of the last micro-batch and before
    the data-parallel reduction. The call uses static shapes and one all-reduce, and the host reads
    no device value. For one rank the call does nothing. See [Note: gradients of shared parameters].

    Args:
        parameters: all parameters of the model, in the same order on all ranks.
        group: tensor-parallel group.
        tp_rank: tensor-parallel rank.
        tp_size: number of tensor-parallel ranks.
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
        # Each set of ranks that share a piece of a parameter has its own range in the buffer, and
        # the ranges of other sets are zero on this rank. So one all-reduce over all ranks sums
        # every set.
        mine = self.numel + rank // piece.shared_by * numel
        self._places.append(
            _SharedTerm(parameter, dim, begin, piece.length, mine, mine + numel, weight)
        )
        self.numel += size // piece.shared_by * numel

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters with a piece that several ranks share; each parameter once."""
        return list({id(place.parameter): place.parameter for place in self._places}.values())

    @torch.no_grad()
    def sum(self) -> None:
        """Reduce the gradients of all shared parameters in place.

        The gradient is ``main_grad`` if the parameter has it, else ``grad``. The reduction runs in
        float32, or in float64 if a gradient is float64.
        """
        placed = [
            (place, gradient)
            for place in self._places
            if (gradient := _gradient(place.parameter)) is not None
        ]
        if self.group is None or not placed:
            return
        gradients = [
            gradient.narrow(place.dim, place.begin, place.length) for place, gradient in placed
        ]
        # Sum in float32 or float64: a sum in bf16 would round differently for every number of
        # ranks.
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        buffer = torch.zeros(self.numel, dtype=dtype, device=gradients[0].device)
        terms = [
            buffer[place.start : place.end].view(g.shape)
            for (place, _), g in zip(placed, gradients)
        ]
        # Use foreach kernels, because these parameters are many and small.
        foreach_copy_(terms, gradients)
        foreach_mul_(terms, [place.weight for place, _ in placed])
        all_reduce_sum(buffer, self.group)
        foreach_copy_(gradients, terms)


@dataclass(frozen=True)
class _SharedTerm:
    parameter: nn.Parameter
    dim: int
    begin: int
    length: int
    start: int
    """First element of this rank's term in the buffer."""
    end: int
    weight: float
    """Factor of the term in the sum: 1, or one over the number of ranks for a mean."""


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad
