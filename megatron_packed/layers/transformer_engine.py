"""Parallel linears and norms that TransformerEngine computes.

Letters: T tokens, I input width, O output width, D hidden size.

[Note: parameters of TransformerEngine's modules]
Each part is the local one, parameters, names and marks included, with a module of TransformerEngine
in place of the arithmetic. That module is made without memory of its own (on the meta device) and
is given the very same ``Parameter`` objects. It is no submodule: its parameters would have second
names, and a checkpoint an "extra state". Flat buffers move a parameter's data under both at once.

A weight that has ``main_grad`` gets its gradient added there by the product itself, as in
``linear.py``; the gradients of biases and norms come by autograd. See [Note: main_grad protocol].
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import Shard
from megatron_packed.layers.linear import (
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    main_grad_of,
)
from megatron_packed.layers.norm import Norm
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_impl import Implementation


def _share_parameters(module: nn.Module, owner: nn.Module) -> None:
    """Let ``module`` compute for ``owner``. See [Note: parameters of TransformerEngine's modules]."""
    for name, parameter in owner.named_parameters(recurse=False):
        setattr(module, name, parameter)
    object.__setattr__(
        owner, "te_module", module
    )  # past nn.Module, which would make it a submodule


def _attach_te_linear(linear: Linear, mode: str, tp: TensorParallel) -> None:
    """Make TransformerEngine's linear for the parameters of ``linear``.

    Args:
        mode: ``column`` or ``row``; what lies between ``enter`` and ``leave`` (no group)
            communicates in neither.
    """
    outputs, inputs = linear.weight.shape
    # It divides the whole width by the ranks. Ranks may share key-value heads or groups, so that
    # their parts add up to more than the whole; told this, it comes to the part that there is.
    size = 1 if tp.group is None else tp.size
    with warnings.catch_warnings():
        # Of a variable that lets collectives run beside products more often; results do not depend
        # on it.
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
    # Models without flat buffers have no main_grad, and buffers may come after the model.
    module.fuse_wgrad_accumulation = main_grad_of(linear.weight) is not None
    y_TO: Tensor = module(x_TI)
    return y_TO


class TransformerEngineColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` by ``te.Linear``, which gathers and reduces over the ranks itself."""

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
        super().__init__(in_features, rows, bias=bias, tp=tp, device=device, dtype=dtype)
        _attach_te_linear(self, "column", tp)

    def forward(self, x_TI: Tensor) -> Tensor:
        return _run(self, x_TI)


class TransformerEngineRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` by ``te.Linear``, which adds the bias once, to the sum of the ranks."""

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
        super().__init__(columns, out_features, bias=bias, tp=tp, device=device, dtype=dtype)
        _attach_te_linear(self, "row", tp)

    def forward(self, x_TI: Tensor) -> Tensor:
        return _run(self, x_TI)


class TransformerEngineNorm(Norm):
    """`Norm` by ``te.RMSNorm`` or ``te.LayerNorm``; each rank normalises the rows that it has."""

    def __init__(
        self,
        hidden_size: int,
        *,
        kind: str,
        eps: float,
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__(
            hidden_size, kind=kind, eps=eps, device=device, dtype=dtype, backend=backend, tp=tp
        )
        made = te.RMSNorm if kind == "RMSNorm" else te.LayerNorm
        _share_parameters(made(hidden_size, eps=eps, dtype=dtype, device="meta"), self)

    def forward(self, x_TD: Tensor) -> Tensor:
        module: Any = self.te_module
        y_TD: Tensor = module(x_TD)
        return y_TD

    def with_residual(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self(x_TD), x_TD


TRANSFORMER_ENGINE = Implementation(
    TransformerEngineColumnParallelLinear, TransformerEngineRowParallelLinear, TransformerEngineNorm
)
