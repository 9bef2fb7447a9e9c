"""Dense feed-forward network, of separate products or as one autograd function.

Letters: T tokens, D hidden size, F inner size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, autograd, nn
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.build import Build
from megatron_packed.layers.joined import (
    NOT_LOCAL,
    OTHER_DTYPE,
    adds_residual,
    observation,
    reason_apart,
)
from megatron_packed.layers.linear import JoinedResidual, main_grad_of, weight_grad
from megatron_packed.ops.activation.api import Kind, activation
from megatron_packed.ops.backend_dispatch import planned_type
from megatron_packed.ops.dense_mlp import api as dense_mlp
from megatron_packed.ops.residual_projection.api import AddedProduct
from megatron_packed.packed.params import PackedSeqParams


def fc1_width(inner_size: int, kind: str) -> int:
    """Return the number of rows of the first projection.

    SwiGLU needs a gate and a value (``[gate | up]``), so the result is twice ``inner_size``. For
    other activations, which need only a value, the result is ``inner_size``.
    """
    return 2 * inner_size if kind == "swiglu" else inner_size


def inner_segments(inner_size: int, kind: str) -> list[SplitSegment]:
    """Return the segments of the first projection's rows.

    For SwiGLU gate and value are separate segments, so that a rank has the same channels of both.
    """
    return [SplitSegment(noun="inner channels of an MLP", count=inner_size)] * (
        fc1_width(inner_size, kind) // inner_size
    )


class Activation(nn.Module):
    """Activation function between two projections."""

    def __init__(self, kind: Kind, backend: str) -> None:
        super().__init__()
        self.kind = kind
        self.backend = backend

    def forward(self, x_TF: Tensor) -> Tensor:
        return activation(x_TF, self.kind, backend=self.backend)


class MLP(nn.Module):
    """Two projections with an activation between them.

    The inner channels are split over tensor-parallel ranks.

    Args:
        hidden_size: D.
        inner_size: F; the first projection of SwiGLU is ``[gate | up]`` with 2F rows.
        kind: ``gelu``, ``squared_relu`` or ``swiglu``.
        bias: True adds a bias to both projections.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        kind: Kind,
        bias: bool,
        build: Build,
    ) -> None:
        super().__init__()
        segments = inner_segments(inner_size, kind)
        rows, columns = build.tp.shard(*segments), build.tp.shard(segments[0], dim=1)
        self.fc1 = build.parts.column_parallel(hidden_size, rows, bias=bias, build=build)
        self.hidden_size = hidden_size
        self.inner_size = columns.local_length
        self.backend = build.backends.dense_mlp
        self.mlp_act = Activation(kind, build.backends.activation)
        self.fc2 = build.parts.row_parallel(columns, hidden_size, bias=bias, build=build)

    @property
    def output_projection(self) -> nn.Module:
        return self.fc2

    @adds_residual
    def forward(
        self,
        x_TD: Tensor,
        packed: PackedSeqParams | None = None,
        joined: JoinedResidual | None = None,
    ) -> Tensor:
        """Map ``(T, D)`` to ``(T, D)``, each token independently, so ``packed`` is not used."""
        products = None
        if torch.is_grad_enabled() and x_TD.dim() == 2:
            products = self.joined_products(x_TD.device.type, x_TD.dtype)
        if products is not None:
            return joined_mlp(x_TD, self.fc1.weight, self.fc2.weight, products, joined)
        y_TF = self.mlp_act(self.fc1(x_TD))
        y_TD: Tensor = self.fc2(y_TF) if joined is None else self.fc2(y_TF, joined)
        return y_TD

    def joined_products(
        self, device_type: str, dtype: torch.dtype
    ) -> dense_mlp.JoinedProducts | None:
        """Return the functions that join products with the activation and its gradient.

        None if they run one after the other: see ``ops/dense_mlp/README.md``.

        Raises:
            NoBackendError: the requested backend does not support this layer's sizes and dtype.
        """
        if (self.mlp_act.kind, planned_type(device_type)) not in dense_mlp.WITH_CHOICE:
            return None
        inputs = dense_mlp.DenseMLPInputs(
            channels=self.hidden_size,
            inner=self.inner_size,
            kind=self.mlp_act.kind,
            dtype=dtype,
            device_type=device_type,
            apart=self._reason_apart(dtype),
        )
        backend = dense_mlp.OP.chosen[self.backend, inputs].loaded
        return cast(dense_mlp.JoinedProducts, backend) if backend.JOINS else None

    def _reason_apart(self, dtype: torch.dtype) -> str:
        """Return the reason why products and activation must be separate calls; empty if none."""
        if reason := reason_apart(self.fc1, self.fc2):
            return reason
        if type(self.mlp_act) is not Activation:
            return NOT_LOCAL
        if self.fc1.weight.dtype != dtype:
            return OTHER_DTYPE
        return observation(self.fc1, self.mlp_act, self.fc2)


def joined_mlp(
    x_TD: Tensor,
    w1_FD: Tensor,
    w2_DF: Tensor,
    products: dense_mlp.JoinedProducts,
    joined: JoinedResidual | None = None,
) -> Tensor:
    """Compute ``activation(x W1^T) W2^T`` with ``products``, plus the residual of ``joined``.

    Gradients of weights are added to their ``main_grad``; without it, autograd accumulates them.
    """
    residual_TD, product = (None, None) if joined is None else joined
    y_TD: Tensor = _JoinedMLP.apply(  # type: ignore[no-untyped-call]
        x_TD, w1_FD, w2_DF, residual_TD, products, product
    )
    return y_TD


class _JoinedMLP(autograd.Function):
    """Autograd function of `joined_mlp`.

    Its products also compute the activation and its gradient. Forward saves x and ``hidden = x W1^T``,
    but not the activation: backward computes the activation again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w1_FD: Tensor,
        w2_DF: Tensor,
        residual_TD: Tensor | None,
        products: dense_mlp.JoinedProducts,
        product: AddedProduct | None,
    ) -> Tensor:
        hidden_TF, activated_TF = products.hidden_and_activation(x_TD, w1_FD)
        ctx.save_for_backward(x_TD, w1_FD, w2_DF, hidden_TF)
        ctx.main_grads = main_grad_of(w1_FD), main_grad_of(w2_DF)
        ctx.products = products
        if product is None:
            return F.linear(activated_TF, w2_DF)
        return product(residual_TD, activated_TF, w2_DF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w1_FD, w2_DF, hidden_TF = ctx.saved_tensors
        of_w1, of_w2 = ctx.main_grads
        needs_dx, needs_dw1, needs_dw2 = ctx.needs_input_grad[:3]
        dx_TD = dw1_FD = dw2_DF = None
        dhidden_TF, activated_TF = ctx.products.gradient(dy_TD, w2_DF, hidden_TF)
        if needs_dw2:
            dw2_DF = weight_grad(of_w2, dy_TD, activated_TF)
        del activated_TF
        if needs_dx:
            dx_TD = dhidden_TF @ w1_FD
        if needs_dw1:
            dw1_FD = weight_grad(of_w1, dhidden_TF, x_TD)
        d_residual_TD = dy_TD if ctx.needs_input_grad[3] else None
        return dx_TD, dw1_FD, dw2_DF, d_residual_TD, None, None
