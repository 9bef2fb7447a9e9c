"""Attention on the meta device: the shape of its result, and the tensors that the kernels save."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.shapes import of_shape


def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    """Return a tensor of the output's shape; output and log-sum-exp are saved too.

    The arguments are those of `api.varlen_attention`.
    """
    tokens, heads, _ = q_TNH.shape
    shape = (tokens, heads, v_TKH.shape[2])
    logsumexp_NT = q_TNH.new_empty(heads, tokens, dtype=torch.float32)
    return of_shape(shape, q_TNH, k_TKH, v_TKH, q_TNH.new_empty(shape), logsumexp_NT)
