"""The layer of the pattern symbol ``M``. Letters: T tokens, D hidden size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.mamba_mixer import MambaMixer
from megatron_packed.layers.offload import STAYS, LayerOffload
from megatron_packed.layers.recompute import NOTHING, Recompute, draws_random_numbers, mixed
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_layer import layer_norm_of
from megatron_packed.packed.params import PackedSeqParams


class MambaLayer(nn.Module):
    """``h + dropout(mamba(norm(h)))``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        cp: ContextParallel = ALL_ROWS,
        recompute: Recompute = NOTHING,
        offload: LayerOffload = STAYS,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.dropout, self.recompute, self.offload = config.hidden_dropout, recompute, offload
        self.norm = layer_norm_of(config, backends, device, dtype, tp)
        self.mixer = MambaMixer(
            config, backends=backends, tp=tp, cp=cp, offload=offload, device=device, dtype=dtype
        )

    def forward(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        draws, keep = draws_random_numbers(self), self.offload.keep_input
        return self.recompute.run_layer(self._run, hidden_TD, packed, draws=draws, keep=keep)

    def _run(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        parts = ("mamba_norm", self.norm, self.mixer)
        update_TD, residual_TD = mixed(self.recompute, self.offload, *parts, hidden_TD, packed)
        return residual_TD + F.dropout(update_TD, self.dropout, self.training)
