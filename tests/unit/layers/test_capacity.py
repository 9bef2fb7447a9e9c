"""Tests of the tokens that an expert with a capacity accepts, against plain lists."""

import pytest
import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.moe.capacity import NOWHERE, drop_beyond_capacity, expert_capacity
from megatron_packed.layers.moe.layer import MoE
from megatron_packed.packed.params import PackedSeqParams
from support.hybrid_cases import CPU_BUILD
from support.random_tensors import filled

T, K, E = 13, 2, 4


def routed(seed=0, tail=3):
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(T, E, generator=generator).topk(K)
    return ids.masked_fill(torch.arange(T)[:, None] >= T - tail, NOWHERE), weights


def by_lists(ids, weights, capacity, policy):
    kept = set()
    for expert in range(E):
        takers = [(t, k) for t in range(T) for k in range(K) if ids[t, k] == expert]
        if policy == "probs":
            takers.sort(
                key=lambda route: -float(weights[route])
            )  # The sort is stable: of equal weights the first tokens win.
        kept |= set(takers[:capacity])
    return torch.tensor(
        [[int(ids[t, k]) if (t, k) in kept else NOWHERE for k in range(K)] for t in range(T)]
    )


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("capacity", [1, 2, 3, 5, T])
def test_an_expert_keeps_as_many_as_it_has_room_for(capacity, policy):
    dropped = 0
    for seed in range(5):
        ids, weights = routed(seed)
        found = drop_beyond_capacity(ids, weights, E, capacity, policy)
        assert torch.equal(found, by_lists(ids, weights, capacity, policy))
        dropped += int((found != ids).sum())
    assert (dropped > 0) == (capacity < T)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_exactly_full_and_one_beyond(policy):
    """Check nine tokens for one expert with equal weights: with capacity 8 the ninth is dropped."""
    ids = torch.full((T, 1), NOWHERE)
    ids[2:11] = 3
    weights = torch.full((T, 1), 0.5)
    assert torch.equal(drop_beyond_capacity(ids, weights, E, 9, policy), ids)
    found = drop_beyond_capacity(ids, weights, E, 8, policy)
    assert found[10] == NOWHERE and torch.equal(found[:10], ids[:10])


def test_a_token_of_weight_zero_has_its_place():
    """Check that an expert below its capacity accepts tokens of any weight."""
    ids, weights = torch.full((T, 1), NOWHERE), torch.zeros(T, 1)
    ids[8] = 1
    assert torch.equal(drop_beyond_capacity(ids, weights, E, 1, "probs"), ids)


def test_no_host_sync_and_static_shapes():
    ids, weights = routed()
    found = drop_beyond_capacity(
        ids.to("meta"), weights.to("meta"), E, 2, "probs"
    )  # Meta tensors have no values to read.
    assert found.shape == (T, K)


def test_capacity_rounds_up():
    assert expert_capacity(4096, 2, 8, 1.25) == 1280
    assert expert_capacity(13, 2, 4, 0.5) == 4


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_layer_drops_assignments_beyond_the_capacity_and_counts_those_requested(policy):
    packed = PackedSeqParams.from_lengths([4, 6], T)
    config = ModelConfig(
        hybrid_layer_pattern="E",
        hidden_size=8,
        num_experts=E,
        moe_ffn_hidden_size=6,
        add_bias_linear=False,
        squared_relu=True,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_expert_capacity_factor=1.0,
        moe_token_drop_policy=policy,
    )
    moe = filled(MoE(config, CPU_BUILD))
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = torch.linspace(1, 0.1, 8)
    x = torch.rand(
        T, 8, generator=torch.Generator().manual_seed(1)
    )  # All tokens select expert 2, with the capacity ceil(13 / 4) = 4.
    output = moe(x, packed)
    assert output.tokens_per_expert_E.tolist() == [0, 0, 10, 0]
    kept = output.hidden_TD.abs().sum(1) > 0
    scores = torch.softmax(x @ moe.router.weight.T, dim=-1)[:10, 2]
    highest = sorted(scores.topk(4).indices.tolist())
    first = [0, 1, 2, 3]
    assert highest != first
    assert kept.nonzero().flatten().tolist() == (highest if policy == "probs" else first)
    output.hidden_TD.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in moe.parameters())
