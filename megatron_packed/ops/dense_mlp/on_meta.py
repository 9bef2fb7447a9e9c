"""Joined products of a dense MLP on the meta device: shapes alone."""

from __future__ import annotations

from torch import Tensor

JOINS = True


def hidden_and_activation(x_TD: Tensor, w1_FD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors of `api.JoinedProducts`."""
    hidden_TF = x_TD.new_empty(x_TD.shape[0], w1_FD.shape[0])
    return hidden_TF, hidden_TF.clone()


def gradient(dy_TD: Tensor, w2_DF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors of `api.JoinedProducts`."""
    return hidden_TF.clone(), hidden_TF.clone()
