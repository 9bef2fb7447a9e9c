"""MLPs of several experts on rows that are sorted by expert.

The op computes ``y = activation(x W1_e^T) W2_e^T`` with e the expert of the row. Letters: R rows, D
channels, E experts, F hidden channels (for 'swiglu' W1 has 2F rows: gate, then up).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatron_packed.ops.activation.api import Kind
from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, JoiningBackend, Op

OP = Op(
    "grouped_mlp",
    (
        JoiningBackend(
            "quack_joined",
            "megatron_packed.ops.grouped_mlp.quack_joined",
            on_meta=Backend(
                "quack_joined", "megatron_packed.ops.grouped_mlp.on_meta:JoinedExperts"
            ),
        ),
        GPUBackend("quack", "megatron_packed.ops.grouped_mlp.quack"),
        GPUBackend("grouped_mm", "megatron_packed.ops.grouped_mlp.grouped_mm"),
        Backend("reference", "megatron_packed.ops.grouped_mlp.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.grouped_mlp.on_meta"),
)
JOINED = OP.backends[0]
"""Backend that runs the three steps as one."""
WITH_JOINED = {("squared_relu", "cuda")}
"""Kinds of activations and device types that `JOINED` may support."""
JoinedFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(x_RD, w1_EFD, w2_EDF, offsets_E) -> y_RD``: the whole op, for one kind of activation."""


@dataclass(frozen=True, kw_only=True)
class GroupedMLPInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    channels: int
    experts: int
    hidden_in: int
    """Rows of W1: F, or 2F for 'swiglu'."""
    hidden_out: int
    """Columns of W2: F."""
    activation: str
    """Kind of the activation, of the op ``activation``."""
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device_type: str
    apart: str = ""
    """Reason why the three steps must be separate calls; empty if they may be joined."""


def grouped_mlp(
    x_RD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    offsets_E: Tensor,
    *,
    activation: Kind,
    backend: str = "auto",
) -> Tensor:
    """Run the MLP of each row's expert.

    Args:
        x_RD: ``(R, D)`` sorted by expert.
        w1_EFD: ``(E, F, D)``, or ``(E, 2F, D)`` for 'swiglu'.
        w2_EDF: ``(E, D, F)``.
        offsets_E: ``(E,)`` int32 on the device: row number after the last row of each expert.
        activation: a kind of ``ops.activation``: 'gelu', 'squared_relu' or 'swiglu'.
    Returns:
        ``(R, D)``; rows from ``offsets_E[-1]`` on are zero, in the output and in the gradient of x.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
    """
    module = grouped_mlp_backend(
        x_RD, w1_EFD, w2_EDF, offsets_E, activation=activation, backend=backend
    )
    if (run := joined_function(module)) is not None:
        return run(x_RD, w1_EFD, w2_EDF, offsets_E)
    hidden_RF = module.activate(module.fc1(x_RD, w1_EFD, offsets_E), activation)
    y_RD: Tensor = module.fc2(hidden_RF, w2_EDF, offsets_E)
    return y_RD


def joined_function(module: ModuleType) -> JoinedFunction | None:
    """Return the function that runs the three steps as one; None if the backend has none."""
    return getattr(module, "run", None)


def grouped_mlp_backend(
    x_RD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    offsets_E: Tensor,
    *,
    activation: Kind,
    backend: str = "auto",
    apart: str = "",
) -> ModuleType:
    """Return the backend of `grouped_mlp` for these arguments, for callers that run its steps.

    Args:
        apart: reason why the steps must be separate calls; empty if they may be joined.
    Returns:
        a module with ``fc1(x_RD, w1_EFD, offsets_E)``, ``activate(x_RF, activation)`` and
        ``fc2(x_RF, w2_EDF, offsets_E)``; `grouped_mlp` calls these functions in this order. If
        `joined_function` finds a function, the module has this function instead.
    Raises:
        ValueError, NoBackendError: as `grouped_mlp`.
    """
    factor = 2 if activation == "swiglu" else 1
    experts, hidden_in, channels = w1_EFD.shape
    if (
        x_RD.dim() != 2
        or x_RD.shape[1] != channels
        or w2_EDF.shape != (experts, channels, hidden_in // factor)
    ):
        raise ValueError(
            f"grouped_mlp: x has shape {list(x_RD.shape)}, w1 {list(w1_EFD.shape)} and w2 {list(w2_EDF.shape)}; with "
            f"{activation!r} they must be (R, D), (E, {'2F' if factor == 2 else 'F'}, D) and (E, D, F)."
        )
    if offsets_E.shape != (experts,):
        raise ValueError(
            f"grouped_mlp: offsets has shape {list(offsets_E.shape)}; it must be (E,) with E = {experts}."
        )
    inputs = GroupedMLPInputs(
        channels=channels,
        experts=experts,
        hidden_in=hidden_in,
        hidden_out=w2_EDF.shape[2],
        activation=activation,
        dtype=x_RD.dtype,
        weight_dtype=w1_EFD.dtype,
        device_type=x_RD.device.type,
        apart=apart,
    )
    return OP.chosen[backend, inputs].loaded
