"""Linear projections whose weight gradients go straight into the flat float32 gradient buffer.

Letters: T tokens, I input width, O output width.

A parameter that lives in `distributed.flat_buffers` has ``main_grad``, a float32 view of the
gradient buffer. Autograd would make a gradient in the parameter's dtype, round it, and add it there
in a second pass. Here the matrix product accumulates into the buffer itself: one kernel, no
rounding between micro-batches, no temporary as large as the weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.collectives import all_gather_rows, reduce_scatter_rows
from megatron_packed.distributed.differentiable import Group
from megatron_packed.distributed.tensor_parallel_shards import Shard, set_shard
from megatron_packed.layers.parameters import new_parameter, no_weight_decay
from megatron_packed.layers.tensor_parallel import TensorParallel


def main_grad_of(parameter: Tensor | None) -> Tensor | None:
    """The float32 gradient view of a parameter in flat buffers; None when it has none and autograd
    must serve it.
    """
    return getattr(parameter, "main_grad", None)


@lru_cache(maxsize=1)
def _has_addmm_out_dtype() -> bool:
    """Whether this torch can multiply in bfloat16 and accumulate into a given float32 matrix."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


@torch.no_grad()
def accumulate_weight_grad(main_grad_OI: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    """``main_grad += grad^T x``, summed in float32 (float64 beside float64 weights).

    On CUDA in one product where torch has ``addmm(out_dtype=)``; before that the product is rounded
    to the operands' dtype once. On the CPU low-precision operands are widened first.
    """
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


@torch.no_grad()
def accumulate_bias_grad(main_grad_O: Tensor, grad_TO: Tensor) -> None:
    """``main_grad += sum of grad over tokens``, summed in its dtype."""
    main_grad_O.add_(grad_TO.sum(dim=0, dtype=main_grad_O.dtype))


class _LinearIntoMainGrad(torch.autograd.Function):
    """Forward ``x W^T + b``; backward gives dx and adds dW and db into the parameters'
    ``main_grad``.
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        # The gradient buffer is no saved tensor: autograd would take writing to it for a modified
        # input.
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
        grad_O = None
        if ctx.needs_input_grad[2]:
            if ctx.bias_main_grad is None:
                grad_O = grad_TO.sum(dim=0)
            else:
                accumulate_bias_grad(ctx.bias_main_grad, grad_TO)
        return grad_TI, None, grad_O


class _GatheredLinear(torch.autograd.Function):
    """Forward: gather all rows, then ``x W^T + b``. Backward: reduce-scatter of dx; dW from rows
    gathered again.

    Only this rank's rows are kept from forward to backward: what sequence parallelism is for.
    """

    @staticmethod
    def forward(
        ctx: Any, own_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: Group
    ) -> Tensor:
        ctx.save_for_backward(own_TI, weight_OI)
        ctx.weight_main_grad = main_grad_of(weight_OI)
        ctx.bias_main_grad = main_grad_of(bias_O)
        ctx.group = group
        return F.linear(all_gather_rows(own_TI, group), weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        own_TI, weight_OI = ctx.saved_tensors
        own_grad_TI = grad_OI = grad_O = None
        if ctx.needs_input_grad[0]:
            own_grad_TI = reduce_scatter_rows(grad_TO @ weight_OI, ctx.group)
        if ctx.needs_input_grad[1]:
            x_TI = all_gather_rows(own_TI, ctx.group)
            if ctx.weight_main_grad is None:
                grad_OI = grad_TO.t() @ x_TI
            else:
                accumulate_weight_grad(ctx.weight_main_grad, grad_TO, x_TI)
        if ctx.needs_input_grad[2]:
            if ctx.bias_main_grad is None:
                grad_O = grad_TO.sum(dim=0)
            else:
                accumulate_bias_grad(ctx.bias_main_grad, grad_TO)
        return own_grad_TI, grad_OI, grad_O, None


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x W^T + b``; gradients go into ``weight.main_grad`` where the weight has one, else through
    autograd.

    Args:
        x_TI: ``(T, I)`` in the weight's dtype.
        weight_OI: ``(O, I)``.
        bias_O: ``(O,)`` or None.
    Returns:
        ``(T, O)`` in the weight's dtype.
    """
    if main_grad_of(weight_OI) is not None and torch.is_grad_enabled():
        result: Tensor = _LinearIntoMainGrad.apply(x_TI, weight_OI, bias_O)
        return result
    return F.linear(x_TI, weight_OI, bias_O)


class Linear(nn.Module):
    """A projection ``(T, I) -> (T, O)``.

    Args:
        in_features: I.
        out_features: O.
        bias: whether there is one (it gets no weight decay).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = new_parameter(out_features, in_features, device=device, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = no_weight_decay(new_parameter(out_features, device=device, dtype=dtype))

    def forward(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """A projection whose outputs are split: each rank has rows of the weight, and its own columns
    of the result.

    ``(T, I) -> (T, O of this rank)``, from the hidden state between layers
    (`TensorParallel.enter`).

    Args:
        rows: this rank's part of the output features.
    """

    def __init__(
        self,
        in_features: int,
        rows: Shard,
        *,
        bias: bool,
        tp: TensorParallel,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(in_features, rows.local_length, bias=bias, device=device, dtype=dtype)
        self.tp = tp
        set_shard(self.weight, rows)
        if self.bias is not None:
            set_shard(self.bias, rows)

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.tp.group is None:
            return linear(x_TI, self.weight, self.bias)
        if self.tp.sequence_parallel:
            result: Tensor = _GatheredLinear.apply(x_TI, self.weight, self.bias, self.tp.group)
            return result
        return linear(self.tp.enter(x_TI), self.weight, self.bias)


class RowParallelLinear(Linear):
    """A projection whose inputs are split: each rank has columns of the weight, and a term of the
    result.

    ``(T, I of this rank) -> (T, O)``, into the hidden state between layers
    (`TensorParallel.leave`). The bias is added once, to the sum.

    Args:
        columns: this rank's part of the input features, along dimension 1.
    """

    def __init__(
        self,
        columns: Shard,
        out_features: int,
        *,
        bias: bool,
        tp: TensorParallel,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(columns.local_length, out_features, bias=bias, device=device, dtype=dtype)
        assert tp.group is not None or tp.size == 1 or not bias, (
            "a bias belongs to the sum of all ranks"
        )
        self.tp = tp
        set_shard(self.weight, columns)
        if self.bias is not None:
            tp.use_on_rows(self.bias)

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.tp.group is None:
            return linear(x_TI, self.weight, self.bias)
        y_TO = self.tp.leave(linear(x_TI, self.weight))
        return y_TO if self.bias is None else y_TO + self.bias
