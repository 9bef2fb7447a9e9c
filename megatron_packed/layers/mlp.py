"""Dense feed-forward network. Letters: T tokens, D hidden size, F inner size."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.build import Build
from megatron_packed.layers.joined import (
    NOT_LOCAL,
    OTHER_DTYPE,
    adds_residual,
    observation,
    reason_apart,
)
from megatron_packed.layers.joined_mlp import joined_mlp
from megatron_packed.layers.linear import JoinedResidual
from megatron_packed.ops.activation.api import Kind, activation
from megatron_packed.ops.backend_dispatch import planned_type
from megatron_packed.ops.dense_mlp import api as dense_mlp
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
