"""Gated delta rule on the meta device: the shape of its result."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_packed.ops.shapes import of_shape


def run(q_TGK: Tensor, k_TGK: Tensor, v_TNV: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    """Return a tensor of the output's shape. The arguments are those of `reference.run`."""
    return of_shape(v_TNV.shape, v_TNV, q_TGK, k_TGK, *tensors)
