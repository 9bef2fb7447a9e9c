"""Mixture of experts: dropless top-k routing, with an optional expert that every token visits.

Letters: T tokens, D hidden size, E experts.

[Note: auxiliary losses are outputs]
The layer returns its auxiliary loss and its counts beside the hidden state, as tensors. The model adds the losses up
and scales them (``scales[1]``), so their gradient arrives as an ordinary output gradient. Nothing is hidden in a
global, a buffer that someone must reset, or an autograd function that scales on its own; a recomputed layer counts
once, and a captured layer owns one more static output and its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.mlp import MLP
from megatron_packed.layers.moe.dispatcher import LocalDispatcher
from megatron_packed.layers.moe.experts import GroupedExperts
from megatron_packed.layers.moe.router import Router
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.packed.params import PackedSeqParams


class MoEOutput(NamedTuple):
    """See [Note: auxiliary losses are outputs]."""

    hidden_TD: Tensor
    """``(T, D)``; on the tail the shared expert's output, or zeros."""
    aux_loss: Tensor
    """0-d float32, load-balance loss plus z-loss of this pack, coefficients applied; 0 outside training. The terms of
    context-parallel ranks, each from its rows, add up to it."""
    tokens_per_expert_E: Tensor
    """``(E,)`` float32, assignments of real tokens."""


def count_valid(packed: PackedSeqParams) -> Tensor:
    """Real tokens of the pack as a 0-d float32 on the device, at least 1 so that one may divide by it."""
    prepared = packed.tables.get("num_valid")
    if isinstance(prepared, Tensor):
        return prepared
    return packed.valid.sum(dtype=torch.float32).clamp(min=1)


class MoE(nn.Module):
    """Router, dispatcher, experts, shared expert.

    Tensor-parallel ranks route all tokens alike and share the inner channels of the experts.

    Args:
        config: sizes and routing options; experts have no biases.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        cp: ContextParallel = ALL_ROWS,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp, self.cp = tp, cp
        options = {"kind": config.activation, "backends": backends, "device": device, "dtype": dtype}
        options["tp"] = tp.inside()  # experts and shared expert enter and leave together
        self.router = Router(config, tp=tp, cp=cp, device=device)
        self.dispatcher = LocalDispatcher(self.router.num_experts, backends)
        self.experts = GroupedExperts(
            self.router.num_experts, config.hidden_size, config.moe_ffn_hidden_size, **options
        )
        self.shared_expert: MLP | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_expert = MLP(
                config.hidden_size, config.moe_shared_expert_intermediate_size, bias=False, **options
            )

    def forward(self, x_TD: Tensor, packed: PackedSeqParams) -> MoEOutput:
        x_TD, valid_T = self.tp.enter(x_TD), self.cp.valid(packed)
        routing = self.router(x_TD)
        permuted = self.dispatcher.dispatch(x_TD, routing.topk_expert_ids_TK, valid_T)
        y_RD = self.experts(permuted.x_RD, permuted.offsets_E)
        y_TD = self.dispatcher.combine(y_RD, permuted, routing.topk_weights_TK)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        counts_E = permuted.tokens_per_expert_E.float()
        aux_loss = self.router.aux_loss(routing, counts_E, valid_T, count_valid(packed))
        return MoEOutput(self.tp.leave(y_TD), self.tp.counted_once(aux_loss), counts_E)
