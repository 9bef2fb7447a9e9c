"""Joined products of a dense MLP on the meta device: shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.ops.dense_mlp.api import DenseMLPInputs
from megatron_packed.ops.quack_tiles import alignment_reasons

JOINS = True


def not_supported_reasons(inputs: DenseMLPInputs) -> list[str]:
    """Return the reasons why joined products support these inputs on no GPU; empty if they may."""
    reasons = []
    if inputs.kind != "squared_relu":
        reasons.append(f"the derivative is that of squared_relu, not of {inputs.kind}")
    if inputs.dtype != torch.bfloat16:
        reasons.append(f"rows and weights must be bfloat16, not {inputs.dtype}")
    reasons += alignment_reasons(hidden_size=inputs.channels, inner_size=inputs.inner)
    return reasons + ([inputs.apart] if inputs.apart else [])


def hidden_and_activation(x_TD: Tensor, w1_FD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors of `api.JoinedProducts`."""
    hidden_TF = x_TD.new_empty(x_TD.shape[0], w1_FD.shape[0])
    return hidden_TF, hidden_TF.clone()


def gradient(dy_TD: Tensor, w2_DF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors of `api.JoinedProducts`."""
    return hidden_TF.clone(), hidden_TF.clone()
