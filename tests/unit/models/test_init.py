"""Initial values: their distributions, and that they depend only on seed and name."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_packed.models.estimate.parameter_count import count_parameters
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.init import initial_value, seed_of
from support import hybrid_cases as cases

STD = 0.03
"""Another value than the default."""
CONFIG = cases.tiny_config(
    "M*-E" * 2, hidden_size=256, num_attention_heads=8, kv_channels=32, init_method_std=STD
)


def value(name, *shape, seed=1, config=CONFIG):
    return initial_value(name, torch.Size(shape), config, seed)


@pytest.mark.parametrize(
    "name",
    [
        "embedding.weight",
        "output.weight",
        "layers.1.mixer.qkv.weight",
        "layers.2.mixer.fc1.weight",
        "layers.0.mixer.in_proj.weight",
        "layers.3.mixer.router.weight",
        "layers.3.mixer.experts.fc1",
    ],
)
def test_weights_are_normal(name):
    drawn = value(name, 400, 256)
    assert drawn.std().item() == pytest.approx(STD, rel=0.02)
    assert abs(drawn.mean().item()) < 3 * STD / drawn.numel() ** 0.5


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.mixer.proj.weight",
        "layers.2.mixer.fc2.weight",
        "layers.0.mixer.out_proj.weight",
        "layers.3.mixer.experts.fc2",
        "layers.3.mixer.shared_expert.fc2.weight",
    ],
)
def test_projections_into_the_residual_stream_shrink_with_depth(name):
    assert value(name, 400, 256).std().item() == pytest.approx(STD / math.sqrt(8), rel=0.02)


def test_mamba_parameters():
    a = value("layers.0.mixer.A_log", 2000).exp()
    assert 1 <= a.min() < 1.2 and 15.8 < a.max() <= 16
    step = F.softplus(value("layers.0.mixer.dt_bias", 2000))
    assert 0.000999 <= step.min() < 0.0011 and 0.095 < step.max() <= 0.1001
    # The step is uniform in the logarithm.
    assert step.log().mean().item() == pytest.approx(math.log(0.01), abs=0.1)
    assert torch.equal(value("layers.0.mixer.D", 5), torch.ones(5))
    taps = value("layers.0.mixer.conv1d.weight", 1000, 4)
    assert 0.49 < taps.abs().max() <= 0.5
    assert 0.4 < value("layers.0.mixer.conv1d.bias", 1000).abs().max() <= 0.5


def test_parameters_of_gated_delta_nets():
    """Check that ``dt_bias`` is 1 in a G layer only, and that the convolution's width is its own."""
    config = cases.tiny_config("MG")
    a = value("layers.1.mixer.A_log", 2000, config=config).exp()
    assert 1 <= a.min() < 1.2 and 15.8 < a.max() <= 16
    assert torch.equal(value("layers.1.mixer.dt_bias", 5, config=config), torch.ones(5))
    assert value("layers.0.mixer.dt_bias", 5, config=config).max() < 0
    assert torch.equal(value("layers.1.mixer.norm.weight", 6, config=config), torch.ones(6))
    taps = value("layers.1.mixer.conv1d.weight", 1000, 2, config=config)
    assert 0.7 < taps.abs().max() <= 2**-0.5


def test_a_value_depends_on_seed_and_name_only():
    """The same layer of another model, and a model in bfloat16, have the same initial values."""
    first = dict(cases.tiny_model("M*-").named_parameters())
    second = dict(cases.tiny_model("M*M").named_parameters())
    bf16 = dict(cases.tiny_model("M*-", dtype=torch.bfloat16).named_parameters())
    assert torch.equal(first["layers.1.mixer.proj.weight"], second["layers.1.mixer.proj.weight"])
    assert torch.equal(first["output.weight"], second["output.weight"])
    assert torch.equal(first["output.weight"].bfloat16(), bf16["output.weight"])
    assert torch.equal(first["layers.0.mixer.dt_bias"], bf16["layers.0.mixer.dt_bias"])
    other = dict(cases.tiny_model("M*-", seed=8).named_parameters())
    assert not torch.equal(first["output.weight"], other["output.weight"])
    names = [
        "layers.0.mixer.in_proj.weight",
        "layers.1.mixer.qkv.weight",
        "layers.2.mixer.fc1.weight",
    ]
    assert len({first[name].flatten()[0].item() for name in names}) == 3


def test_seeds_are_the_same_on_every_machine():
    assert seed_of(1234, "embedding.weight") == 3190461980920848579


def test_the_global_generator_is_not_touched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    cases.tiny_model("M*-E")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_parameters_are_counted_without_building(variant):
    for pattern in ("M*-E", "M*G-"):
        model = cases.tiny_model(pattern, **cases.VARIANTS[variant])
        count = count_parameters(model.config, cases.VOCAB)
        assert count.total == model.num_parameters
        if pattern == "M*G-":
            assert count.active == count.total
    biased = cases.tiny_config("M*-", add_bias_linear=True)
    built = HybridModel(biased, vocab_size=cases.VOCAB, max_positions=8)
    assert count_parameters(biased, cases.VOCAB).total == built.num_parameters


def test_active_parameters_hold_the_experts_that_a_token_visits():
    config = cases.tiny_config("E", moe_router_topk=2)
    count = count_parameters(config, cases.VOCAB)
    assert count.total - count.active == 3 * 2 * 32 * 16  # 3 unused experts of two (32, 16) weights
    assert count.multiplied == count.active - 64 * 32
