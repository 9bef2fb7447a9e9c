"""Top-k routing of tokens to experts, in float32.

Letters: T tokens, D hidden size, E experts, K experts per token.

The formulas are Megatron's, but every sum excludes slots that belong to no document. The formulas
of the auxiliary losses are in `aux_loss`.

* Softmax scores: select the K highest logits, then take the softmax over these K. With
  ``pre_softmax``: take the softmax over all E, then select the K highest, without normalising
  again.
* Sigmoid scores: select the K highest of ``sigmoid(logit) + expert_bias``. The weights are the
  sigmoids without the bias, divided by their sum if K > 1.
* Groups of experts: the values from which the K highest are selected are first limited to G of N
  groups of consecutive experts. A group's value is the sum of its ``K // G`` highest values.
* In all cases the weights are finally multiplied by ``scaling_factor``.
* Expert bias: after an optimizer step, ``bias_e += rate * sign(mean count - count_e)`` over the
  global batch. Source: auxiliary-loss-free balancing, arXiv:2408.15664.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.differentiable import Group, gather_rows
from megatron_packed.layers.build import Build
from megatron_packed.layers.moe.random_logits import random_logits, replace_values
from megatron_packed.layers.parameters import keep_fp32
from megatron_packed.ops.router_logits.api import router_logits
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.torch_private import foreach_add_

EPSILON = 1e-20
"""Small number that keeps a division by a sum of sigmoids finite if all sigmoids underflow."""


class Routing(NamedTuple):
    """Experts of every token, with their weights."""

    topk_weights_TK: Tensor
    """``(T, K)`` float32: weights of the selected experts."""
    topk_expert_ids_TK: Tensor
    """``(T, K)`` int64: ids of the selected experts."""
    logits_TE: Tensor
    """``(T, E)`` float32: logits of all experts, for the auxiliary losses."""


class ExpertGroups(NamedTuple):
    """Groups of consecutive experts, of which every token uses the experts of a few."""

    num_groups: int
    """They have equal numbers of experts."""
    chosen: int
    """Number of groups of a token."""

    def limit(self, values_TE: Tensor, topk: int) -> Tensor:
        """Return the values with -inf for each expert outside its token's best groups.

        Args:
            values_TE: ``(T, E)`` values from which the K highest are selected.
            topk: K.
        """
        values_TNX = torch.unflatten(values_TE, 1, (self.num_groups, -1))
        best_TN = values_TNX.detach().topk(topk // self.chosen, dim=-1).values.sum(dim=-1)
        groups_TG = best_TN.topk(self.chosen, dim=-1).indices
        closed_TN = torch.ones_like(best_TN, dtype=torch.bool).scatter_(1, groups_TG, False)
        return values_TNX.masked_fill(closed_TN[..., None], -torch.inf).flatten(1)


def topk_routing(
    logits_TE: Tensor,
    topk: int,
    *,
    score_function: str,
    pre_softmax: bool = False,
    scaling_factor: float | None = None,
    expert_bias_E: Tensor | None = None,
    groups: ExpertGroups | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the K experts of every token and return their weights and ids.

    The formulas are in the docstring of this module.

    Args:
        logits_TE: ``(T, E)`` float32.
        topk: K.
        score_function: ``softmax`` or ``sigmoid``.
        pre_softmax: True takes the softmax before the selection.
        scaling_factor: factor of the weights; None means 1.
        expert_bias_E: ``(E,)`` float32, for sigmoid scores only; it changes the selection, never
            the weights.
        groups: groups of experts that limit the selection; None for no limit.
    Returns:
        ``(T, K)`` float32 weights and ``(T, K)`` int64 expert ids, in descending order of score.
    """

    def highest(values_TE: Tensor) -> tuple[Tensor, Tensor]:
        open_TE = values_TE if groups is None else groups.limit(values_TE, topk)
        values_TK, ids_TK = open_TE.topk(topk, dim=-1)
        return values_TK, ids_TK

    if score_function == "softmax":
        if pre_softmax:
            weights_TK, ids_TK = highest(torch.softmax(logits_TE, dim=-1))
        else:
            chosen_TK, ids_TK = highest(logits_TE)
            weights_TK = torch.softmax(chosen_TK, dim=-1)
    else:
        scores_TE = torch.sigmoid(logits_TE)
        biased_TE = scores_TE if expert_bias_E is None else scores_TE + expert_bias_E
        ids_TK = highest(biased_TE.detach())[1]
        weights_TK = scores_TE.gather(1, ids_TK)
        if topk > 1:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + EPSILON)
    if scaling_factor:
        weights_TK = weights_TK * scaling_factor
    return weights_TK, ids_TK


def chosen_experts(topk_expert_ids_TK: Tensor, valid_T: Tensor, num_experts: int) -> Tensor:
    """Return ``(T, E)`` float32: 1 for each expert of each real token, else 0.

    Sums of ones are exact, so the order of the additions does not matter.
    """
    chosen_TE = torch.zeros(
        valid_T.shape[0], num_experts, dtype=torch.float32, device=valid_T.device
    )
    chosen_TE.scatter_(1, topk_expert_ids_TK, 1.0)
    return chosen_TE * valid_T.unsqueeze(-1)


@torch.no_grad()
def update_expert_bias(
    biases: Sequence[Tensor], counts_LE: Tensor, rate: float, skip: Tensor | None = None
) -> None:
    """Adjust the bias of every expert towards equal load, in place, without a host sync.

    Args:
        biases: L tensors ``(E,)`` float32, one for each layer.
        counts_LE: ``(L, E)`` assignments per expert over the global batch, any dtype.
        rate: size of the change.
        skip: 0-d bool; True leaves the biases unchanged, for an optimizer step that is skipped.
    """
    # Use float64: for counts above 2^24 a float32 mean could round to the wrong side of a count.
    counts_LE = counts_LE.to(torch.float64)
    step_LE = torch.sign(counts_LE.mean(dim=-1, keepdim=True) - counts_LE).float() * rate
    if skip is not None:
        step_LE = torch.where(skip, 0.0, step_LE)
    foreach_add_(list(biases), list(step_LE.unbind()))


class Router(nn.Module):
    """Router: computes the scores of all experts and selects K experts for every token.

    Args:
        config: number of experts, K, score function.
        build: arguments that all layers share.
        rows_group: tensor-parallel group, if each of its ranks dispatches its own rows; else None.
            All these ranks route all rows.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        *,
        rows_group: Group | None = None,
    ) -> None:
        super().__init__()
        self.cp = build.cp
        self.rows_group = rows_group
        self.backend = build.backends.router_logits
        self.routing_seed = 0
        """Seed of random logits; `initialize` sets it from the seed of the run and the name."""
        assert config.num_experts is not None, "a config with an E layer must set num_experts"
        self.config = config
        self.num_experts = config.num_experts
        self.topk = config.moe_router_topk
        self.score_function = config.moe_router_score_function
        sizes = config.limiting_expert_groups
        self.groups = ExpertGroups(*sizes) if sizes else None
        self.weight = keep_fp32(
            build.new_parameter(self.num_experts, config.hidden_size, dtype=torch.float32)
        )
        build.tp.use_inside(self.weight)
        bias_E = None
        if config.moe_router_enable_expert_bias:
            bias_E = torch.zeros(self.num_experts, device=build.device, dtype=torch.float32)
        self.register_buffer("expert_bias", bias_E)

    def forward(self, x_TD: Tensor, packed: PackedSeqParams) -> Routing:
        """Route all T tokens of the tensor-parallel ranks.

        Args:
            x_TD: rows that this rank dispatches. If there is a ``rows_group``, the logits of the
                other rows are gathered from its ranks.
            packed: metadata of the pack, for random logits.
        """
        logits_TE = router_logits(x_TD, self.weight, backend=self.backend)
        if self.rows_group is not None:
            logits_TE = gather_rows(logits_TE, self.rows_group)
        if self.config.moe_router_force_load_balancing:
            document_T = self.cp.own(packed.seq_idx.view(-1), packed)
            position_T = self.cp.own(packed.position_ids, packed)
            logits_TE = replace_values(
                logits_TE,
                random_logits(self.routing_seed, document_T, position_T, self.num_experts),
            )
        weights_TK, ids_TK = topk_routing(
            logits_TE,
            self.topk,
            score_function=self.score_function,
            pre_softmax=self.config.moe_router_pre_softmax,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            expert_bias_E=self.expert_bias,
            groups=self.groups,
        )
        return Routing(weights_TK, ids_TK, logits_TE)
