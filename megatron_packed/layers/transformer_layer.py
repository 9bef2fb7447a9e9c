"""Layers of the pattern symbols ``*``, ``-`` and ``E``: one norm, one mixer, one residual addition
each.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Attention, Rotary
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.implementation import implementation
from megatron_packed.layers.mlp import MLP
from megatron_packed.layers.moe.layer import MoE, MoEOutput
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.norm import Norm
from megatron_packed.layers.offload import STAYS, LayerOffload
from megatron_packed.layers.recompute import NOTHING, Recompute, draws_random_numbers, mixed
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.packed.params import PackedSeqParams


def layer_norm_of(
    config: ModelConfig,
    backends: Backends,
    device: torch.device | str,
    dtype: torch.dtype,
    tp: TensorParallel = SINGLE,
) -> Norm:
    """The norm in front of a mixer, or behind the last layer."""
    return implementation(backends.transformer_impl, device, dtype).norm(
        config.hidden_size,
        kind=config.normalization,
        eps=config.norm_epsilon,
        device=device,
        dtype=dtype,
        backend=backends.rms_norm,
        tp=tp,
    )


class TransformerLayer(nn.Module):
    """``h + dropout(mixer(norm(h)))`` with attention (``*``) or an MLP (``-``).

    Args:
        symbol: ``*`` or ``-``.
        rotary: shared position tables for attention, or None.
        recompute: what of it the backward pass computes again.
        offload: where what it keeps waits.
    """

    def __init__(
        self,
        symbol: str,
        config: ModelConfig,
        *,
        rotary: Rotary | None,
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
        self.mixer: nn.Module
        if symbol == "*":
            options = {
                "backends": backends,
                "tp": tp,
                "cp": cp,
                "offload": offload,
                "device": device,
                "dtype": dtype,
            }
            self.mixer = Attention(
                config, rotary=rotary, recompute_core=recompute.core_attention, **options
            )
        else:
            assert symbol == "-", symbol
            self.mixer = MLP(
                config.hidden_size,
                config.ffn_hidden_size,
                kind=config.activation,
                bias=config.add_bias_linear,
                backends=backends,
                tp=tp,
                offload=offload,
                device=device,
                dtype=dtype,
            )
        self.norm_name = "attn_norm" if symbol == "*" else "mlp_norm"

    def forward(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        draws, keep = draws_random_numbers(self), self.offload.keep_input
        return self.recompute.run_layer(self._run, hidden_TD, packed, draws=draws, keep=keep)

    def _run(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        parts = (self.norm_name, self.norm, self.mixer)
        update_TD, residual_TD = mixed(self.recompute, self.offload, *parts, hidden_TD, packed)
        return residual_TD + F.dropout(update_TD, self.dropout, self.training)


class MoETransformerLayer(nn.Module):
    """``h + dropout(moe(norm(h)))`` (``E``), with what the mixture reports passed on."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        cp: ContextParallel = ALL_ROWS,
        ep: ExpertParallel | None = None,
        recompute: Recompute = NOTHING,
        offload: LayerOffload = STAYS,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.dropout, self.recompute, self.offload = config.hidden_dropout, recompute, offload
        self.norm = layer_norm_of(config, backends, device, dtype, tp)
        ranks = {"tp": tp, "cp": cp, "ep": ep}
        kept = {"recompute_activation": recompute.expert_activation, "offload": offload}
        self.mixer = MoE(config, backends=backends, **ranks, **kept, device=device, dtype=dtype)

    def forward(self, hidden_TD: Tensor, packed: PackedSeqParams) -> MoEOutput:
        draws, keep = draws_random_numbers(self), self.offload.keep_input
        return self.recompute.run_layer(self._run, hidden_TD, packed, draws=draws, keep=keep)

    def _run(self, hidden_TD: Tensor, packed: PackedSeqParams) -> MoEOutput:
        parts = ("mlp_norm", self.norm, self.mixer)
        output, residual_TD = mixed(self.recompute, self.offload, *parts, hidden_TD, packed)
        update_TD = F.dropout(output.hidden_TD, self.dropout, self.training)
        return output._replace(hidden_TD=residual_TD + update_TD)
