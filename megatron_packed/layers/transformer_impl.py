"""Whose parallel linears and norms a layer is built from: ``--transformer-impl``.

Every implementation has parameters of the same names, shapes, dtypes and marks: initial values,
flat buffers and checkpoints do not know which one computes. Attention kernels are chosen by
`Backends`.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch

from megatron_packed.config import flag_names as flags
from megatron_packed.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_packed.layers.norm import Norm

LOCAL_NAME, TRANSFORMER_ENGINE_NAME = "local", "transformer_engine"
_TRANSFORMER_ENGINE_MODULE = "megatron_packed.layers.transformer_engine"


class Implementation(NamedTuple):
    """The classes that a layer takes its parts from; they are made and called as those of
    ``LOCAL``.
    """

    column_parallel: type[ColumnParallelLinear]
    row_parallel: type[RowParallelLinear]
    norm: type[Norm]


LOCAL = Implementation(ColumnParallelLinear, RowParallelLinear, Norm)
"""Plain PyTorch and the kernels of ``ops``, on any device."""


def implementation(name: str, device: torch.device | str, dtype: torch.dtype) -> Implementation:
    """The parts of ``local`` or ``transformer_engine`` layers on ``device``.

    Raises:
        ValueError: there is none of this name, or it cannot serve this device or dtype on this
            machine; says what can.
    """
    if name == LOCAL_NAME:
        return LOCAL
    if name != TRANSFORMER_ENGINE_NAME:
        raise ValueError(
            f"transformer_impl {name!r} is unknown; choose {LOCAL_NAME} or {TRANSFORMER_ENGINE_NAME}."
        )
    reason = transformer_engine_refusal(torch.device(device), dtype)
    if reason is not None:
        raise ValueError(f"{flags.TRANSFORMER_IMPL} {TRANSFORMER_ENGINE_NAME}: {reason}.")
    parts: Implementation = import_module(_TRANSFORMER_ENGINE_MODULE).TRANSFORMER_ENGINE
    return parts


def transformer_engine_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why TransformerEngine's parts cannot serve, with the cure; None where they can."""
    if device.type == "cpu":
        return f"TransformerEngine runs on CUDA GPUs only; give {LOCAL_NAME}, which computes the same on a CPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return (
            f"TransformerEngine rounds {str(dtype).removeprefix('torch.')} products to TF32, which {LOCAL_NAME} does "
            f"not; add {flags.BF16}, or give {LOCAL_NAME}"
        )
    try:
        import_module(_TRANSFORMER_ENGINE_MODULE)
    except Exception as error:  # a broken optional package may raise anything at import
        return (
            f"TransformerEngine does not import ({type(error).__name__}: {error}); install the extra 'gpu', or give "
            f"{LOCAL_NAME}"
        )
    return None
