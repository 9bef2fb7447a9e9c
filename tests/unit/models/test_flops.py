"""Operation counts, compared with PyTorch's own counter and with numbers computed by hand."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_packed.models.estimate.parameter_count import count_parameters
from megatron_packed.models.flops import FlopCounter
from support import hybrid_cases as cases

LENGTHS = [3, 8, 20]


def counted(model, lengths) -> int:
    """Return PyTorch's count for a forward pass up to the logits."""
    batch = cases.make_pack(cases.make_documents(lengths))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(batch.tokens, batch.packed)
    return counter.get_total_flops()


def flops_of(config, lengths):
    return FlopCounter(config, cases.VOCAB).forward(lengths)


@pytest.mark.parametrize("variant", ["plain", "half rope, qkv bias, swiglu"])
def test_dense_layers_as_pytorch_counts_them(variant):
    model = cases.tiny_model("--", make_vocab_size_divisible_by=1, **cases.VARIANTS[variant])
    assert flops_of(model.config, LENGTHS).total == counted(model, LENGTHS)


@pytest.mark.parametrize("repeated", [False, True])
def test_depths_of_multi_token_prediction_as_pytorch_counts_them(repeated):
    model = cases.tiny_model(
        "-/-/-", make_vocab_size_divisible_by=1, mtp_use_repeated_layer=repeated
    )
    batch = cases.make_pack(cases.make_documents(LENGTHS))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch)
    flops = FlopCounter(model.config, cases.VOCAB)
    assert flops.forward(LENGTHS).total == counter.get_total_flops()
    counted_by_hand = count_parameters(model.config, cases.VOCAB).total
    assert counted_by_hand == model.num_parameters


def test_attention_is_half_of_all_pairs_of_each_document():
    model = cases.tiny_model("*", make_vocab_size_divisible_by=1)
    flops = flops_of(model.config, LENGTHS)
    # The reference also multiplies masked pairs, which are half of all pairs.
    assert flops.projections + flops.output + 2 * flops.attention == counted(model, LENGTHS)
    assert flops.attention == 4 * 4 * 8 * sum(n * n for n in LENGTHS) / 2


@pytest.mark.parametrize("swiglu, matrices", [(False, 1), (True, 2)])
def test_adapters_of_experts_by_hand(swiglu, matrices):
    """A token uses the adapters of its experts. The gradients of frozen weights do not count."""
    sizes = {"moe_router_topk": 3, "swiglu": swiglu, "squared_relu": not swiglu}
    plain = flops_of(cases.tiny_config("E", **sizes), [10]).projections
    flops = FlopCounter(cases.tiny_config("E", lora_rank=4, **sizes), cases.VOCAB)
    A, B = matrices * 4 * 32 + 4 * 16, matrices * 16 * 4 + 32 * 4
    adapters = 10 * 3 * 2 * (A + B)
    assert flops.forward([10]).projections == plain + adapters
    assert flops.training([10]).projections == 2 * plain + 3 * adapters


def test_router_and_experts_by_hand():
    config = cases.tiny_config("E", moe_router_topk=3, moe_shared_expert_intermediate_size=24)
    flops = flops_of(config, [10])
    assert flops.projections == 10 * (2 * 32 * 5 + 3 * 2 * (2 * 32 * 16) + 2 * (2 * 32 * 24))
    gated = cases.tiny_config(
        "E",
        moe_router_topk=3,
        moe_shared_expert_intermediate_size=24,
        moe_shared_expert_gate=True,
    )
    gate = flops_of(gated, [10]).projections - flops.projections
    assert gate == 10 * 2 * 32
    assert flops.output == 10 * 2 * 32 * 64
    assert flops.attention == flops.scan == 0
    latent = cases.tiny_config(
        "E", moe_router_topk=3, moe_shared_expert_intermediate_size=24, moe_latent_size=12
    )
    inside = 10 * (3 * 2 * (2 * (32 - 12) * 16) - 4 * 32 * 12)
    assert flops.projections - flops_of(latent, [10]).projections == inside


@pytest.mark.parametrize("value_head_dim", [8, 6])
def test_gated_delta_net_by_hand(value_head_dim):
    """20 tokens, 2 key heads of 8 and 4 value heads; the count does not depend on documents."""
    config = cases.tiny_config("G", linear_value_head_dim=value_head_dim, linear_conv_kernel_dim=3)
    keys, values = 2 * 8, 4 * value_head_dim
    flops = flops_of(config, [20])
    assert flops.projections == 20 * 2 * 32 * ((2 * keys + 2 * values + 2 * 4) + values)
    assert flops.scan == 20 * 2 * (3 * (2 * keys + values) + 4 * 4 * 8 * value_head_dim)
    assert flops == flops_of(config, [1, 16, 3])


def test_a_key_head_for_each_value_head_as_megatron_counts():
    """Compare with Megatron's formula, in which keys and values have the same width."""
    config = cases.tiny_config("G", linear_num_key_heads=4, linear_value_head_dim=8)
    hidden, qk, v, heads, width = 32, 4 * 8, 4 * 8, 4, 8
    projections = hidden * (2 * qk + 2 * v + 2 * heads) + hidden * v
    rule = 4 * (2 * qk + v) + 4 * heads * width**2
    found = flops_of(config, [7])
    assert found.projections + found.scan == 2 * 7 * (projections + rule)
    assert found.attention == 0


def test_scan_by_hand():
    """20 tokens in chunks of 8 give pieces of 8, 8 and 4 tokens: 72 pairs and 3 chunk states."""
    config = cases.tiny_config("M")
    flops = flops_of(config, [20])
    inner, states = 4 * 8, 2 * 16
    pairs = (2 * states + 2 * inner) * (8 * 8 + 8 * 8 + 4 * 4) / 2
    per_token = 4 * inner * 16 + 2 * inner + 2 * 4 * (inner + 2 * states)
    assert flops.scan == pairs + 20 * per_token + 3 * 2 * inner * 16
    assert flops.projections == 20 * 2 * 32 * (2 * inner + 2 * states + 4 + inner)


def test_only_attention_and_scan_depend_on_how_tokens_are_divided():
    counter = FlopCounter(cases.tiny_config("M*-E"), cases.VOCAB)
    one, many = counter.forward([64]), counter.forward([8] * 8)
    assert (one.projections, one.output) == (many.projections, many.output)
    assert one.attention == 8 * many.attention
    assert counter.forward([]).total == 0


def test_a_window_limits_the_visible_pairs():
    """One layer of two has the window; pairs of long documents are counted one by one."""
    changes = {"window_size": "7,0", "window_attn_skip_freq": "[1, 0]"}
    plain, limited = (
        FlopCounter(cases.tiny_config("**", **options), cases.VOCAB) for options in ({}, changes)
    )
    full, pairs = plain.forward([5, 40]).attention / 2, 0.0
    for length in (5, 40):
        distance = np.arange(length)[:, None] - np.arange(length)
        # Half of the pairs of a token with itself count, as in L^2 / 2.
        pairs += ((distance >= 0) & (distance < 8)).sum() - min(length, 8) / 2
    assert limited.forward([5, 40]).attention == pytest.approx(full + full / 812.5 * pairs)
    assert limited.linear_and_quadratic(8) == plain.linear_and_quadratic()
    per_token, per_square = limited.linear_and_quadratic(9)
    assert per_square == plain.linear_and_quadratic()[1] / 2
    assert per_token > plain.linear_and_quadratic()[0]


def test_training_is_three_times_forward():
    config = cases.tiny_config("M*-E")
    counter = FlopCounter(config, cases.VOCAB)
    assert counter.training(LENGTHS).total == pytest.approx(3 * counter.forward(LENGTHS).total)


@pytest.mark.parametrize("frozen", [{}, {"lora_rank": 8}, {"lora_rank": 8, "mtp": True}])
def test_six_n_t_agrees_where_there_are_only_matrix_products(frozen):
    """For an MLP ``6 N T`` equals the count, except for the norms' parameters.

    Frozen parameters count 4, also if multi-token prediction uses them again.
    """
    pattern = "----/-/-" if frozen.pop("mtp", False) else "----"
    config = cases.tiny_config(pattern, hidden_size=256, ffn_hidden_size=1024, **frozen)
    counter = FlopCounter(config, cases.VOCAB)
    found = counter.six_n_t(100) + counter.repeated_work(100)
    assert found == pytest.approx(counter.training([100]).total, rel=1e-3)
    assert (counter.repeated_work(100) > 0) == ("/" in pattern)
    assert counter.six_n_t(100) == 100 * (
        6 * counter.parameters.multiplied - 2 * counter.parameters.multiplied_frozen
    )


def test_the_two_costs_per_token_and_per_square_add_up_to_the_forward_pass():
    """The costs are exact for complete chunks; without attention the quadratic cost is 0."""
    for pattern in ("*-", "M-E", "M*E", "G-*E"):
        counter = FlopCounter(cases.tiny_config(pattern), cases.VOCAB)
        lengths = [cases.CHUNK, 5 * cases.CHUNK, 2 * cases.CHUNK]
        per_token, per_square = counter.linear_and_quadratic()
        estimate = per_token * sum(lengths) + per_square * sum(length**2 for length in lengths)
        assert estimate == pytest.approx(counter.forward(lengths).total)
        assert (per_square > 0) == ("*" in pattern)
