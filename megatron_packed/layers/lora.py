"""Low-rank adapters of frozen matrices (LoRA): ``y = x W^T + s (dropout(x) A^T) B^T``.

A ``(r, I)`` and B ``(O, r)`` are trained; s is ``alpha / r``, or ``alpha / sqrt(r)`` with rank-stabilised
scaling. Sources: Hu et al., arXiv:2106.09685; Kalajdzievski, arXiv:2312.03732.

[Note: matrices of one weight]
A weight may hold the rows of several matrices of the Hugging Face model, such as q, k and v. Each of
these P matrices has an A of its own, so that adapters are exactly those of PEFT. The As are stacked, and
one product with ``(P r, I)`` gives the low-rank inputs of all matrices. B has the rows of the weight, in
the weight's order. For the second product it is spread to ``(O, P r)``: row o has its r numbers in the
columns of its own matrix, and zeros elsewhere. So one product updates rows in any order, and its
addition to ``x W^T`` is part of the product. Rows of matrices without an adapter are zero, and so are
their gradients.

[Note: masks of tensor-parallel ranks]
Without sequence parallelism the ranks draw the same numbers. So a rank with some columns of an input
draws the mask of all columns. With sequence parallelism each rank draws numbers of its own, for its own
rows and its own columns. Ranks that have the same input then need one mask. So each of them draws the
mask of its share of the rows, and a gather brings all rows to all ranks, one byte for an element.
Recomputation draws and gathers again.

Letters: T tokens, I input width, O output width, P adapted matrices of a weight, r rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.collectives import all_gather_rows, own_rows
from megatron_packed.distributed.differentiable import Group
from megatron_packed.distributed.tensor_parallel_shards import Shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import accumulate_weight_grad, bias_grad, main_grad_of
from megatron_packed.ops.lora_expand.api import lora_expand


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a factor of an adapter, by its name in the model."""
    return name.rpartition(".")[0].endswith("lora")


class LoraScale(NamedTuple):
    """Sizes that all adapters of a model share."""

    rank: int
    scale: float
    """s, the factor of the update."""
    dropout: float = 0.0


class Lora(nn.Module):
    """Adapter of one weight ``(O, I)``.

    Args:
        matrix_O: ``(O,)`` int64: number of the adapted matrix that a row of the weight belongs to, from
            0; -1 for rows without an adapter. See [Note: matrices of one weight].
        matrices: P.
        inputs: I.
        shared: rank, scale and dropout.
        build: arguments that all layers share.
    """

    _matrix_O11: Tensor
    _adapted_O11: Tensor

    def __init__(
        self, matrix_O: Tensor, matrices: int, inputs: int, shared: LoraScale, build: Build
    ) -> None:
        super().__init__()
        self.shared = shared
        self.backend = build.backends.lora_expand
        self.matrices = matrices
        self.A = build.new_parameter(matrices * shared.rank, inputs)
        self.B = build.new_parameter(matrix_O.shape[0], shared.rank)
        self.dropout = nn.Dropout(shared.dropout)
        self.columns: Shard | None = None
        """Columns of the input that this rank has, if it draws the mask of all columns; else None."""
        self.mask_group: Group | None = None
        """Ranks that have the same input and draw different numbers; None without such ranks."""
        self.spreads = matrices > 1 or bool((matrix_O < 0).any())
        index_O11 = matrix_O.clamp(min=0).view(-1, 1, 1).to(build.device)
        self.register_buffer("_matrix_O11", index_O11, persistent=False)
        adapted_O11 = (matrix_O >= 0).view(-1, 1, 1).to(build.device, build.dtype)
        self.register_buffer("_adapted_O11", adapted_O11, persistent=False)

    def forward(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return ``x W^T + b`` with the update, ``(T, O)``."""
        dropped_TI = self._dropped(x_TI) if self.dropout.p and self.training else None
        return cast(
            Tensor,
            _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
                x_TI, dropped_TI, weight_OI, bias_O, self.A, self.B, self
            ),
        )

    def _dropped(self, x_TI: Tensor) -> Tensor:
        """Return the input with dropout. See [Note: masks of tensor-parallel ranks]."""
        if self.mask_group is not None:
            share = 1 - self.dropout.p
            own_tI = own_rows(x_TI, self.mask_group)
            kept_tI = torch.empty_like(own_tI, dtype=torch.uint8).bernoulli_(share)
            return x_TI * all_gather_rows(kept_tI, self.mask_group) * (1 / share)
        if self.columns is None:
            return cast(Tensor, self.dropout(x_TI))
        ones_TI = x_TI.new_ones(x_TI.shape[0], self.columns.length)
        return x_TI * self.columns.take(self.dropout(ones_TI))

    def spread(self, B_Or: Tensor) -> Tensor:
        """Return B as ``(O, P r)``."""
        if not self.spreads:
            return B_Or
        rows, rank = B_Or.shape
        spread_OPr = B_Or.new_zeros(rows, self.matrices, rank)
        own_O1r = B_Or.unsqueeze(1) * self._adapted_O11
        index_O1r = self._matrix_O11.expand(rows, 1, rank)
        return spread_OPr.scatter_(1, index_O1r, own_O1r).view(rows, -1)

    def gathered(self, grad_OP: Tensor) -> Tensor:
        """Return the gradient of B, ``(O, r)``, from that of ``spread(B)``."""
        if not self.spreads:
            return grad_OP
        grad_OPr = grad_OP.view(grad_OP.shape[0], self.matrices, -1)
        own_O1r = grad_OPr.take_along_dim(self._matrix_O11, 1) * self._adapted_O11.to(grad_OP.dtype)
        return own_O1r.squeeze(1)

    def update(self, dtype: torch.dtype) -> Tensor:
        """Return ``s B A``, ``(O, I)``, for a merge with the weight."""
        return self.shared.scale * (self.spread(self.B).to(dtype) @ self.A.to(dtype))


class _AdaptedLinear(torch.autograd.Function):
    """Autograd function of `Lora`. It has no gradient for the weight, which is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        dropped_TI: Tensor | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        A_PI: Tensor,
        B_Or: Tensor,
        lora: Lora,
    ) -> Tensor:
        read_TI = x_TI if dropped_TI is None else dropped_TI
        low_TP = _scaled_product(lora.shared.scale, read_TI, A_PI.t())
        ctx.save_for_backward(read_TI, low_TP, weight_OI, A_PI, B_Or)
        ctx.lora = lora
        ctx.drops = dropped_TI is not None
        ctx.main_grads = main_grad_of(A_PI), main_grad_of(B_Or), main_grad_of(bias_O)
        y_TO = lora_expand(low_TP, lora.spread(B_Or), bias_O, backend=lora.backend)
        return _added_product(y_TO, x_TI, weight_OI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        read_TI, low_TP, weight_OI, A_PI, B_Or = ctx.saved_tensors
        lora: Lora = ctx.lora
        needs_x, needs_dropped = ctx.needs_input_grad[:2]
        low_grad_TP = _scaled_product(lora.shared.scale, grad_TO, lora.spread(B_Or))
        grad_TI = dropped_grad_TI = None
        if ctx.drops:
            grad_TI = grad_TO @ weight_OI if needs_x else None
            if needs_dropped:
                dropped_grad_TI = lora_expand(low_grad_TP, A_PI.t(), backend=lora.backend)
        elif needs_x:
            of_low_TI = lora_expand(low_grad_TP, A_PI.t(), backend=lora.backend)
            grad_TI = _added_product(of_low_TI, grad_TO, weight_OI)
        of_A, of_B, of_bias = ctx.main_grads
        A_grad = B_grad = None
        if ctx.needs_input_grad[4]:
            A_grad = _product_grad(of_A, low_grad_TP, read_TI)
        if ctx.needs_input_grad[5]:
            B_grad = _spread_grad(lora, of_B, grad_TO, low_TP)
        grad_O = bias_grad(of_bias, grad_TO) if ctx.needs_input_grad[3] else None
        return grad_TI, dropped_grad_TI, None, grad_O, A_grad, B_grad, None


def _scaled_product(scale: float, x_TI: Tensor, weight_IO: Tensor) -> Tensor:
    """Return ``scale x W``; the product itself multiplies, so no kernel does that after it."""
    out_TO = x_TI.new_empty(x_TI.shape[0], weight_IO.shape[1])
    return torch.addmm(out_TO, x_TI, weight_IO, beta=0, alpha=scale, out=out_TO)


def _added_product(sum_TO: Tensor, x_TI: Tensor, weight_IO: Tensor) -> Tensor:
    """Add ``x W`` to the sum in place.

    The small product of the adapters comes first, because the large one can read the sum while it
    computes. The other order writes the large result, then reads and writes it again.
    """
    return torch.addmm(sum_TO, x_TI, weight_IO, out=sum_TO)


def _product_grad(main_grad: Tensor | None, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Add ``grad^T x`` to ``main_grad``; without ``main_grad``, return it."""
    if main_grad is None:
        return grad_TO.t() @ x_TI
    accumulate_weight_grad(main_grad, grad_TO, x_TI)
    return None


def _spread_grad(
    lora: Lora, main_grad_Or: Tensor | None, grad_TO: Tensor, low_TP: Tensor
) -> Tensor | None:
    """Add the gradient of B to its ``main_grad``; without ``main_grad``, return it."""
    if main_grad_Or is None:
        return lora.gathered(grad_TO.t() @ low_TP)
    if not lora.spreads:
        accumulate_weight_grad(main_grad_Or, grad_TO, low_TP)
        return None
    spread_OP = main_grad_Or.new_zeros(grad_TO.shape[1], low_TP.shape[1])
    accumulate_weight_grad(spread_OP, grad_TO, low_TP)
    main_grad_Or.add_(lora.gathered(spread_OP))
    return None
