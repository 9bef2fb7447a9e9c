"""Exchange of heads in parts: a part travels while another one is computed.

Letters: T tokens of the pack, N heads, c ranks, W columns, P channels of a head.

[Note: exchange in parts]
Heads are independent, so the heads of a rank can travel and be computed in parts:

    messages      1 2 3 1'  2'  3'
    computation     1   2   3

The messages of all parts start at once. A part is computed as soon as it has arrived, and its
result travels back while the next part is computed. Only the first message and the last result have
nothing to hide under.

By default there is one part. On two H200, four parts leave 17 ms of the exchange exposed instead of
39 ms. But kernels of fewer heads are less efficient, so a step in graphs takes 197 ms instead of
187 ms (2026-11-24).

In autograd's graph an exchange is two nodes: `_Send` starts a collective, `_Receive` waits for it.
The backward of `_Receive` starts the collective in the opposite direction, and the backward of
`_Send` waits for it. Autograd runs the most recently created of the nodes that are ready. All
results are received after the last part was computed. So the backward pass mirrors the order: the
gradients of all results start to travel, then the last part is computed first.

All ranks start the messages in the same order, and a process group sends them in this order. On
CUDA the current stream waits, and never the host. A CUDA graph captures the messages as a branch
that leaves the current stream at the start and joins it at the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from megatron_packed.distributed.all_to_all import EqualExchange, messages_of_heads
from megatron_packed.distributed.collectives import Started, wait_for


def compute_by_heads(
    tensors: Sequence[Tensor],
    compute: Callable[[int, Tensor], Tensor],
    exchange: EqualExchange,
    parts: int,
) -> Tensor:
    """Exchange rows for heads, compute with the heads of this rank, and exchange back.

    See [Note: exchange of heads] and [Note: exchange in parts].

    Args:
        tensors: ``(T/c, N_i, ...)`` each, as for `rows_to_columns`.
        compute: maps the number of a part and the columns ``(T, W)`` of its heads to their outputs
            ``(T, N/(c parts), P)``.
        exchange: exchange of the ranks.
        parts: number of parts. With 1, every collective completes before the next operation.
    Returns:
        ``(T/c, N, P)``.
    """
    ranks = exchange.size
    arriving = [
        _InMotion(exchange, parts).send(x_cTW) for x_cTW in messages_of_heads(tensors, ranks, parts)
    ]
    returning = []
    for number, part in enumerate(arriving):
        y_TNP = compute(number, part.receive().flatten(0, 1))
        returning.append(
            _InMotion(exchange, parts).send(y_TNP.reshape(ranks, -1, *y_TNP.shape[1:]))
        )
    # (c, T/c, N/(c parts), P) -> (T/c, c, parts, N/(c parts), P) -> (T/c, N, P)
    results = [part.receive().transpose(0, 1) for part in returning]
    return torch.stack(results, dim=2).flatten(1, 3)


class _InMotion:
    """One part on its way, in the forward or in the backward pass.

    Args:
        exchange: exchange of the ranks.
        parts: number of parts of the exchange. With more than one the collective runs beside
            other operations.
    """

    def __init__(self, exchange: EqualExchange, parts: int) -> None:
        self._exchange = exchange
        self._overlaps = parts > 1
        self._sent: Tensor | None = None
        self._started: Started | None = None
        self._arriving: Tensor | None = None

    def send(self, x: Tensor) -> _InMotion:
        """Start to exchange the parts of ``x`` ``(c, ...)``, with autograd support."""
        self._arriving = _Send.apply(x, self)  # type: ignore[no-untyped-call]
        return self

    def receive(self) -> Tensor:
        """Return the exchanged tensor, with autograd support."""
        arriving = self._arriving
        self._arriving = None
        return cast(Tensor, _Receive.apply(arriving, self))  # type: ignore[no-untyped-call]

    def start(self, x: Tensor) -> Tensor:
        """Return the memory of the exchanged tensor, which is complete after ``wait``."""
        # Keep the memory of `x`, which may be a copy, until the collective has read it.
        self._sent = x = x.contiguous()
        if not self._overlaps:
            return self._exchange.exchange(x)
        with record_function("cp::start_exchange"):
            result, self._started = self._exchange.start(x)
        return result

    def wait(self) -> None:
        wait_for(self._started)
        self._started = self._sent = None


class _Send(torch.autograd.Function):
    """Start of an exchange; the backward pass waits for the gradient's exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: _InMotion) -> Tensor:
        ctx.part = part
        return part.start(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.part.wait()
        return dx, None


class _Receive(torch.autograd.Function):
    """End of an exchange; the backward pass starts the gradient's exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: _InMotion) -> Tensor:
        ctx.part = part
        part.wait()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        # The exchange is its own adjoint.
        return ctx.part.start(dy), None
