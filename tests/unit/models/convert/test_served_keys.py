"""A new config.json has the keys that transformers, vLLM and SGLang read, with the right values."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron_packed.config.run import RunConfig
from megatron_packed.models.convert.families.registry import FAMILIES, WRITTEN
from megatron_packed.models.convert.trained_config import (
    TrainedOptions,
    config_fields,
    family_for,
)
from support.family_models import COMMON, MODELS
from support.served_keys import EVERY_FAMILY, NOT_REGISTERED, REGISTERED, SERVED, SGLANG, VLLM

WORDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Types of layers in the words of published files, and in those of transformers 5.16."""
CASES = [
    (name, served) for name in MODELS for served in SERVED if served.family == name.split(",")[0]
]


@pytest.fixture(scope="module")
def new_config(tmp_path_factory):
    """Return a function from a name of `MODELS` to its layers and its config.json."""
    data = tmp_path_factory.mktemp("data") / "lines.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    more = [*COMMON.split(), "--data-path", str(data), "--train-iters", "1"]
    made = {}

    def config_of(name):
        if name not in made:
            argv = ["--hybrid-layer-pattern", *MODELS[name].split(), *more]
            model = replace(RunConfig.from_args(argv).model, vocab_size=260)
            family, model = family_for(model, name.split(",")[0])
            options = TrainedOptions(model=model, bf16=False, max_positions=128)
            text = json.dumps(config_fields(family, model, options))
            made[name] = (model.main_layers, json.loads(text))
        return made[name]

    return config_of


def same(value, other):
    """Return whether two values are equal, in either set of words for types of layers."""
    value, other = (list(one) if isinstance(one, tuple) else one for one in (value, other))
    if isinstance(value, list) and isinstance(other, list):
        return [WORDS.get(one, one) for one in value] == [WORDS.get(one, one) for one in other]
    return value == other


def expected(key, layers, theirs):
    """Return the right value of a key, from the layers and from transformers' configuration."""
    if key == "full_attention_interval":
        kinds = [symbol == "*" for symbol in layers[::2]]
        fits = [n for n in range(1, len(kinds) + 2) if regular(kinds, n)]
        return fits[0] if fits else None
    if key == "hybrid_override_pattern":
        return layers
    if key in ("rope_theta", "partial_rotary_factor"):
        return theirs.rope_parameters[key]
    if key == "decoder_sparse_step":
        return 1
    if key in ("attn_output_gate", "mlp_only_layers"):
        return {"attn_output_gate": True, "mlp_only_layers": []}[key]
    return getattr(theirs, key)


def regular(kinds, interval):
    return kinds == [(n + 1) % interval == 0 for n in range(len(kinds))]


def test_every_family_has_keys_of_both_libraries_or_is_known_to_have_none():
    tables = {(served.family, served.library) for served in SERVED}
    assert {family for family, _ in tables} == set(WRITTEN)
    assert {family for family in WRITTEN if (family, VLLM) not in tables} == set()
    none = {family for family in WRITTEN if (family, SGLANG) not in tables}
    assert none == {"bamba", "mamba2", "olmo_hybrid"}


@pytest.mark.parametrize(
    ("name", "served"), CASES, ids=[f"{name}, {served.library}" for name, served in CASES]
)
def test_keys_that_a_library_reads_are_there_with_the_right_values(name, served, new_config):
    """A library's own class takes config.json and its defaults; others take transformers' class."""
    transformers = pytest.importorskip("transformers")
    layers, fields = new_config(name)
    theirs = transformers.AutoConfig.for_model(**fields)
    keys = [*EVERY_FAMILY.split(), *served.keys.split()]
    for symbol, more in served.of_symbols.items():
        keys += more.split() if symbol in layers else []
    seen = {**(served.own or {}), **fields}
    for key in dict.fromkeys(keys):
        right = expected(key, layers, theirs)
        if right is None and key == "full_attention_interval":
            # Without the key SGLang stops. With any number it would compute something else.
            assert key not in seen
            continue
        if served.own is None and key not in seen:
            assert hasattr(theirs, key), key
            continue
        assert key in seen, f"{served.library} reads {key}, and config.json lacks it"
        value = seen[key]
        if isinstance(value, Mapping):
            right = {part: right[part] for part in value}
        assert same(value, right), (key, value, right)


def test_each_library_has_a_class_of_the_name_in_architectures():
    """Text models of Qwen3.5 without vision are the exception in SGLang."""
    for served in SERVED:
        found = FAMILIES[served.family].architecture in REGISTERED[served.library].split()
        assert found is ((served.family, served.library) not in NOT_REGISTERED), served


@pytest.mark.parametrize("name", WRITTEN)
def test_the_class_of_a_family_is_that_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert mapping[name] == FAMILIES[name].architecture


def test_an_irregular_pattern_of_qwen_has_no_interval(new_config):
    assert "full_attention_interval" not in new_config("qwen3_5_moe_text, given")[1]
    assert new_config("qwen3_next")[1]["full_attention_interval"] == 2
