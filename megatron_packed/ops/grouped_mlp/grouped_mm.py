"""MLPs of the experts by PyTorch's grouped matrix product, which reads the offsets on the device.

If a weight has ``main_grad`` (fp32), a kernel of this package computes the gradient and adds it there;
see `weight_gradient`.

The tiling of the product depends on the row counts of the experts. So rows with equal content may
differ in the last bits between calls with different row counts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_packed.ops.activation.api import activation as activate
from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs
from megatron_packed.ops.grouped_mlp.grouped_linear import (
    Products,
    first_linear,
    second_linear,
)
from megatron_packed.ops.grouped_mlp.input_reasons import shape_and_dtype_reasons
from megatron_packed.ops.grouped_mlp.weight_gradient import add_weight_gradient, can_add
from megatron_packed.torch_private import grouped_mm as _product

__all__ = ["PRODUCTS", "activate", "fc1", "fc2", "not_supported_reasons"]


def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Return the reasons why the grouped product does not support these inputs; empty if it does."""
    reasons = []
    if inputs.device_type != "cuda":
        reasons.append(
            f"the grouped product runs on CUDA devices, and would sync with the host on {inputs.device_type}"
        )
    elif torch.cuda.get_device_capability() < (8, 0):
        reasons.append("the kernel needs a GPU of compute capability 8.0 or later")
    return reasons + shape_and_dtype_reasons(inputs)


def _rows(x_RI: Tensor, weight_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    return _product(x_RI, weight_EIO, offs=offsets_E)


def _weight_gradient(dy_RO: Tensor, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
    return _product(dy_RO.t(), x_RI, offs=offsets_E)


PRODUCTS = Products(_rows, _weight_gradient, can_add, add_weight_gradient)
fc1, fc2 = partial(first_linear, PRODUCTS), partial(second_linear, PRODUCTS)
