"""Linear layers that accumulate weight gradients directly into the flat float32 gradient buffer.

Letters: T tokens, I input width, O output width.

A parameter in `distributed.flat_buffers` has an attribute ``main_grad``, a float32 view of the
gradient buffer. Autograd would compute a gradient rounded to the parameter's dtype, then add it to
``main_grad`` in a second pass. These layers let the matrix product accumulate into ``main_grad``
directly. That needs one kernel, no rounding between micro-batches, and no temporary as large as the
weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.sequence_parallel_products import SequenceParallelProducts
from megatron_packed.distributed.tensor_parallel_shards import Shard, set_shard
from megatron_packed.layers.parameters import no_weight_decay
from megatron_packed.ops.residual_projection.api import AddedProduct

if TYPE_CHECKING:
    from megatron_packed.layers.build import Build
    from megatron_packed.layers.lora import Lora


def main_grad_of(parameter: Tensor | None) -> Tensor | None:
    """Return ``main_grad`` of a parameter in flat buffers; None for any other parameter.

    autograd accumulates the gradient of a parameter without ``main_grad``.
    """
    return getattr(parameter, "main_grad", None)


@lru_cache(maxsize=1)
def _has_addmm_out_dtype() -> bool:
    """Return True if torch can add a product of bfloat16 matrices to a float32 matrix."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


@torch.no_grad()
def accumulate_weight_grad(main_grad_OI: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    """Add the weight gradient: ``main_grad += grad^T x``.

    The sum is in float32, or in float64 for float64 weights. On CUDA one kernel computes the
    product and adds it if torch has ``addmm(out_dtype=)``. With older torch the product is first
    rounded to the operands' dtype. On the CPU low-precision operands are first converted to the
    dtype of ``main_grad``.
    """
    if grad_TO.is_meta:
        return
    if grad_TO.dtype == main_grad_OI.dtype:
        main_grad_OI.addmm_(grad_TO.t(), x_TI)
    elif not grad_TO.is_cuda:
        main_grad_OI.addmm_(grad_TO.t().to(main_grad_OI.dtype), x_TI.to(main_grad_OI.dtype))
    elif _has_addmm_out_dtype():
        torch.ops.aten.addmm.dtype_out(
            main_grad_OI, grad_TO.t(), x_TI, torch.float32, out=main_grad_OI
        )
    else:
        main_grad_OI.add_(grad_TO.t() @ x_TI)


def bias_grad(main_grad_O: Tensor | None, grad_TO: Tensor) -> Tensor | None:
    """Add the bias gradient to ``main_grad``; without ``main_grad``, return the gradient.

    ``grad`` is summed over tokens, in the dtype of ``main_grad``.
    """
    if main_grad_O is None:
        return grad_TO.sum(dim=0)
    main_grad_O.add_(grad_TO.sum(dim=0, dtype=main_grad_O.dtype))
    return None


class _LinearIntoMainGrad(torch.autograd.Function):
    """Autograd function ``x W^T + b``.

    Backward returns dx and adds dW and db to ``main_grad`` of the parameters.
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        # `save_for_backward` cannot be used for `main_grad`: autograd raises an error if a saved
        # tensor has been written to before the backward pass.
        ctx.weight_main_grad = main_grad_of(weight_OI)
        ctx.bias_main_grad = main_grad_of(bias_O)
        return F.linear(x_TI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        grad_TI = grad_TO @ weight_OI if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            accumulate_weight_grad(ctx.weight_main_grad, grad_TO, x_TI)
        grad_O = bias_grad(ctx.bias_main_grad, grad_TO) if ctx.needs_input_grad[2] else None
        return grad_TI, None, grad_O


class _GatheredLinear(torch.autograd.Function):
    """Autograd function ``x W^T + b`` of a column-parallel layer with sequence parallelism.

    Forward gathers the rows of all ranks. Backward reduce-scatters dx and gathers the rows again
    for dW. So only this rank's rows are saved between forward and backward. Saving this memory is
    the purpose of sequence parallelism.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        products: SequenceParallelProducts,
    ) -> Tensor:
        ctx.save_for_backward(own_TI, weight_OI)
        ctx.weight_main_grad = main_grad_of(weight_OI)
        ctx.bias_main_grad = main_grad_of(bias_O)
        ctx.products = products
        _, y_TO = products.gather_multiply(own_TI, weight_OI.t(), bias_O)
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        own_TI, weight_OI = ctx.saved_tensors
        products, needs_dw = ctx.products, ctx.needs_input_grad[1]
        own_grad_TI = grad_OI = grad_O = None
        # With overlap each collective starts before the product under which it runs.
        gathering = products.start_gather(own_TI) if needs_dw else None
        scattering = None
        if ctx.needs_input_grad[0]:
            scattering = products.start_multiply_scatter(grad_TO, weight_OI, before_dw=needs_dw)
        if needs_dw:
            grad_OI = weight_grad(
                ctx.weight_main_grad, grad_TO, products.gathered(gathering, own_TI)
            )
        if ctx.needs_input_grad[2]:
            grad_O = bias_grad(ctx.bias_main_grad, grad_TO)
        if scattering is not None:
            own_grad_TI = scattering.wait()
        return own_grad_TI, grad_OI, grad_O, None


class _ScatteredLinear(torch.autograd.Function):
    """Autograd function ``x W^T`` of a row-parallel layer with sequence parallelism.

    Forward sums the products of all ranks and returns this rank's rows. Backward gathers the rows
    of the gradient once, for dx and for dW.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, products: SequenceParallelProducts
    ) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.weight_main_grad = main_grad_of(weight_OI)
        ctx.products = products
        y_TO: Tensor = products.multiply_scatter(x_TI, weight_OI.t())
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, own_grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TI, weight_OI = ctx.saved_tensors
        products, needs_dw = ctx.products, ctx.needs_input_grad[1]
        grad_TI = grad_OI = grad_TO = None
        if ctx.needs_input_grad[0]:
            grad_TO, grad_TI = products.gather_multiply(own_grad_TO, weight_OI, keep=needs_dw)
        elif needs_dw:
            grad_TO = products.gathered(None, own_grad_TO)
        if grad_TO is not None:
            grad_OI = weight_grad(ctx.weight_main_grad, grad_TO, x_TI)
        return grad_TI, grad_OI, None


def weight_grad(main_grad_OI: Tensor | None, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Add the weight gradient to ``main_grad``; without ``main_grad``, return the gradient."""
    if main_grad_OI is None:
        return grad_TO.t() @ x_TI
    accumulate_weight_grad(main_grad_OI, grad_TO, x_TI)
    return None


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + b``.

    Gradients are added to ``main_grad`` if the weight has it. Otherwise autograd accumulates them.

    Args:
        x_TI: ``(T, I)`` in the weight's dtype.
        weight_OI: ``(O, I)``.
        bias_O: ``(O,)`` or None.
    Returns:
        ``(T, O)`` in the weight's dtype.
    """
    if main_grad_of(weight_OI) is not None and torch.is_grad_enabled():
        return cast(Tensor, _LinearIntoMainGrad.apply(x_TI, weight_OI, bias_O))  # type: ignore[no-untyped-call]
    return F.linear(x_TI, weight_OI, bias_O)


class _AddedLinear(torch.autograd.Function):
    """Autograd function of `JoinedResidual.add_product`."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor | None, product: AddedProduct
    ) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.weight_main_grad = main_grad_of(weight_OI)
        return product(residual_TO, x_TI, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TI, weight_OI = ctx.saved_tensors
        needs_dx, needs_dw, needs_residual = ctx.needs_input_grad[:3]
        grad_TI = grad_TO @ weight_OI if needs_dx else None
        grad_OI = weight_grad(ctx.weight_main_grad, grad_TO, x_TI) if needs_dw else None
        return grad_TI, grad_OI, grad_TO if needs_residual else None, None


def _without_values(residual_TO: Tensor | None, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])


class JoinedResidual(NamedTuple):
    """Residual that the last projection of a mixer adds to its result."""

    residual_TO: Tensor | None
    product: AddedProduct

    def for_second_run(self) -> JoinedResidual:
        """Return a substitute for recomputation, which does not use the result of the projection.

        So a recomputed mixer does not hold the residual, which may be offloaded.
        """
        return JoinedResidual(None, _without_values)

    def add_product(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return ``residual + x W^T``.

        The weight's gradient is added to ``main_grad``; without it, autograd accumulates the gradient.
        """
        return cast(Tensor, _AddedLinear.apply(x_TI, weight_OI, *self))  # type: ignore[no-untyped-call]


class Linear(nn.Module):
    """Linear layer ``(T, I) -> (T, O)``.

    Args:
        in_features: I.
        out_features: O.
        bias: True adds a bias; it gets no weight decay.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        build: Build,
    ) -> None:
        super().__init__()
        self.weight = build.new_parameter(out_features, in_features)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = no_weight_decay(build.new_parameter(out_features))
        self.lora: Lora | None = None
        """Adapter of the weight; `models.lora` adds it."""
        self.has_whole_input = False
        """True if all tensor-parallel ranks have the same input, also with sequence parallelism."""

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.product(x_TI, self.bias)

    def product(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return ``x W^T + b``, with the update of the adapter if there is one."""
        if self.lora is not None:
            updated: Tensor = self.lora(x_TI, self.weight, bias_O)
            return updated
        return linear(x_TI, self.weight, bias_O)


class ColumnParallelLinear(Linear):
    """Linear layer with its output features split over tensor-parallel ranks.

    Each rank holds rows of the weight and computes its own columns of the result:
    ``(T, I) -> (T, O of this rank)``. The input is the hidden state between layers, so the layer
    enters the tensor-parallel region (`TensorParallel.enter`).

    Args:
        in_features: I.
        rows: this rank's shard of the output features.
        bias: True adds a bias; it gets no weight decay.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        in_features: int,
        rows: Shard,
        *,
        bias: bool,
        build: Build,
    ) -> None:
        super().__init__(in_features, rows.local_length, bias=bias, build=build)
        self.has_whole_input = True
        self.tp = build.tp
        set_shard(self.weight, rows)
        if self.bias is not None:
            set_shard(self.bias, rows)

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.tp.group is None:
            return self.product(x_TI, self.bias)
        if self.tp.products is not None and self.lora is None:
            gathered = (x_TI, self.weight, self.bias, self.tp.products)
            return cast(Tensor, _GatheredLinear.apply(*gathered))  # type: ignore[no-untyped-call]
        return self.product(self.tp.enter(x_TI), self.bias)


class RowParallelLinear(Linear):
    """Linear layer with its input features split over tensor-parallel ranks.

    Each rank holds columns of the weight and computes one term of the result:
    ``(T, I of this rank) -> (T, O)``. The layer leaves the tensor-parallel region
    (`TensorParallel.leave`), which sums the terms. The bias is added once, after the sum.

    Args:
        columns: this rank's shard of the input features, along dimension 1.
        out_features: O.
        bias: True adds a bias; it gets no weight decay.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        columns: Shard,
        out_features: int,
        *,
        bias: bool,
        build: Build,
    ) -> None:
        tp = build.tp
        super().__init__(columns.local_length, out_features, bias=bias, build=build)
        assert tp.group is not None or tp.size == 1 or not bias, (
            "a bias needs a tensor-parallel group, because it is added to the sum over ranks"
        )
        self.tp = tp
        set_shard(self.weight, columns)
        if self.bias is not None:
            tp.use_on_rows(self.bias)

    def forward(self, x_TI: Tensor, joined: JoinedResidual | None = None) -> Tensor:
        """Return ``x W^T + b``, or with ``joined`` the residual plus ``x W^T``."""
        if joined is not None:
            return joined.add_product(x_TI, self.weight)
        if self.tp.group is None:
            return self.product(x_TI, self.bias)
        if self.tp.products is not None and self.lora is None:
            y_TO: Tensor = _ScatteredLinear.apply(  # type: ignore[no-untyped-call]
                x_TI, self.weight, self.tp.products
            )
        else:
            y_TO = self.tp.leave(self.product(x_TI, None))
        return y_TO if self.bias is None else y_TO + self.bias
