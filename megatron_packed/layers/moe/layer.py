"""Mixture of experts: top-k routing, with an optional expert that every token visits.

Letters: T tokens, D hidden size, E experts, K experts per token.

[Note: auxiliary losses are outputs]
The layer returns its auxiliary loss and its counts beside the hidden state, as tensors. The model
adds the losses up and scales them (``scales[1]``), so their gradient arrives as an ordinary output
gradient. Nothing is hidden in a global, a buffer that someone must reset, or an autograd function
that scales on its own; a recomputed layer counts once, and a captured layer owns one more static
output and its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.mlp import MLP
from megatron_packed.layers.moe.capacity import NOWHERE, drop_beyond_capacity, expert_capacity
from megatron_packed.layers.moe.dispatcher import make_dispatcher
from megatron_packed.layers.moe.experts import GroupedExperts
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.moe.router import Router, Routing, count_routes
from megatron_packed.layers.offload import STAYS, LayerOffload
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.packed.params import PackedSeqParams


class MoEReport(NamedTuple):
    """See [Note: auxiliary losses are outputs]."""

    aux_loss: Tensor
    """0-d float32, load-balance loss plus z-loss of this pack, coefficients applied; 0 outside
    training. The terms of context-parallel ranks, each from its rows, add up to it.
    """
    tokens_per_expert_E: Tensor
    """``(E,)`` float32, assignments of real tokens, those beyond a capacity included."""
    dropped: Tensor
    """0-d float32, assignments of real tokens that found no room in their expert's capacity."""
    overflow: Tensor
    """0-d float32: 1 if rows found no room in a static buffer, so that the result is wrong. Alike
    on all ranks that share the experts. See [Note: static expert buffer].
    """


class MoEOutput(NamedTuple):
    """What an E layer returns: the hidden state, and its `MoEReport`."""

    hidden_TD: Tensor
    """``(T, D)``; on the tail the shared expert's output, or zeros."""
    aux_loss: Tensor
    tokens_per_expert_E: Tensor
    dropped: Tensor
    overflow: Tensor

    @property
    def report(self) -> MoEReport:
        """All but the hidden state, which would else live as long as what is reported."""
        return MoEReport(*self[1:])


def count_valid(packed: PackedSeqParams) -> Tensor:
    """Real tokens of the pack as a 0-d float32 on the device, at least 1 so that one may divide by
    it.
    """
    prepared = packed.tables.get("num_valid")
    if isinstance(prepared, Tensor):
        return prepared
    return packed.valid.sum(dtype=torch.float32).clamp(min=1)


class MoE(nn.Module):
    """Router, dispatcher, experts, shared expert.

    Tensor-parallel ranks route all tokens alike. They share the inner channels of the shared
    expert, and either those of the experts or the experts' tokens (see [Note: whose tokens]).

    Args:
        config: sizes and routing options; experts have no biases.
        ep: the ranks that share the experts.
        recompute_activation, offload: see `GroupedExperts`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        cp: ContextParallel = ALL_ROWS,
        ep: ExpertParallel | None = None,
        recompute_activation: bool = False,
        offload: LayerOffload = STAYS,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.ep = config, tp, cp, ep or ExpertParallel(tp=tp)
        options = {
            "kind": config.activation,
            "backends": backends,
            "device": device,
            "dtype": dtype,
        }
        self.router = Router(config, tp=tp, cp=cp, rows_group=self.ep.rows_group, device=device)
        self.experts = GroupedExperts(
            self.router.num_experts,
            config.hidden_size,
            config.moe_ffn_hidden_size,
            ep=self.ep,
            recompute_activation=recompute_activation,
            offload=offload,
            **options,
        )
        self.dispatcher = make_dispatcher(config, self.ep, backends)
        self.shared_expert: MLP | None = None
        if config.moe_shared_expert_intermediate_size:
            # It enters and leaves together with experts that are split alike.
            options["tp"] = tp if self.ep.whole_experts else tp.inside()
            self.shared_expert = MLP(
                config.hidden_size,
                config.moe_shared_expert_intermediate_size,
                bias=False,
                **options,
            )

    def forward(self, x_TD: Tensor, packed: PackedSeqParams) -> MoEOutput:
        entered_TD, valid_T = self.ep.enter(x_TD), self.cp.valid(packed)
        routing = self.router(entered_TD)
        ids_TK, dropped = self._destinations(routing, valid_T)
        y_TD, overflow = self.dispatcher(
            entered_TD,
            self.ep.dispatched(ids_TK),
            self.ep.dispatched(routing.topk_weights_TK),
            self.experts,
        )
        if self.shared_expert is not None and not self.ep.whole_experts:
            y_TD = y_TD + self.shared_expert(entered_TD)
        y_TD = self.ep.leave(y_TD)
        if self.shared_expert is not None and self.ep.whole_experts:
            y_TD = y_TD + self.shared_expert(x_TD)
        counts_E = count_routes(routing.topk_expert_ids_TK, valid_T, self.router.num_experts)
        aux_loss = self.router.aux_loss(routing, counts_E, valid_T, count_valid(packed))
        return MoEOutput(y_TD, self.tp.counted_once(aux_loss), counts_E, dropped, overflow)

    def _destinations(self, routing: Routing, valid_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts that the tokens go to, and how many assignments found no room.

        Returns:
            ``(T, K)`` expert numbers, ``NOWHERE`` for the tail and for what is dropped; 0-d
            float32, what is dropped.
        """
        ids_TK, config = (
            routing.topk_expert_ids_TK.masked_fill(~valid_T[:, None], NOWHERE),
            self.config,
        )
        if config.moe_expert_capacity_factor is None:
            return ids_TK, torch.zeros((), dtype=torch.float32, device=ids_TK.device)
        capacity = expert_capacity(
            *ids_TK.shape, self.router.num_experts, config.moe_expert_capacity_factor
        )
        weights_TK = routing.topk_weights_TK.detach()
        policy = config.moe_token_drop_policy
        kept_TK = drop_beyond_capacity(
            ids_TK, weights_TK, self.router.num_experts, capacity, policy
        )
        return kept_TK, (kept_TK != ids_TK).sum(dtype=torch.float32)
