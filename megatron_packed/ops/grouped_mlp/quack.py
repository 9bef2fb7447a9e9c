"""MLPs of the experts by the grouped matrix products of quack (Hopper), for bf16.

flash-attn 4 installs quack. Its products read the row counts on the device, like PyTorch's. The
15 products measured on an H200 take 0.75 to 0.92 of the time of the other backend. The gradient of a
weight is added into ``main_grad`` by the tensor memory accelerator, in fp32 or in bf16. In bf16 the
gradient of a micro-batch is rounded before it is added. Kernels are compiled on first use, in a few
seconds, and kept in ``QUACK_CACHE_DIR`` (`config.environment_variables`).

The tile of a product depends on the widths of its tensors (`quack_tiles`). So it is the same for any row
counts, and the terms of a row are summed in the same order. One program owns a tile, so equal inputs
give equal bits.
"""

from __future__ import annotations

from functools import partial

import torch
from quack import gemm as _quack
from torch import Tensor

from megatron_packed.ops.activation.api import activation as activate
from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs
from megatron_packed.ops.grouped_mlp.grouped_linear import (
    Products,
    first_linear,
    row_bounds,
    second_linear,
)
from megatron_packed.ops.grouped_mlp.input_reasons import shape_and_dtype_reasons
from megatron_packed.ops.quack_tiles import (
    SCHEDULE,
    bound_plans,
    device_reasons,
    least_padded_tile,
    version_reasons,
)

__all__ = ["PRODUCTS", "activate", "fc1", "fc2", "not_supported_reasons"]

_ALIGNMENT = 16
"""Bytes that divide the addresses and row lengths of the tensors that the TMA reads or writes."""
_NEEDED = {"tile_M", "tile_N", *SCHEDULE, "cu_seqlens_m", "cu_seqlens_k", "add_to_output"}
_PLANS = _quack._gemm_plan_cache  # read at import, so that a quack without it is refused


def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Return the reasons why quack's products do not support these inputs; empty if they do."""
    reasons = version_reasons(_quack.gemm, _NEEDED) + device_reasons(inputs.device_type)
    return reasons + shape_and_dtype_reasons(inputs)


def _rows(x_RI: Tensor, weight_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2])
    if x_RI.shape[0]:
        _launch(x_RI, weight_EIO.transpose(1, 2), y_RO, cu_seqlens_m=row_bounds(offsets_E))
    return y_RO


def _weight_gradient(dy_RO: Tensor, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
    shape = (offsets_E.shape[0], dy_RO.shape[1], x_RI.shape[1])
    if not x_RI.shape[0]:
        return x_RI.new_zeros(shape)
    dweight_EOI = x_RI.new_empty(shape)
    _launch(dy_RO.t(), x_RI.t(), dweight_EOI, cu_seqlens_k=row_bounds(offsets_E))
    return dweight_EOI


def _can_add(main_grad_EOI: Tensor, dy_RO: Tensor, x_RI: Tensor) -> bool:
    tensors = (main_grad_EOI, dy_RO, x_RI)
    return main_grad_EOI.dtype in (torch.float32, torch.bfloat16) and all(
        tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors
    )


def _add_weight_gradient(
    main_grad_EOI: Tensor, dy_RO: Tensor, x_RI: Tensor, offsets_E: Tensor
) -> None:
    if x_RI.shape[0]:
        _launch(
            dy_RO.t(),
            x_RI.t(),
            main_grad_EOI,
            cu_seqlens_k=row_bounds(offsets_E),
            add_to_output=True,
        )


def _launch(left: Tensor, right: Tensor, out: Tensor, **options: object) -> None:
    """Compute ``out = left @ right^T`` for each expert."""
    bound_plans(_PLANS)
    tile_m, tile_n = least_padded_tile(out.shape[-1], out.shape[-2] if out.ndim == 3 else None)
    _quack.gemm(left, right, out, None, None, tile_M=tile_m, tile_N=tile_n, **SCHEDULE, **options)


PRODUCTS = Products(_rows, _weight_gradient, _can_add, _add_weight_gradient)
fc1, fc2 = partial(first_linear, PRODUCTS), partial(second_linear, PRODUCTS)
