"""Tests of auxiliary losses against the written formulas and against megatron.core."""

import pytest
import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.moe.aux_loss import (
    auxiliary_loss,
    balance_probabilities,
    has_auxiliary_loss,
    load_balance_loss,
    unbiased_experts,
    z_loss,
)
from megatron_packed.layers.moe.router import chosen_experts
from megatron_packed.packed.params import Samples
from support.hybrid_cases import LOGITS


def unbiased_counts(logits_TE, valid_T, topk):
    return unbiased_experts(logits_TE, valid_T, topk).sum(dim=0)


VALID = torch.tensor([True, True, False])


def test_load_balance_loss_by_hand():
    """Compare with coeff * E / (K n^2) * sum_e count_e P_e over the two real tokens."""
    probabilities = torch.softmax(LOGITS, dim=-1)
    # One token uses experts 0 and 3, the other 1 and 2.
    counts = torch.tensor([1.0, 1.0, 1.0, 1.0])
    expected = (
        0.01
        * 4
        / (2 * 2**2)
        * sum(float(counts[e]) * float(probabilities[0, e] + probabilities[1, e]) for e in range(4))
    )
    loss = load_balance_loss(probabilities, counts, VALID, torch.tensor(2.0), topk=2, coeff=0.01)
    torch.testing.assert_close(loss, torch.tensor(expected))
    # With a balanced load the loss equals the coefficient.
    assert loss.item() == pytest.approx(0.01)


def test_load_balance_loss_punishes_a_crowded_expert():
    logits = torch.zeros(8, 4)
    logits[:, 0] = 5.0
    valid = torch.ones(8, dtype=torch.bool)
    crowded = load_balance_loss(
        torch.softmax(logits, -1),
        unbiased_counts(logits, valid, 1),
        valid,
        torch.tensor(8.0),
        topk=1,
        coeff=1.0,
    )
    # The loss is E times the probability of the expert that all tokens use.
    assert 3.5 < crowded < 4


def test_z_loss_by_hand():
    expected = 0.1 * (torch.logsumexp(LOGITS[0], 0) ** 2 + torch.logsumexp(LOGITS[1], 0) ** 2) / 2
    torch.testing.assert_close(z_loss(LOGITS, VALID, torch.tensor(2.0), coeff=0.1), expected)


def test_counts_leave_out_the_tail():
    assert unbiased_counts(LOGITS, VALID, 2).tolist() == [1, 1, 1, 1]
    assert unbiased_counts(LOGITS, torch.ones(3, dtype=torch.bool), 2).tolist() == [2, 1, 1, 2]


def test_losses_of_an_empty_pack_are_zero_with_zero_gradient():
    logits = LOGITS.clone().requires_grad_()
    empty, one = torch.zeros(3, dtype=torch.bool), torch.tensor(1.0)
    probabilities = balance_probabilities(logits, "sigmoid")
    loss = load_balance_loss(probabilities, torch.zeros(4), empty, one, topk=2, coeff=1.0)
    loss = loss + z_loss(logits, empty, one, coeff=1.0)
    loss.backward()
    assert loss == 0 and logits.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("options", "has_term"),
    [
        ({}, False),
        ({"moe_z_loss_coeff": 0.1}, True),
        ({"moe_aux_loss_coeff": 0.1}, True),
        ({"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"}, True),
        ({"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"}, False),
        ({"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"}, False),
    ],
)
def test_a_model_has_an_auxiliary_loss_if_the_loss_has_a_gradient(options, has_term):
    config = ModelConfig(
        hybrid_layer_pattern="E", hidden_size=8, num_experts=4, add_bias_linear=False, **options
    )
    logits = LOGITS.clone().requires_grad_()
    chosen = unbiased_experts(LOGITS, VALID, config.moe_router_topk)
    loss = auxiliary_loss(config, logits, chosen, VALID, torch.tensor(2.0))
    assert has_auxiliary_loss(config) == loss.requires_grad == has_term


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            id="expert bias",
        ),
        pytest.param({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, id="groups"),
    ],
)
def test_losses_add_up_and_count_by_scores_alone(limits):
    """The load-balance loss counts neither the choice with the expert bias nor that within groups."""
    config = ModelConfig(
        hybrid_layer_pattern="E",
        hidden_size=8,
        num_experts=4,
        add_bias_linear=False,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.2,
        **limits,
    )
    count = torch.tensor(2.0)
    # The choice within the first of two groups, and with a bias for the first two experts.
    routed = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2 + [[0.0] * 4])
    expected = load_balance_loss(
        balance_probabilities(LOGITS, config.moe_router_score_function),
        unbiased_counts(LOGITS, VALID, 2),
        VALID,
        count,
        topk=2,
        coeff=0.3,
    ) + z_loss(LOGITS, VALID, count, coeff=0.2)
    torch.testing.assert_close(auxiliary_loss(config, LOGITS, routed, VALID, count), expected)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_against_megatron_core(function):
    """Counts equal those of megatron.core, and losses agree up to rounding.

    megatron.core gets the unused rows as its padding mask.
    """
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils", exc_type=ImportError)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(40, 6, generator=generator)
    valid = torch.rand(40, generator=generator) < 0.7
    count = valid.sum().float()
    routing_map, scores = theirs.compute_routing_scores_for_aux_loss(
        logits, 3, function, padding_mask=~valid
    )
    counts = routing_map.sum(0)
    assert torch.equal(unbiased_counts(logits, valid, 3), counts.float())
    expected = theirs.switch_load_balancing_loss_func(scores, counts, counts.sum() / 3, 3, 6, 0.02)
    mine = load_balance_loss(
        balance_probabilities(logits, function), counts, valid, count, topk=3, coeff=0.02
    )
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(
        z_loss(logits, valid, count, coeff=0.3), theirs.z_loss_func(logits, 0.3, ~valid)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("real", [0, 5, 8, 19, 24])
def test_loss_per_sample_is_the_mean_of_single_samples(bias, real):
    """Compare values and gradients with those of the samples one by one, in float64.

    The pack has three samples of 8 slots, and its tail begins at ``real``.
    """
    config = ModelConfig(
        hybrid_layer_pattern="E",
        hidden_size=8,
        num_experts=6,
        add_bias_linear=False,
        moe_router_score_function="sigmoid" if bias else "softmax",
        moe_router_enable_expert_bias=bias,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.3,
    )
    slots, count = 8, 3
    generator = torch.Generator().manual_seed(real)
    logits = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    logits[8:16, 2] += 4  # the samples have different loads
    valid = torch.arange(24) < real
    ids = (logits + 0.5 * bias * torch.arange(6)).topk(2).indices
    num_valid = [min(max(real - slots * b, 1), slots) for b in range(count)]
    number = torch.tensor(float(count))
    samples = Samples(torch.arange(24) // slots, torch.tensor(num_valid).float(), number)

    def loss_of(rows, samples, num_valid):
        own = logits[rows].clone().requires_grad_()
        chosen = chosen_experts(ids[rows], valid[rows], 6)
        loss = auxiliary_loss(
            config, own, chosen, valid[rows], torch.tensor(float(num_valid)), samples=samples
        )
        return loss, torch.autograd.grad(loss, own)[0]

    found, gradient = loss_of(slice(0, 24), samples, max(real, 1))
    single = [loss_of(slice(slots * b, slots * (b + 1)), None, num_valid[b]) for b in range(count)]
    exact = {"rtol": 1e-12, "atol": 1e-15}
    torch.testing.assert_close(found, sum(loss for loss, _ in single) / count, **exact)
    torch.testing.assert_close(gradient, torch.cat([g for _, g in single]) / count, **exact)
    if real > slots:
        whole, _ = loss_of(slice(0, 24), None, real)
        assert abs(found / whole - 1) > 1e-3, "the loss of the pack would be the same"
