"""Conversion of configurations to checkpoints and YAML and back, and the stable hash of a model."""

import dataclasses
import json

import pytest
import yaml

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.parse import parse, parse_with_sources
from megatron_packed.config.parser.print_config import config_yaml
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import (
    changed_options,
    from_dict,
    model_differences,
    model_hash,
    restoring_words,
    section_to_dict,
    to_dict,
)
from support.command_lines import argv_of

MODEL = {
    "hybrid_layer_pattern": "M*-E",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_experts": 4,
    "add_bias_linear": False,
}
EXTRA = (
    "--hybrid-layer-pattern *-ME --num-experts 8 --lr-warmup-fraction 0.1 --adam-eps 1e-15 --bf16 "
    "--disable-bias-linear --train-iters 30"
)


def argv(right) -> list[str]:
    return [*argv_of(right, EXTRA), "--log-jsonl", "a: b #c.jsonl"]


def test_round_trip_through_json(right) -> None:
    config = parse(argv(right), world_size=2)
    stored = json.loads(json.dumps(to_dict(config)))
    assert from_dict(stored) == config
    del stored["optim"]["adam_beta2"]
    del stored["logging"]
    restored = from_dict(stored)
    assert restored.optim == config.optim
    assert restored.logging.log_jsonl is None


def test_round_trip_through_the_printed_yaml(right, tmp_path) -> None:
    parsed = parse_with_sources(argv(right), world_size=2)
    text = config_yaml(parsed)
    assert yaml.safe_load(text) == to_dict(parsed.config)
    (tmp_path / "run.yaml").write_text(text)
    assert parse(["--config", "run.yaml"], world_size=2) == parsed.config
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["adam_eps"].endswith("# flag --adam-eps")
    assert lines["adam_beta1"].endswith("# default")
    assert lines["ffn_hidden_size"].endswith(
        "# derived: 4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to a multiple of 64"
    )


def test_a_stored_configuration_with_wrong_keys_is_refused(right) -> None:
    stored = to_dict(parse(argv(right)))
    stored["modle"] = {}
    stored["optim"]["adam_beta"] = 1
    stored["training"]["seed"] = "one"
    del stored["packing"]["seq_length"]
    with pytest.raises(ConfigError) as caught:
        from_dict(stored)
    found = {problem.option: problem.cure for problem in caught.value.problems}
    assert set(found) == {"modle", "optim.adam_beta", "--seed", "--seq-length"}
    assert "model" in found["modle"]
    assert "adam_beta1 or adam_beta2" in found["optim.adam_beta"]


def test_the_identity_of_a_model_is_stable() -> None:
    assert model_hash(ModelConfig(**MODEL)) == "de9f6c492b41ff18"
    assert model_hash(ModelConfig(**MODEL, swiglu=True)) == "811b9e3c0689de08"


def test_identity_counts_what_changes_the_function_and_nothing_else() -> None:
    model = ModelConfig(**MODEL)
    same = [
        {"ffn_hidden_size": 1024},
        {"init_method_std": 0.1},
        {"moe_aux_loss_coeff": 0.5},
        {"mamba_chunk_size": 64},
        {"hidden_dropout": 0.1},
    ]
    other = [
        {"ffn_hidden_size": 512},
        {"normalization": "RMSNorm"},
        {"moe_router_topk": 3},
        {"swiglu": True},
        {"rotary_base": 5e5},
        {"norm_epsilon": 1e-6},
        {"num_query_groups": 2},
        {"vocab_size": 300},
    ]
    for change in same:
        assert model_hash(dataclasses.replace(model, **change)) == model_hash(model), change
    hashes = {model_hash(dataclasses.replace(model, **change)) for change in other}
    assert len({model_hash(model), *hashes}) == len(other) + 1


def test_a_checkpoint_that_does_not_fit_is_reported_by_option() -> None:
    model = ModelConfig(**MODEL)
    stored = json.loads(json.dumps(section_to_dict(model)))
    assert model_differences(stored, model) == []
    wider = dataclasses.replace(model, ffn_hidden_size=512, init_method_std=0.5)
    (problem,) = model_differences(stored, wider)
    assert (problem.option, problem.value) == ("--ffn-hidden-size", "512")
    assert "1024" in problem.rule
    assert not model.add_bias_linear
    (problem,) = model_differences({**stored, "add_bias_linear": True}, model)
    assert (problem.option, problem.value) == (
        "--disable-bias-linear",
        "on",
    )  # the value of the flag, not of the field
    assert problem.rule == "the checkpoint was made with off"
    older = {
        name: value for name, value in stored.items() if name not in ("kv_channels", "rotary_base")
    }
    assert model_differences(older, model) == []


def test_options_changed_since_a_checkpoint_are_reported(right) -> None:
    config = parse(argv(right))
    stored = json.loads(json.dumps(to_dict(config)))
    current = to_dict(config)
    assert changed_options(stored, current, ("optim", "training")) == []
    stored["optim"]["lr"], stored["training"]["bf16"] = 0.5, False
    stored["optim"]["lr_decay_iters"] = 8
    del stored["optim"]["adam_beta2"]
    assert changed_options(stored, current, ("optim", "training")) == [
        "--lr 0.001, was 0.5",
        "--lr-decay-iters not given, was 8",
        "--bf16 on, was off",
    ]
    assert changed_options(stored, current, ("training.bf16", "optim.adam_eps")) == [
        "--bf16 on, was off"
    ]
    assert (
        restoring_words(stored, current, ("optim", "training"))
        == "give --lr 0.5 --lr-decay-iters 8 and leave out --bf16"
    )
    assert restoring_words(current, current, ("optim", "training")) == ""
