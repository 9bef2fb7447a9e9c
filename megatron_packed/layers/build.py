"""Choices and parallel layout with which all layers of a model are built on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import ALL_ROWS, ContextParallel
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_impl import Implementation, implementation


@dataclass(frozen=True, kw_only=True)
class Build:
    """Arguments that every layer of a model and its parts take, the same for all of them."""

    backends: Backends
    """Backend of each op."""
    tp: TensorParallel = SINGLE
    """Tensor parallelism of this rank."""
    cp: ContextParallel = ALL_ROWS
    """Context parallelism of this rank."""
    ep: ExpertParallel | None = None
    """Expert parallelism of this rank; None if this rank has all experts."""
    device: torch.device | str
    """Device of the parameters."""
    dtype: torch.dtype
    """Dtype of the parameters, except parameters that stay float32."""

    def new_parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Create an uninitialised parameter; `models.init` later initialises each by its name.

        Args:
            dtype: dtype of the parameter; by default that of the layers.
        """
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=dtype or self.dtype))

    @property
    def parts(self) -> Implementation:
        """Classes of the parallel linear layers and of the norms."""
        return implementation(self.backends.transformer_impl, self.device, self.dtype)
