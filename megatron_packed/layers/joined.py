"""Calls inside a layer: named, so that they can be wrapped, or joined with neighbouring operations.

The end of a layer is ``residual + x W^T``, so the last projection of the mixer may add the residual.
Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from megatron_packed.layers.linear import (
    ColumnParallelLinear,
    JoinedResidual,
    RowParallelLinear,
)
from megatron_packed.ops.backend_dispatch import planned_type
from megatron_packed.ops.residual_projection import api as residual_projection
from megatron_packed.ops.residual_projection.api import WITH_CHOICE, AddedProduct

NOT_LOCAL = "the projections are not those of this package"
BIAS = "the projections have a bias"
ADAPTED = "the projections have adapters"
ROWS_EXCHANGED = "tensor-parallel ranks exchange rows around the projections"
OTHER_DTYPE = "rows and weights differ in dtype"
OBSERVED = "calls of the projections or of the activation are replaced or observed"
NOTES_CALLS = "transformer_engine.pytorch.graph"
"""Module whose hooks only note which modules run.

``make_graphed_callables`` registers them around the forward pass of its warm-up, not around its
backward pass. If they counted as observers, a recomputed layer would save other tensors in its
second run, and the warm-up would not run the kernels that are captured.
"""
_Output = TypeVar("_Output")
Forward = TypeVar("Forward", bound=Callable[..., Tensor])


class NamedCall(nn.Module):
    """Submodule that calls a function, so that `memory.apply` can wrap the call by its name.

    The submodule has no parameters. The parameters that the function uses belong to the enclosing
    module, so their names in checkpoints do not change.
    """

    def forward(self, function: Callable[..., _Output], *args: object) -> _Output:
        return function(*args)


def reason_apart(*projections: nn.Module) -> str:
    """Return the reason why projections compute something else than these; empty if there is none.

    They may be modules of TransformerEngine, or modules that adapters put in place of a layer.
    """
    for projection in projections:
        if type(projection) not in (ColumnParallelLinear, RowParallelLinear):
            return NOT_LOCAL
        if projection.lora is not None:
            return ADAPTED
        if projection.bias is not None:
            return BIAS
        if projection.tp.size > 1:
            return ROWS_EXCHANGED
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


class ResidualAddition(Protocol):
    """Layer that may leave the addition of a residual to its mixer."""

    backend: str
    """Backend of the op ``residual_projection``."""

    @property
    def reason_apart(self) -> str:
        """Reason why the layer must add the residual itself; empty if it need not."""


def joined_residual(
    layer: ResidualAddition, mixer: nn.Module, residual_TD: Tensor
) -> JoinedResidual | None:
    """Return the residual for the last projection of the mixer, which adds it; None if it does not.

    See ``ops/residual_projection/README.md``.

    Args:
        layer: the layer that adds the residual otherwise.
        mixer: its class may have a ``forward`` that `adds_residual` marks.
        residual_TD: the hidden state before the layer.

    Raises:
        NoBackendError: the requested backend does not support the sizes and dtype.
    """
    device_type = residual_TD.device.type
    if residual_TD.dim() != 2 or planned_type(device_type) not in WITH_CHOICE:
        return None
    if not getattr(type(mixer).forward, "adds_residual", False):
        return None
    projection: Any = mixer.output_projection
    reason = (
        reason_apart(projection)
        or layer.reason_apart
        or observation(mixer, projection, wrapped=False)
    )
    if projection.weight.dtype != residual_TD.dtype:
        reason = OTHER_DTYPE
    channels, inner = projection.weight.shape
    inputs = residual_projection.ResidualProjectionInputs(
        inner=inner,
        channels=channels,
        dtype=residual_TD.dtype,
        device_type=device_type,
        apart=reason,
    )
    product: AddedProduct | None
    product = residual_projection.OP.chosen[layer.backend, inputs].loaded.added_product
    return None if product is None else JoinedResidual(residual_TD, product)
