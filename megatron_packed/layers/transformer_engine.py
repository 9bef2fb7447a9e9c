"""Parallel linear layers and norms that TransformerEngine computes.

Letters: T tokens, I input width, O output width, D hidden size.

[Note: parameters of TransformerEngine's modules]
Each class derives from the local class and has the same parameters, names and attributes. Only the
computation is done by a TransformerEngine module. That module is created on the meta device, so it
has no memory for parameters, and then gets the ``Parameter`` objects of the local class. The
TransformerEngine module is not registered as a submodule. As a submodule its parameters would get
second names, and checkpoints would contain its "extra state". When flat buffers move the data of a
parameter, both modules see the new data, because they hold the same ``Parameter`` object.

If a weight has ``main_grad``, TransformerEngine's matrix product adds the weight gradient to
``main_grad`` directly, as in ``linear.py``. autograd accumulates the gradients of biases and norms.
See [Note: main_grad protocol].
"""

from __future__ import annotations

import warnings
from typing import Any

import transformer_engine.pytorch as te
from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import Shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import (
    ColumnParallelLinear,
    JoinedResidual,
    Linear,
    RowParallelLinear,
    main_grad_of,
)
from megatron_packed.layers.norm import Norm
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.layers.transformer_impl import Implementation


def _share_parameters(module: nn.Module, owner: nn.Module) -> None:
    """Give the parameters of ``owner`` to ``module``, and store ``module`` as ``owner.te_module``.

    See [Note: parameters of TransformerEngine's modules].
    """
    for name, parameter in owner.named_parameters(recurse=False):
        setattr(module, name, parameter)
    # Bypass the attribute assignment of nn.Module, which would register `module` as a submodule.
    object.__setattr__(owner, "te_module", module)


def _attach_te_linear(linear: Linear, mode: str, tp: TensorParallel) -> None:
    """Create a TransformerEngine linear layer that uses the parameters of ``linear``.

    Args:
        linear: local layer.
        mode: ``column`` or ``row``.
        tp: tensor parallelism of this rank; without a group the layer does not communicate.
    """
    outputs, inputs = linear.weight.shape
    # TransformerEngine divides the given width by the number of ranks. Ranks may share key-value
    # heads or groups, so the local widths can add up to more than the width of the unsplit layer.
    # So pass the local width times the number of ranks, from which TransformerEngine computes the
    # local width.
    size = 1 if tp.group is None else tp.size
    with warnings.catch_warnings():
        # The warning recommends an environment variable that improves the overlap of collectives
        # and matrix products. Results do not depend on that variable.
        warnings.filterwarnings("ignore", message="To guarantee overlapping TP and SP collectives")
        module = te.Linear(
            inputs * (size if mode == "row" else 1),
            outputs * (size if mode == "column" else 1),
            bias=linear.bias is not None,
            parallel_mode=None if size == 1 else mode,
            tp_group=tp.group,
            tp_size=size,
            sequence_parallel=tp.sequence_parallel and size > 1,
            params_dtype=linear.weight.dtype,
            device="meta",
        )
    _share_parameters(module, linear)


def _run(linear: Linear, x_TI: Tensor) -> Tensor:
    module: Any = linear.te_module
    # Set this attribute in every call: a model without flat buffers has no main_grad, and flat
    # buffers may be created after the model.
    module.fuse_wgrad_accumulation = main_grad_of(linear.weight) is not None
    y_TO: Tensor = module(x_TI)
    return y_TO


class TransformerEngineColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` with ``te.Linear``, which runs the collectives itself."""

    def __init__(
        self,
        in_features: int,
        rows: Shard,
        *,
        bias: bool,
        build: Build,
    ) -> None:
        super().__init__(in_features, rows, bias=bias, build=build)
        _attach_te_linear(self, "column", build.tp)

    def forward(self, x_TI: Tensor) -> Tensor:
        return _run(self, x_TI)


class TransformerEngineRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` with ``te.Linear``, which adds the bias once, to the sum over ranks."""

    def __init__(
        self,
        columns: Shard,
        out_features: int,
        *,
        bias: bool,
        build: Build,
    ) -> None:
        super().__init__(columns, out_features, bias=bias, build=build)
        _attach_te_linear(self, "row", build.tp)

    def forward(self, x_TI: Tensor, joined: JoinedResidual | None = None) -> Tensor:
        assert joined is None, (
            "`joined_residual` must not join a residual to TransformerEngine's product"
        )
        return _run(self, x_TI)


class TransformerEngineNorm(Norm):
    """`Norm` with ``te.RMSNorm`` or ``te.LayerNorm``; each rank normalises its own rows."""

    def __init__(
        self,
        hidden_size: int,
        *,
        kind: str,
        eps: float,
        zero_centered: bool = False,
        build: Build,
    ) -> None:
        super().__init__(hidden_size, kind=kind, eps=eps, zero_centered=zero_centered, build=build)
        norm_class = te.RMSNorm if kind == "RMSNorm" else te.LayerNorm
        module = norm_class(
            hidden_size,
            eps=eps,
            zero_centered_gamma=zero_centered,
            dtype=build.dtype,
            device="meta",
        )
        _share_parameters(module, self)

    def forward(self, x_TD: Tensor) -> Tensor:
        module: Any = self.te_module
        y_TD: Tensor = module(x_TD)
        return y_TD

    def with_residual(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self(x_TD), x_TD


TRANSFORMER_ENGINE = Implementation(
    TransformerEngineColumnParallelLinear, TransformerEngineRowParallelLinear, TransformerEngineNorm
)
