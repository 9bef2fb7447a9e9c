"""Both halves of each kind of layer, and the class of layer that the mixer needs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_packed.config.kinds.layer_kind import KINDS, LayerPart
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.build_layers import build_layer
from megatron_packed.layers.hybrid_layer import HybridLayer, ProjectedLayer
from megatron_packed.layers.kinds.registry import MIXERS
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases
from support.hybrid_cases import CPU_BUILD


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


def changed_kind(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change fields of the record of MLPs."""
    monkeypatch.setitem(MIXERS, "-", dataclasses.replace(MIXERS["-"], **changes))


class Mixer(nn.Module):
    """MLP whose gate is a plain linear layer; ``width`` is that of its output."""

    def __init__(self, config: ModelConfig, build: Build, width: int | None = None) -> None:
        super().__init__()
        self.fc1 = self.mlp_act = self.fc2 = nn.Identity()
        outputs = config.hidden_size if width is None else width
        self.gate = nn.Linear(config.hidden_size, outputs, bias=False, device=build.device)

    def forward(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        y_TD: Tensor = self.gate(x_TD)
        return y_TD


@pytest.mark.parametrize("symbol", MIXERS)
def test_parameters_of_all_kinds_say_what_a_tensor_parallel_rank_holds(symbol: str) -> None:
    layer_on_two_ranks(symbol)


def layer_on_two_ranks(symbol: str) -> None:
    build = Build(
        backends=Backends(), tp=TensorParallel(size=2), device="meta", dtype=torch.float32
    )
    build_layer(symbol, cases.tiny_config(symbol, add_bias_linear=False), build)


def test_a_parameter_without_a_shard_is_refused_on_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed_kind(monkeypatch, build=lambda config, build, place: Mixer(config, build))
    with pytest.raises(
        ValueError, match=r"MLP layer has parameters .* mixer\.gate\.weight\. Build"
    ):
        layer_on_two_ranks("-")


def test_a_mixer_with_an_output_of_another_shape_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the check, the addition would broadcast a column over the hidden state."""
    changed_kind(
        monkeypatch,
        build=lambda config, build, place: Mixer(config, build, width=1),
        layer=HybridLayer,
    )
    layer = build_layer("-", cases.tiny_config("-"), CPU_BUILD)
    packed = PackedSeqParams.from_lengths([3], 4)
    with pytest.raises(
        ValueError, match=r"Mixer returned \(4, 1\) for a hidden state of \(4, 32\)"
    ):
        layer(torch.zeros(4, 32), packed)


def test_a_parameter_without_initial_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_kind(monkeypatch, fills={})
    with pytest.raises(
        ValueError, match=r"layers\.0\.mixer\.\S+ has; add 'fc\d\.weight' to `fills`"
    ):
        cases.tiny_model("-")


def test_a_part_that_is_no_module_of_the_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (*KINDS["-"].parts, LayerPart("mlp_gate", "mixer.gated"))
    changed_kind(monkeypatch, kind=dataclasses.replace(KINDS["-"], parts=parts))
    with pytest.raises(ValueError, match=r"no module 'mixer\.gated', .* for 'mlp_gate'"):
        cases.tiny_model("-")
