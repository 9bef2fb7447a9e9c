"""Checks and autograd functions of layers whose products include neighbouring operations.

The end of a layer is ``residual + x W^T``, so the last projection of the mixer may add the residual.
Letters: T tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, autograd, nn
from torch.autograd.function import once_differentiable

from megatron_packed.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    main_grad_of,
    weight_grad,
)
from megatron_packed.ops.residual_projection import api as residual_projection
from megatron_packed.ops.residual_projection.api import AddedProduct

NOT_LOCAL = "the projections are not those of this package"
BIAS = "the projections have a bias"
TENSOR_PARALLEL = "tensor-parallel ranks exchange rows around the projections"
OTHER_DTYPE = "rows and weights differ in dtype"
OBSERVED = "calls of the projections or of the activation are replaced or observed"
NOTES_CALLS = "transformer_engine.pytorch.graph"
"""Module whose hooks only note which modules run.

``make_graphed_callables`` registers them around the forward pass of its warm-up, not around its
backward pass. If they counted as observers, a recomputed layer would save other tensors in its
second run, and the warm-up would not run the kernels that are captured.
"""
Forward = TypeVar("Forward", bound=Callable[..., Tensor])


def reason_apart(*projections: nn.Module) -> str:
    """Return the reason why projections compute something else than these; empty if there is none.

    They may be modules of TransformerEngine, or modules that adapters put in place of a layer.
    """
    for projection in projections:
        if type(projection) not in (ColumnParallelLinear, RowParallelLinear):
            return NOT_LOCAL
        if projection.bias is not None:
            return BIAS
        if projection.tp.size > 1:
            return TENSOR_PARALLEL
    return ""


def adds_residual(forward: Forward) -> Forward:
    """Mark the ``forward`` of a mixer that takes a `JoinedResidual` as its third argument.

    The mixer passes it to its ``output_projection``. A class with another ``forward`` is not marked.
    """
    forward.adds_residual = True  # type: ignore[attr-defined]
    return forward


def is_observed(module: nn.Module, *, wrapped: bool = True) -> bool:
    """Return True if a call of the module runs more than the ``forward`` of its class.

    Args:
        wrapped: also if recomputation or offload of this package (`memory.apply`) wraps the call.
    """
    if "forward" in vars(module):
        forward = None if wrapped else _inside_wrappers(module.forward)
        if getattr(forward, "__func__", None) is not type(module).forward:
            return True
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(
        getattr(hook, "__module__", None) != NOTES_CALLS for each in hooks for hook in each.values()
    )


def observation(*modules: nn.Module, wrapped: bool = True) -> str:
    """Return the reason why calls of the modules cannot be joined; empty if there is none.

    A wrapper of this package says why it wraps the call.
    """
    for module in modules:
        if is_observed(module, wrapped=wrapped):
            forward = vars(module).get("forward")
            reason: str = getattr(getattr(forward, "__self__", forward), "reason", OBSERVED)
            return reason
    return ""


def _inside_wrappers(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that wrappers of this package call, with all arguments."""
    while (owner := getattr(forward, "__self__", forward)) and hasattr(owner, "wrapped_forward"):
        forward = owner.wrapped_forward
    return forward


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


def joined_residual(
    mixer: nn.Module, residual_TD: Tensor, backend: str, apart: str = ""
) -> JoinedResidual | None:
    """Return the residual for the last projection of the mixer, which adds it; None if it does not.

    See ``ops/residual_projection/README.md``.

    Args:
        mixer: its class may have a ``forward`` that `adds_residual` marks.
        residual_TD: the hidden state before the layer.
        backend: backend of the op ``residual_projection``.
        apart: reason of the caller why it must add the residual itself; empty if it need not.

    Raises:
        NoBackendError: the requested backend does not support the sizes and dtype.
    """
    if residual_TD.dim() != 2:
        return None
    product = added_product(mixer, residual_TD.dtype, residual_TD.device.type, backend, apart)
    return None if product is None else JoinedResidual(residual_TD, product)


def added_product(
    mixer: nn.Module, dtype: torch.dtype, device_type: str, backend: str, apart: str = ""
) -> AddedProduct | None:
    """Return the product with which the mixer adds a residual of ``dtype``; None if it adds none.

    Raises:
        NoBackendError: as `joined_residual`.
    """
    if not getattr(type(mixer).forward, "adds_residual", False):
        return None
    projection: Any = mixer.output_projection
    reason = reason_apart(projection) or apart or observation(mixer, projection, wrapped=False)
    if projection.weight.dtype != dtype:
        reason = OTHER_DTYPE
    channels, inner = projection.weight.shape
    inputs = residual_projection.ResidualProjectionInputs(
        inner=inner,
        channels=channels,
        dtype=dtype,
        device_type=device_type,
        apart=reason,
    )
    product: AddedProduct | None
    product = residual_projection.OP.chosen[backend, inputs].loaded.added_product
    return product


class _AddedLinear(autograd.Function):
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
