"""Top-k routing of tokens to experts, and the losses that keep the experts balanced. All of it in
float32.

Letters: T tokens, D hidden size, E experts, K experts per token.

The formulas are Megatron's, with the slots of no document left out of every sum:

* softmax scores: the K highest logits, softmax over those K (or, with ``pre_softmax``, softmax over
  all E and then the K highest, not normalised again). Sigmoid scores: the K highest of
  ``sigmoid(logit) + expert_bias``; the weights are the sigmoids alone, divided by their sum when K
  > 1. Weights are multiplied by ``scaling_factor`` at the end.
* load-balance loss of one pack: ``coeff * E / (K n^2) * sum_e count_e * P_e`` with n tokens,
  ``count_e`` assignments of expert e (without the expert bias) and ``P_e`` the sum over tokens of
  its probability (softmax over all experts, or sigmoids divided by their sum). It is ``coeff`` when
  everything is balanced. Source: Switch Transformer, arXiv:2101.03961, eq. 4.
* z-loss of one pack: ``coeff * mean_t logsumexp(logits_t)^2``. Source: ST-MoE, arXiv:2202.08906,
  eq. 5.
* expert bias: after an optimizer step, ``bias_e += rate * sign(mean count - count_e)`` over the
  global batch. Source: auxiliary-loss-free balancing, arXiv:2408.15664.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.differentiable import Group, gather_rows
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.linear import linear
from megatron_packed.layers.parameters import keep_fp32, new_parameter
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.torch_private import foreach_add_

EPSILON = 1e-20
"""Keeps a division by a sum of sigmoids finite when all of them underflow."""


class Routing(NamedTuple):
    """Where every token goes."""

    topk_weights_TK: Tensor
    """``(T, K)`` float32."""
    topk_expert_ids_TK: Tensor
    """``(T, K)`` int64."""
    logits_TE: Tensor
    """``(T, E)`` float32, for the auxiliary losses."""


def topk_routing(
    logits_TE: Tensor,
    topk: int,
    *,
    score_function: str,
    pre_softmax: bool = False,
    scaling_factor: float | None = None,
    expert_bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and experts of every token; see the module's formulas.

    Args:
        logits_TE: ``(T, E)`` float32.
        expert_bias_E: ``(E,)`` float32, with sigmoid scores only; changes the choice, never the
        weights.
    Returns:
        ``(T, K)`` float32 weights and ``(T, K)`` int64 expert numbers, highest first.
    """
    if score_function == "softmax":
        if pre_softmax:
            weights_TK, ids_TK = torch.softmax(logits_TE, dim=-1).topk(topk, dim=-1)
        else:
            chosen_TK, ids_TK = logits_TE.topk(topk, dim=-1)
            weights_TK = torch.softmax(chosen_TK, dim=-1)
    else:
        scores_TE = torch.sigmoid(logits_TE)
        biased_TE = scores_TE if expert_bias_E is None else scores_TE + expert_bias_E
        ids_TK = biased_TE.detach().topk(topk, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if topk > 1:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + EPSILON)
    if scaling_factor:
        weights_TK = weights_TK * scaling_factor
    return weights_TK, ids_TK


def balance_probabilities(logits_TE: Tensor, score_function: str) -> Tensor:
    """What the load-balance loss takes for the probability of every expert: ``(T, E)``, rows sum to
    1.
    """
    if score_function == "softmax":
        return torch.softmax(logits_TE, dim=-1)
    scores_TE = torch.sigmoid(logits_TE)
    return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + EPSILON)


def load_balance_loss(
    probabilities_TE: Tensor,
    counts_E: Tensor,
    valid_T: Tensor,
    num_valid: Tensor,
    *,
    topk: int,
    coeff: float,
) -> Tensor:
    """The load-balance loss of one pack, 0 for a pack without tokens.

    Args:
        counts_E: ``(E,)`` assignments of real tokens to each expert.
        valid_T: ``(T,)`` bool, False on the tail.
        num_valid: 0-d float32, number of real tokens, at least 1 (a pack without any counts as 1).
    Returns:
        0-d float32, differentiable through the probabilities.
    """
    mass_E = (probabilities_TE * valid_T.unsqueeze(-1)).sum(dim=0)
    num_experts = probabilities_TE.shape[-1]
    return (
        (mass_E * counts_E.to(mass_E.dtype)).sum()
        * (coeff * num_experts / topk)
        / num_valid.square()
    )


def z_loss(logits_TE: Tensor, valid_T: Tensor, num_valid: Tensor, *, coeff: float) -> Tensor:
    """The z-loss of one pack: 0-d float32, 0 for a pack without tokens. Arguments as in
    `load_balance_loss`.
    """
    return (torch.logsumexp(logits_TE, dim=-1).square() * valid_T).sum() * coeff / num_valid


def count_routes(topk_expert_ids_TK: Tensor, valid_T: Tensor, num_experts: int) -> Tensor:
    """Assignments of real tokens to each expert.

    Returns:
        ``(E,)`` float32; sums of ones, so the order of the additions does not matter.
    """
    chosen_TE = torch.zeros(
        valid_T.shape[0], num_experts, dtype=torch.float32, device=valid_T.device
    )
    chosen_TE.scatter_(1, topk_expert_ids_TK, 1.0)
    return (chosen_TE * valid_T.unsqueeze(-1)).sum(dim=0)


def unbiased_counts(logits_TE: Tensor, valid_T: Tensor, topk: int) -> Tensor:
    """Assignments per expert as they would be without the expert bias, which is what the
    load-balance loss counts.
    """
    return count_routes(logits_TE.detach().topk(topk, dim=-1).indices, valid_T, logits_TE.shape[1])


@torch.no_grad()
def update_expert_bias(
    biases: Sequence[Tensor], counts_LE: Tensor, rate: float, skip: Tensor | None = None
) -> None:
    """Nudge the bias of every expert towards equal load, in place; on the device only.

    Args:
        biases: L tensors ``(E,)`` float32, one for each layer.
        counts_LE: ``(L, E)`` assignments per expert over the whole global batch, any dtype.
        rate: size of the nudge.
        skip: 0-d bool; True leaves the biases as they were (a step that was not taken must not move
            them either).
    """
    counts_LE = counts_LE.to(
        torch.float64
    )  # the mean of counts beyond 2^24 must not round across a count
    step_LE = torch.sign(counts_LE.mean(dim=-1, keepdim=True) - counts_LE).float() * rate
    if skip is not None:
        step_LE = torch.where(skip, 0.0, step_LE)
    foreach_add_(list(biases), list(step_LE.unbind()))


class Router(nn.Module):
    """Scores of all experts for every token, and the K that each token goes to.

    Args:
        config: number of experts, K, score function, coefficients of the losses.
        rows_group: tensor-parallel ranks that have rows of their own each; all of them choose for
            all rows.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: TensorParallel = SINGLE,
        cp: ContextParallel = ALL_ROWS,
        rows_group: Group | None = None,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.cp, self.rows_group = cp, rows_group
        assert config.num_experts is not None, "a config with an E layer has num_experts"
        self.config, self.num_experts, self.topk = (
            config,
            config.num_experts,
            config.moe_router_topk,
        )
        self.score_function = config.moe_router_score_function
        fp32 = {"device": device, "dtype": torch.float32}
        self.weight = keep_fp32(new_parameter(self.num_experts, config.hidden_size, **fp32))
        tp.use_inside(self.weight)
        bias_E = (
            torch.zeros(self.num_experts, **fp32) if config.moe_router_enable_expert_bias else None
        )
        self.register_buffer("expert_bias", bias_E)

    def forward(self, x_TD: Tensor) -> Routing:
        """Choices for all T tokens of the tensor-parallel ranks, from the rows that this one has."""
        logits_TE = gather_rows(linear(x_TD.to(self.weight.dtype), self.weight), self.rows_group)
        weights_TK, ids_TK = topk_routing(
            logits_TE,
            self.topk,
            score_function=self.score_function,
            pre_softmax=self.config.moe_router_pre_softmax,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            expert_bias_E=self.expert_bias,
        )
        return Routing(weights_TK, ids_TK, logits_TE)

    def aux_loss(
        self, routing: Routing, counts_E: Tensor, valid_T: Tensor, num_valid: Tensor
    ) -> Tensor:
        """Load-balance loss plus z-loss of one pack, 0-d float32; 0 outside training.

        Both are sums over tokens once the counts are known, which have no gradient. So
        context-parallel ranks add up the counts, and each returns the term of its own rows.

        Args:
            counts_E: ``(E,)`` assignments of real tokens as routed, of this rank's rows.
            valid_T: ``(T,)`` bool, of this rank's rows.
            num_valid: 0-d float32, real tokens of the whole pack, at least 1.
        """
        config = self.config
        total = torch.zeros((), dtype=torch.float32, device=valid_T.device)
        if not self.training:
            return total
        if config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff:
            if self.expert_bias is not None:
                counts_E = unbiased_counts(routing.logits_TE, valid_T, self.topk)
            total = total + load_balance_loss(
                balance_probabilities(routing.logits_TE, self.score_function),
                self.cp.sum_of_statistics(counts_E),
                valid_T,
                num_valid,
                topk=self.topk,
                coeff=config.moe_aux_loss_coeff,
            )
        if config.moe_z_loss_coeff:
            total = total + z_loss(
                routing.logits_TE, valid_T, num_valid, coeff=config.moe_z_loss_coeff
            )
        return total
