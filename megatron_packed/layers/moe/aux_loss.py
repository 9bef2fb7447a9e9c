"""Auxiliary losses of a mixture of experts: load-balance loss and z-loss, in float32.

Letters: T tokens, E experts, K experts per token.

The formulas are Megatron's, with the slots of no document left out of every sum:

* load-balance loss of one pack: ``coeff * E / (K n^2) * sum_e count_e * P_e`` with n tokens,
  ``count_e`` assignments of expert e (without the expert bias) and ``P_e`` the sum over tokens of
  its probability (softmax over all experts, or sigmoids divided by their sum). It is ``coeff`` when
  everything is balanced. Source: Switch Transformer, arXiv:2101.03961, eq. 4.
* z-loss of one pack: ``coeff * mean_t logsumexp(logits_t)^2``. Source: ST-MoE, arXiv:2202.08906,
  eq. 5.

[Note: auxiliary losses are outputs]
The layer returns its auxiliary loss and its counts beside the hidden state, as tensors. The model
adds the losses up and scales them (``scales[1]``), so their gradient arrives as an ordinary output
gradient. Nothing is hidden in a global, a buffer that someone must reset, or an autograd function
that scales on its own; a recomputed layer counts once, and a captured layer owns one more static
output and its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel

EPSILON = 1e-20
"""Keeps a division by a sum of sigmoids finite when all of them underflow."""


def auxiliary_loss(
    config: ModelConfig,
    logits_TE: Tensor,
    counts_E: Tensor,
    valid_T: Tensor,
    num_valid: Tensor,
    *,
    cp: ContextParallel = ALL_ROWS,
) -> Tensor:
    """Return load-balance loss plus z-loss of one pack in training, coefficients applied.

    Both are sums over tokens once the counts are known, which have no gradient. So
    context-parallel ranks add up the counts, and each returns the term of its own rows.

    Args:
        config: score function, kind of balancing, coefficients.
        logits_TE: ``(T, E)`` float32, of this rank's rows.
        counts_E: ``(E,)`` assignments of real tokens as routed, of this rank's rows.
        valid_T: ``(T,)`` bool, of this rank's rows.
        num_valid: 0-d float32, real tokens of the whole pack, at least 1.
    Returns:
        0-d float32.
    """
    total = torch.zeros((), dtype=torch.float32, device=valid_T.device)
    topk = config.moe_router_topk
    if config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff:
        if config.moe_router_enable_expert_bias:
            counts_E = unbiased_counts(logits_TE, valid_T, topk)
        total = total + load_balance_loss(
            balance_probabilities(logits_TE, config.moe_router_score_function),
            cp.sum_of_statistics(counts_E),
            valid_T,
            num_valid,
            topk=topk,
            coeff=config.moe_aux_loss_coeff,
        )
    if config.moe_z_loss_coeff:
        total = total + z_loss(logits_TE, valid_T, num_valid, coeff=config.moe_z_loss_coeff)
    return total


def balance_probabilities(logits_TE: Tensor, score_function: str) -> Tensor:
    """Return the probability of every expert for the load-balance loss: ``(T, E)``, rows sum to 1."""
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
    """Return the load-balance loss of one pack, 0 for a pack without tokens.

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
    """Return the z-loss of one pack: 0-d float32, 0 for a pack without tokens.

    Arguments as in `load_balance_loss`.
    """
    return (torch.logsumexp(logits_TE, dim=-1).square() * valid_T).sum() * coeff / num_valid


def count_routes(topk_expert_ids_TK: Tensor, valid_T: Tensor, num_experts: int) -> Tensor:
    """Count the assignments of real tokens to each expert.

    Returns:
        ``(E,)`` float32; sums of ones, so the order of the additions does not matter.
    """
    chosen_TE = torch.zeros(
        valid_T.shape[0], num_experts, dtype=torch.float32, device=valid_T.device
    )
    chosen_TE.scatter_(1, topk_expert_ids_TK, 1.0)
    return (chosen_TE * valid_T.unsqueeze(-1)).sum(dim=0)


def unbiased_counts(logits_TE: Tensor, valid_T: Tensor, topk: int) -> Tensor:
    """Count assignments per expert as they would be without the expert bias.

    The load-balance loss counts these.
    """
    return count_routes(logits_TE.detach().topk(topk, dim=-1).indices, valid_T, logits_TE.shape[1])
