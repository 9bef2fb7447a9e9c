"""Auxiliary losses of a mixture of experts: load-balance loss and z-loss, in float32.

Letters: T tokens, E experts, K experts per token.

The formulas are Megatron's, but every sum excludes slots that belong to no document:

* load-balance loss of one pack: ``coeff * E / (K n^2) * sum_e count_e * P_e``. n is the number of
  tokens and ``count_e`` the number of assignments to expert e. These assignments are by scores
  alone, without the expert bias and without groups of experts.
  ``P_e`` is the sum over tokens of the expert's probability (softmax over all experts, or sigmoids
  divided by their sum). The loss equals ``coeff`` for a perfectly balanced load. Source: Switch
  Transformer, arXiv:2101.03961, eq. 4.
* ``seq_aux_loss``: the mean of the load-balance losses of the samples of a pack.
* ``global_aux_loss``: `GlobalBalance`, because it needs the loads of other ranks and micro-batches.
* z-loss of one pack: ``coeff * mean_t logsumexp(logits_t)^2``. Source: ST-MoE, arXiv:2202.08906,
  eq. 5.

[Note: auxiliary losses are outputs]
The layer returns its auxiliary loss and its counts as tensors, next to the hidden state. The model
adds the losses and scales the sum (``scales[1]``), so the gradient of a loss is an ordinary output
gradient of the layer. The layer needs no global variable, no buffer that must be reset, and no
autograd function that scales gradients. So a recomputed layer is counted once, and a captured layer
needs only one more static output and its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.context_parallel import ALL_ROWS, ContextParallel
from megatron_packed.layers.moe.router import EPSILON, chosen_experts
from megatron_packed.packed.params import Samples


def auxiliary_loss(
    config: ModelConfig,
    logits_TE: Tensor,
    chosen_TE: Tensor,
    valid_T: Tensor,
    num_valid: Tensor,
    *,
    samples: Samples | None = None,
    share: float = 1.0,
    cp: ContextParallel = ALL_ROWS,
) -> Tensor:
    """Return the load-balance loss plus the z-loss of one pack, each with its coefficient.

    The load-balance loss of ``global_aux_loss`` is not part of the result.

    Given the counts, which have no gradient, both losses are sums over tokens. So context-parallel
    ranks sum the counts, and each rank returns the loss term of its own rows.

    Args:
        config: score function, type of balancing, coefficients.
        logits_TE: ``(T, E)`` float32, of this rank's rows.
        chosen_TE: `chosen_experts` as routed, of this rank's rows.
        valid_T: ``(T,)`` bool, of this rank's rows.
        num_valid: 0-d float32, real tokens of the pack on all ranks, at least 1.
        samples: samples of the pack, each with a load-balance loss; None for one sample.
        share: factor of the load-balance loss.
        cp: context parallelism of this rank.
    Returns:
        0-d float32.
    """
    total = torch.zeros((), dtype=torch.float32, device=valid_T.device)
    topk = config.moe_router_topk
    if _balances_packs(config):
        chosen_TE = experts_by_score(config, logits_TE, chosen_TE, valid_T)
        probabilities_TE = balance_probabilities(logits_TE, config.moe_router_score_function)
        coeff = config.moe_aux_loss_coeff * share
        if samples is None:
            counts_E = cp.sum_of_statistics(chosen_TE.sum(dim=0))
            balance = load_balance_loss(
                probabilities_TE, counts_E, valid_T, num_valid, topk=topk, coeff=coeff
            )
        else:
            counts = counts_of_documents if config.balances_documents else counts_of_samples
            counts_BE = cp.sum_of_statistics(counts(chosen_TE, samples))
            balance = load_balance_of_samples(
                probabilities_TE, counts_BE, valid_T, samples, topk=topk, coeff=coeff
            )
        total = total + balance
    if config.moe_z_loss_coeff:
        total = total + z_loss(logits_TE, valid_T, num_valid, coeff=config.moe_z_loss_coeff)
    return total


def has_auxiliary_loss(config: ModelConfig) -> bool:
    """Return True if a model's `auxiliary_loss` has a term; without one it is 0."""
    has_term = _balances_packs(config) or bool(config.moe_z_loss_coeff)
    return has_term and config.balances_experts


def _balances_packs(config: ModelConfig) -> bool:
    """Return True if each pack, or each of its samples, has a load-balance loss."""
    kind = config.moe_router_load_balancing_type
    return kind in ("aux_loss", "seq_aux_loss") and config.moe_aux_loss_coeff != 0


def balance_probabilities(logits_TE: Tensor, score_function: str) -> Tensor:
    """Return ``(T, E)`` probabilities of the experts for the load-balance loss; rows sum to 1."""
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
    """Return the load-balance loss of one pack; 0 for a pack without tokens.

    Args:
        probabilities_TE: ``(T, E)`` float32 from `balance_probabilities`.
        counts_E: ``(E,)`` assignments of real tokens to each expert.
        valid_T: ``(T,)`` bool, False on the tail.
        num_valid: 0-d float32, number of real tokens; 1 for a pack without real tokens.
        topk: K.
        coeff: coefficient of the loss.
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


def load_balance_of_samples(
    probabilities_TE: Tensor,
    counts_BE: Tensor,
    valid_T: Tensor,
    samples: Samples,
    *,
    topk: int,
    coeff: float,
) -> Tensor:
    """Return the mean of the load-balance losses of samples; samples without tokens have 0.

    Each probability is multiplied by the weight of its sample and expert, which has no gradient. So
    no sum depends on the order in which a device adds.

    Args:
        probabilities_TE: ``(T, E)`` float32 from `balance_probabilities`.
        counts_BE: ``(B, E)`` assignments of real tokens of each sample to each expert.
        valid_T: ``(T,)`` bool, False on the tail.
        samples: sample of each row, numbers of real tokens, and number of samples.
        topk: K.
        coeff: coefficient of the loss.
    Returns:
        0-d float32, differentiable through the probabilities.
    """
    num_experts = counts_BE.shape[1]
    num_valid_B = samples.num_valid_B.to(probabilities_TE.dtype)
    factor_B = (coeff * num_experts / topk) / (samples.number * num_valid_B.square())
    weights_TE = (counts_BE * factor_B[:, None]).index_select(0, samples.sample_T)
    return (probabilities_TE * (weights_TE * valid_T.unsqueeze(-1))).sum()


def z_loss(logits_TE: Tensor, valid_T: Tensor, num_valid: Tensor, *, coeff: float) -> Tensor:
    """Return the z-loss of one pack: 0-d float32, 0 for a pack without tokens.

    For the arguments see `load_balance_loss`.
    """
    return (torch.logsumexp(logits_TE, dim=-1).square() * valid_T).sum() * coeff / num_valid


def unbiased_experts(logits_TE: Tensor, valid_T: Tensor, topk: int) -> Tensor:
    """Return the `chosen_experts` of routing by scores alone, for the load-balance loss."""
    ids_TK = logits_TE.detach().topk(topk, dim=-1).indices
    return chosen_experts(ids_TK, valid_T, logits_TE.shape[1])


def experts_by_score(
    config: ModelConfig, logits_TE: Tensor, chosen_TE: Tensor, valid_T: Tensor
) -> Tensor:
    """Return the `chosen_experts` that the load-balance loss counts.

    Args:
        chosen_TE: `chosen_experts` as routed.
    """
    if config.moe_router_enable_expert_bias or config.limiting_expert_groups:
        return unbiased_experts(logits_TE, valid_T, config.moe_router_topk)
    return chosen_TE


def counts_of_documents(chosen_TE: Tensor, samples: Samples) -> Tensor:
    """Return ``(B, E)`` sums over the rows of each document; the order of the additions of ones does
    not matter.

    A matrix product as in `counts_of_samples` would need B x T numbers for many documents.
    """
    counts_BE = chosen_TE.new_zeros(samples.num_valid_B.shape[0], chosen_TE.shape[1])
    return counts_BE.index_add_(0, samples.sample_T, chosen_TE)


def counts_of_samples(chosen_TE: Tensor, samples: Samples) -> Tensor:
    """Return ``(B, E)`` sums over the rows of each sample; a matrix product of 0 and 1 is exact."""
    number_B = torch.arange(samples.num_valid_B.shape[0], device=chosen_TE.device)
    member_BT = (samples.sample_T == number_B[:, None]).to(chosen_TE.dtype)
    return member_BT @ chosen_TE
