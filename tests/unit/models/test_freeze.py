"""Frozen parameters of a model: which patterns are refused, and what a plan and a count know."""

import dataclasses

import pytest
import torch

from megatron_packed.config.errors import ConfigError
from megatron_packed.distributed.flat_buffers import FlatBuffers, flat_layout_of
from megatron_packed.distributed.zero1_layout import Ownership
from megatron_packed.models.estimate.parameter_count import count_parameters
from megatron_packed.models.estimate.rank_memory import estimate
from megatron_packed.models.estimate.step_memory import MetaStep, Work
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import small_config
from support import hybrid_cases as cases
from support.layouts import MODEL, VOCAB


def trained_names(**changes) -> list[str]:
    config = dataclasses.replace(MODEL, **changes)
    model = HybridModel(config, vocab_size=VOCAB, max_positions=8, device="meta")
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_pattern_matches_complete_names():
    everything = trained_names()
    frozen = set(everything) - set(trained_names(freeze_params=("embedding.*", "layers.[01].*")))
    assert frozen == {
        n for n in everything if n.startswith(("embedding.", "layers.0.", "layers.1."))
    }
    assert trained_names(freeze_params=("[!f]*",)) == ["final_norm.weight"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("layers.0", "embedding.*"), "--freeze-params layers.0: matches the name of no parameter"),
        (("output.weight",), "for example embedding.weight, layers"),  # tied tables have one name
        (("*.norm.weight", "*"), r"--freeze-params \*.norm.weight \*: matches every parameter"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(patterns, message):
    with pytest.raises(ConfigError, match=message):
        trained_names(freeze_params=patterns)


def test_a_shared_parameter_is_frozen_under_each_of_its_names():
    """Depths of multi-token prediction share their modules, under a name for each depth."""
    options = {"mtp_use_repeated_layer": True}
    names = dict(cases.tiny_model("-/-/-", **options).named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(names.items())}
    second = next(name for name, parameter in names.items() if first[id(parameter)] != name)
    model = cases.tiny_model("-/-/-", freeze_params=(second,), **options)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [first[id(names[second])]]


def test_a_frozen_matrix_has_no_weight_gradient_product():
    config = cases.tiny_config("*-")
    lengths = [3, 8, 20]
    plain = FlopCounter(config, cases.VOCAB)
    frozen = FlopCounter(
        dataclasses.replace(config, freeze_params=("layers.1.*", "output.*")), cases.VOCAB
    )
    mlp = 2 * sum(
        weight.numel()
        for weight in cases.tiny_model("*-").layers[1].parameters()
        if weight.dim() == 2
    )
    full, less = plain.training(lengths), frozen.training(lengths)
    assert frozen.forward(lengths) == plain.forward(lengths)
    assert full.projections - less.projections == mlp * sum(lengths)
    assert (less.attention, less.scan) == (full.attention, full.scan)
    assert less.output == pytest.approx(full.output * 2 / 3)
    count = count_parameters(
        dataclasses.replace(config, freeze_params=("final_norm.weight",)), cases.VOCAB
    )
    assert (count.frozen, count.total) == (
        config.hidden_size,
        count_parameters(config, cases.VOCAB).total,
    )


def test_the_plan_counts_frozen_weights_without_gradients_and_state():
    patterns = ("embedding.*", "*.mixer.*")
    work = Work(tokens=64, documents=2)
    sizes = {}
    for chosen in ((), patterns):
        config = dataclasses.replace(cases.tiny_config("M*-E"), freeze_params=chosen)
        model = HybridModel(
            config, vocab_size=cases.VOCAB, max_positions=64, device="meta", dtype=torch.bfloat16
        )
        layout = flat_layout_of(model, Ownership())
        sizes[chosen] = estimate(model, layout, work).static
        real = HybridModel(
            config, vocab_size=cases.VOCAB, max_positions=64, device="cpu", dtype=torch.bfloat16
        )
        buffers = FlatBuffers(real)
        held = sum(flat.untyped_storage().nbytes() for flat in buffers.params.values())
        held += sum(p.nbytes for p in real.parameters() if not p.requires_grad)
        assert sizes[chosen].parameters == held
        assert sizes[chosen].gradients == buffers.storage.untyped_storage().nbytes()
    few, many = sizes[patterns], sizes[()]
    assert few.gradients < many.gradients and few.optimizer < many.optimizer


def test_a_measured_layer_is_not_used_for_a_frozen_one():
    measured = {}
    for patterns in ((), ("layers.*.mixer.fc?.weight",)):
        config = dataclasses.replace(cases.tiny_config("--"), freeze_params=patterns)
        model = HybridModel(config, vocab_size=cases.VOCAB, max_positions=64, device="meta")
        MetaStep(model, Work(tokens=64, documents=2), measured).units()
    assert len(measured) == 2


def test_the_isolation_test_trains_every_parameter_of_its_layers():
    config = dataclasses.replace(cases.tiny_config("*-"), freeze_params=("layers.1.*",))
    assert small_config("*", config).freeze_params == ()
