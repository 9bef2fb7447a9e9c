"""Tests of routing against the written formulas, and against megatron.core if it is installed."""

import math

import pytest
import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.moe.router import ExpertGroups, Router, topk_routing, update_expert_bias
from megatron_packed.packed.params import PackedSeqParams
from support.hybrid_cases import CPU_BUILD, LOGITS
from support.random_tensors import normal


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def test_softmax_over_the_chosen():
    weights, ids = topk_routing(LOGITS, 2, score_function="softmax")
    assert ids.tolist() == [[0, 3], [1, 2], [0, 3]]
    first = math.exp(2.0) / (math.exp(2.0) + math.exp(1.0))
    torch.testing.assert_close(weights[0], torch.tensor([first, 1 - first]))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def test_pre_softmax_is_not_normalised_again():
    weights, ids = topk_routing(
        LOGITS, 2, score_function="softmax", pre_softmax=True, scaling_factor=2.0
    )
    total = sum(math.exp(value) for value in (2.0, 0.5, -1.0, 1.0))
    torch.testing.assert_close(
        weights[0], torch.tensor([2 * math.exp(2.0) / total, 2 * math.exp(1.0) / total])
    )
    assert ids[0].tolist() == [0, 3]


def test_sigmoid_weights_are_normalised_over_the_chosen():
    weights, ids = topk_routing(LOGITS, 2, score_function="sigmoid", scaling_factor=2.5)
    a, b = sigmoid(2.0), sigmoid(1.0)
    assert ids[0].tolist() == [0, 3]
    torch.testing.assert_close(weights[0], torch.tensor([2.5 * a / (a + b), 2.5 * b / (a + b)]))


def test_one_sigmoid_expert_keeps_its_score():
    weights, _ = topk_routing(LOGITS, 1, score_function="sigmoid")
    torch.testing.assert_close(weights[0], torch.tensor([sigmoid(2.0)]))


def test_expert_bias_changes_the_choice_and_not_the_weights():
    bias = torch.tensor([-1.0, 0.0, 1.0, 0.0])
    logits = LOGITS.clone().requires_grad_()
    weights, ids = topk_routing(logits, 2, score_function="sigmoid", expert_bias_E=bias)
    assert ids[0].tolist() == [2, 3]
    a, b = sigmoid(-1.0), sigmoid(1.0)
    torch.testing.assert_close(weights[0], torch.tensor([a / (a + b), b / (a + b)]))
    weights[:, 0].sum().backward()
    assert logits.grad[0, 2] != 0 and logits.grad[0, 0] == 0


def test_groups_are_chosen_by_the_sum_of_their_best_values():
    """Six experts in three groups: a group of two good experts beats one with the best expert."""
    logits = torch.tensor([[3.0, -3.0, 2.5, 2.4, 0.0, 1.0]])
    by_two = topk_routing(logits, 2, score_function="sigmoid", groups=ExpertGroups(3, 1))
    assert by_two[1].tolist() == [[2, 3]]
    by_one = topk_routing(logits, 2, score_function="softmax", groups=ExpertGroups(3, 2))
    assert by_one[1].tolist() == [[0, 2]]
    # A token with five experts in two groups: a group's sum has two values, with the bias.
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0])
    logits = torch.tensor([[4.0, 4.0, -9.0, 1.0, 1.0, 1.0, 0.0, 0.0, -5.0]])
    limited = ExpertGroups(3, 2)
    weights, ids = topk_routing(
        logits, 5, score_function="sigmoid", expert_bias_E=bias, groups=limited
    )
    assert sorted(ids[0].tolist()) == [0, 1, 6, 7, 8]
    _, ids = topk_routing(logits, 5, score_function="sigmoid", groups=limited)
    assert sorted(ids[0].tolist()) == [0, 1, 3, 4, 5]
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_expert_bias_moves_towards_the_starved_and_not_on_a_skipped_step():
    biases = [torch.zeros(4), torch.ones(4)]
    counts = torch.tensor([[10, 2, 6, 6], [1, 1, 1, 1]])
    update_expert_bias(biases, counts, 0.01, torch.tensor(True))
    assert biases[0].tolist() == [0, 0, 0, 0]
    update_expert_bias(biases, counts, 0.01, torch.tensor(False))
    torch.testing.assert_close(biases[0], torch.tensor([-0.01, 0.01, 0.0, 0.0]))
    torch.testing.assert_close(biases[1], torch.ones(4))


def test_expert_bias_sees_one_assignment_more_among_2_to_the_24():
    """float32 rounds 2^24 + 1 to 2^24, so these loads would look equal."""
    bias = torch.zeros(4)
    counts = torch.tensor([[2**24 + 1, 2**24, 2**24, 2**24]])
    update_expert_bias([bias], counts, 0.01)
    torch.testing.assert_close(bias, torch.tensor([-0.01, 0.01, 0.01, 0.01]))


def make_router(**changes):
    config = ModelConfig(
        hybrid_layer_pattern="E",
        hidden_size=8,
        num_experts=4,
        add_bias_linear=False,
        moe_router_topk=2,
        **changes,
    )
    router = Router(config, CPU_BUILD)
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(0))
    return router


def test_router_computes_in_float32_whatever_the_model_does():
    router = make_router()
    x = normal(5, 8, seed=1).bfloat16().requires_grad_()
    routing = router(x, PackedSeqParams.from_lengths([5], 5))
    assert routing.logits_TE.dtype == routing.topk_weights_TK.dtype == torch.float32
    assert torch.equal(routing.logits_TE, x.detach().float() @ router.weight.t())
    routing.topk_weights_TK[:, 0].sum().backward()
    assert x.grad.dtype == torch.bfloat16 and router.weight.grad.dtype == torch.float32
    assert router.weight.keep_fp32


def test_against_megatron_core():
    """Selected experts equal those of megatron.core, and their weights agree up to rounding."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils", exc_type=ImportError)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(40, 6, generator=generator)
    bias = torch.randn(6, generator=generator) * 0.2
    for function in ("softmax", "sigmoid"):
        for options in (
            {},
            {"scaling_factor": 2.5},
            {"pre_softmax": True} if function == "softmax" else {"bias": bias},
            {"groups": (3, 2)} if function == "softmax" else {"bias": bias, "groups": (2, 1)},
        ):
            groups = options.get("groups")
            mine = topk_routing(
                logits,
                3,
                score_function=function,
                pre_softmax=options.get("pre_softmax", False),
                scaling_factor=options.get("scaling_factor"),
                expert_bias_E=options.get("bias"),
                groups=groups and ExpertGroups(*groups),
            )
            probs, routing_map = theirs.topk_routing_with_score_function(
                logits,
                3,
                use_pre_softmax=options.get("pre_softmax", False),
                scaling_factor=options.get("scaling_factor"),
                score_function=function,
                expert_bias=options.get("bias"),
                num_groups=groups and groups[0],
                group_topk=groups and groups[1],
            )
            torch.testing.assert_close(torch.zeros_like(logits).scatter(1, mine[1], mine[0]), probs)
            assert torch.equal(torch.zeros_like(routing_map).scatter(1, mine[1], True), routing_map)
