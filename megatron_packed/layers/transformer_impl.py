"""Implementations of parallel linear layers and norms, selected by ``--transformer-impl``.

All implementations have parameters with the same names, shapes, dtypes and attributes. So initial
values, flat buffers and checkpoints do not depend on the implementation. `Backends` selects the
attention kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.config import flag_names as flags
from megatron_packed.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_packed.layers.norm import Norm

LOCAL_NAME, TRANSFORMER_ENGINE_NAME = "local", "transformer_engine"
_TRANSFORMER_ENGINE_MODULE = "megatron_packed.layers.transformer_engine"


class Implementation(NamedTuple):
    """Classes of the linear layers and norms of a layer.

    All implementations have the constructor and call arguments of ``LOCAL``.
    """

    column_parallel: type[ColumnParallelLinear]
    row_parallel: type[RowParallelLinear]
    norm: type[Norm]


LOCAL = Implementation(ColumnParallelLinear, RowParallelLinear, Norm)
"""Implementation with plain PyTorch and the kernels of ``ops``, for any device."""


class PlannedColumnParallelLinear(ColumnParallelLinear):
    """Parameters of TransformerEngine's layer, for a planned rank on the meta device."""


class PlannedRowParallelLinear(RowParallelLinear):
    """Parameters of TransformerEngine's layer, for a planned rank on the meta device."""


class PlannedNorm(Norm):
    """Parameters of TransformerEngine's norm, for a planned rank; it is no op of this package."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, x_TD.shape[-1:], self.weight, self.bias, self.eps)

    def with_residual(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self(x_TD), x_TD


PLANNED = Implementation(PlannedColumnParallelLinear, PlannedRowParallelLinear, PlannedNorm)
"""Layers of a planned rank with TransformerEngine, which need not be installed."""


def implementation(name: str, device: torch.device | str, dtype: torch.dtype) -> Implementation:
    """Return the classes of the implementation ``local`` or ``transformer_engine``.

    Raises:
        ValueError: the name is unknown, or the implementation does not support this device or dtype
            on this machine. The message names an alternative.
    """
    if name == LOCAL_NAME:
        return LOCAL
    if name != TRANSFORMER_ENGINE_NAME:
        raise ValueError(
            f"transformer_impl {name!r} is unknown; choose {LOCAL_NAME} or {TRANSFORMER_ENGINE_NAME}."
        )
    if torch.device(device).type == "meta":
        return PLANNED
    reason = transformer_engine_refusal(torch.device(device), dtype)
    if reason is not None:
        raise ValueError(f"{flags.TRANSFORMER_IMPL} {TRANSFORMER_ENGINE_NAME}: {reason}.")
    parts: Implementation = import_module(_TRANSFORMER_ENGINE_MODULE).TRANSFORMER_ENGINE
    return parts


def transformer_engine_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why TransformerEngine layers cannot be used, with the cure; None if they can."""
    if device.type == "cpu":
        return f"TransformerEngine runs on CUDA GPUs only; give {LOCAL_NAME}, which computes the same on a CPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return (
            f"TransformerEngine computes {str(dtype).removeprefix('torch.')} matrix products in TF32, but {LOCAL_NAME} "
            f"does not; add {flags.BF16}, or give {LOCAL_NAME}"
        )
    try:
        import_module(_TRANSFORMER_ENGINE_MODULE)
    except Exception as error:  # a broken optional package may raise any exception at import
        return (
            f"TransformerEngine does not import ({type(error).__name__}: {error}); install the extra 'gpu', or give "
            f"{LOCAL_NAME}"
        )
    return None
