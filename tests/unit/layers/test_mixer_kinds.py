"""Both halves of each kind of layer, and the class of layer that the mixer needs."""

import pytest
import torch

from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.build_layers import build_layer
from megatron_packed.layers.hybrid_layer import ProjectedLayer
from megatron_packed.layers.kinds.registry import MIXERS
from support import hybrid_cases as cases


def test_each_kind_has_a_record_with_torch() -> None:
    assert {symbol: kind.kind for symbol, kind in MIXERS.items()} == dict(KINDS)


@pytest.mark.parametrize("symbol", MIXERS)
def test_mixers_that_add_the_residual_are_in_layers_that_offer_it(symbol: str) -> None:
    build = Build(backends=Backends(), device="meta", dtype=torch.float32)
    layer = build_layer(symbol, cases.tiny_config(symbol), build)
    adds = getattr(type(layer.mixer).forward, "adds_residual", False)
    assert isinstance(layer, ProjectedLayer) == adds


@pytest.mark.parametrize("symbol", MIXERS)
def test_each_name_in_a_checkpoint_of_megatron_begins_a_parameter(symbol: str) -> None:
    changes = {
        "add_bias_linear": symbol != "E",
        "qk_layernorm": True,
        "moe_latent_size": 8,
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
    }
    build = Build(backends=Backends(), device="meta", dtype=torch.float32)
    layer = build_layer(symbol, cases.tiny_config(symbol, **changes), build)
    parameters = [name for name, _ in layer.named_parameters()]
    beginnings = MIXERS[symbol].megatron.modules
    for beginning in beginnings:
        assert any(name.startswith(beginning) for name in parameters), beginning
    for name in parameters:
        assert any(name.startswith(beginning) for beginning in beginnings), name
