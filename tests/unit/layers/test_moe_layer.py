"""Tests of the MoE layer: outputs of tokens and of the tail, and reported values."""

from functools import partial

import pytest
import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.build_layers import build_layer
from megatron_packed.layers.moe.layer import MoE, count_valid
from megatron_packed.packed.params import PackedSeqParams, SharedTables
from support.hybrid_cases import CPU_BUILD
from support.random_tensors import filled, normal

REAL, TAIL = 7, 3
PACKED = PackedSeqParams.from_lengths([4, 3], REAL + TAIL)


def config(**changes):
    return ModelConfig(
        **{
            "hybrid_layer_pattern": "E",
            "hidden_size": 8,
            "num_experts": 4,
            "moe_ffn_hidden_size": 6,
            "add_bias_linear": False,
            "squared_relu": True,
            "normalization": "RMSNorm",
        }
        | changes
    )


def build(kind=MoE, **changes):
    return filled(kind(config(**changes), CPU_BUILD))


def inputs():
    return normal(REAL + TAIL, 8, seed=1)


def expert(moe, number, x):
    return torch.relu(x @ moe.experts.fc1[number].T).square() @ moe.experts.fc2[number].T


@pytest.mark.parametrize("shared", [None, 5])
def test_a_token_gets_the_weighted_sum_of_its_experts(shared):
    moe, x = build(moe_shared_expert_intermediate_size=shared), inputs()
    output = moe(x, PACKED)
    logits = x @ moe.router.weight.T
    for t in range(REAL):
        weights, chosen = logits[t].topk(2)
        weights = torch.softmax(weights, dim=0)
        expected = sum(w * expert(moe, int(e), x[t]) for w, e in zip(weights, chosen))
        if shared:
            expected = expected + moe.shared_expert(x[t : t + 1])[0]
        torch.testing.assert_close(output.hidden_TD[t], expected, rtol=1e-4, atol=1e-5)


def test_the_tail_gets_the_shared_expert_or_zeros():
    x = inputs()
    assert build()(x, PACKED).hidden_TD[REAL:].abs().max() == 0
    moe = build(moe_shared_expert_intermediate_size=5)
    torch.testing.assert_close(moe(x, PACKED).hidden_TD[REAL:], moe.shared_expert(x[REAL:]))


class RecordedStream:
    """Stands in for `SideStream` on a CPU: runs the part at once, and records the order."""

    def __init__(self, calls):
        self.calls = calls

    def start(self, part, x):
        self.calls.append("start")
        return part(x)

    def join(self):
        self.calls.append("join")


def test_the_shared_expert_starts_first_and_is_joined_last():
    """The order keeps memory safe: see [Note: parts beside the rest of a layer]."""
    options = {"moe_shared_expert_intermediate_size": 5, "moe_shared_expert_gate": True}
    plain, moe = (build(**options, moe_shared_expert_overlap=on) for on in (False, True))
    assert moe.side is None and moe.overlaps_shared_expert and not plain.overlaps_shared_expert
    calls: list[str] = []
    moe.side = RecordedStream(calls)
    for name in ("router", "experts"):
        getattr(moe, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    results = [one(x := inputs().requires_grad_(), PACKED).hidden_TD for one in (plain, moe)]
    assert calls == ["start", "router", "experts", "join"]
    torch.testing.assert_close(*results)
    x = inputs().requires_grad_()
    order: list[str] = []
    parts = {"shared": moe.shared_expert, "experts": moe.experts, "router": moe.router}
    for name, part in parts.items():
        leaf = next(iter(part.parameters()))
        leaf.register_hook(lambda _, name=name: order.append(name))
    moe(x, PACKED).hidden_TD.sum().backward()
    assert order == ["experts", "router", "shared"]  # backward ends with the shared expert


def test_counts_are_those_of_real_tokens():
    moe, x = build(), inputs()
    chosen = (x[:REAL] @ moe.router.weight.T).topk(2).indices
    expected = torch.bincount(chosen.flatten(), minlength=4).float()
    assert torch.equal(moe(x, PACKED).tokens_per_expert_E, expected)
    assert expected.sum() == 2 * REAL


def test_experts_without_tokens_and_all_tokens_to_one_expert():
    moe, x = build(moe_router_topk=1, moe_router_pre_softmax=True), inputs().abs()
    with torch.no_grad():
        moe.router.weight.fill_(0)
        moe.router.weight[2] = 1
    output = moe(x, PACKED)
    assert output.tokens_per_expert_E.tolist() == [0, 0, REAL, 0]
    output.hidden_TD.sum().backward()
    assert moe.experts.fc1.grad[2].abs().max() > 0
    assert moe.experts.fc1.grad[[0, 1, 3]].abs().max() == 0
    assert all(torch.isfinite(parameter.grad).all() for parameter in moe.parameters())


def test_the_layer_adds_to_the_stream_and_passes_the_report_on():
    layer, x = build(partial(build_layer, "E"), moe_z_loss_coeff=0.1), inputs()
    output = layer(x, PACKED)
    alone = layer.mixer(layer.norm(x), PACKED)
    torch.testing.assert_close(output.hidden_TD, x + alone.hidden_TD)
    assert torch.equal(output.aux_loss, alone.aux_loss) and output.aux_loss > 0
    assert torch.equal(output.tokens_per_expert_E, alone.tokens_per_expert_E)


def test_recomputing_the_layer_counts_its_losses_once():
    """Check that a recomputed layer counts its losses once.

    See [Note: auxiliary losses are outputs].
    """
    from torch.utils.checkpoint import checkpoint

    layer, x = (
        build(partial(build_layer, "E"), moe_z_loss_coeff=0.1, moe_aux_loss_coeff=0.2),
        inputs().requires_grad_(),
    )
    results = []
    for recompute in (False, True):
        layer.zero_grad()
        x.grad = None
        output = (
            checkpoint(layer, x, PACKED, use_reentrant=False) if recompute else layer(x, PACKED)
        )
        (output.hidden_TD.sum() + 3 * output.aux_loss).backward()
        results.append(
            (output.aux_loss, output.tokens_per_expert_E, x.grad, layer.mixer.router.weight.grad)
        )
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_auxiliary_losses_are_of_training_alone():
    moe, x = build(moe_z_loss_coeff=0.1, moe_aux_loss_coeff=0.2), inputs()
    assert moe(x, PACKED).aux_loss > 0
    output = moe.eval()(x, PACKED)
    assert output.aux_loss == 0 and output.tokens_per_expert_E.sum() > 0


def test_number_of_real_tokens_is_never_zero_and_taken_from_the_tables():
    assert count_valid(PACKED) == REAL
    assert count_valid(PackedSeqParams.from_lengths([], 4)) == 1
    assert count_valid(PACKED.with_tables(SharedTables(num_valid=torch.tensor(5.0)))) == 5
