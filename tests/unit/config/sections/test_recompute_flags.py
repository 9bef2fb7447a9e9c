"""Flags of recomputation: Megatron's spellings and their effect on a layer."""

import json

import pytest

from megatron_packed.config.parser.parse import parse_with_sources
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.serialise import from_dict, to_dict
from support.command_lines import argv_of


def parsed(right, text: str):
    return parse_with_sources(argv_of(right, text))


def memory(right, text: str) -> MemoryConfig:
    return parsed(right, text).config.memory


def test_nothing_by_default(right) -> None:
    found = memory(right, "")
    assert found == MemoryConfig() and found.modules == () and found.layers_per_unit == 1
    assert not any(found.recomputes_layer(number) for number in range(3))


@pytest.mark.parametrize(
    ("text", "per_group", "layers"),
    [
        ("uniform --recompute-num-layers 1", 1, [True, True, True]),
        ("uniform --recompute-num-layers 2", 2, [True, True, True]),
        ("block --recompute-num-layers 2", 1, [True, True, False]),
        ("block --recompute-num-layers 3", 1, [True, True, True]),
    ],
)
def test_layers(right, text: str, per_group: int, layers: list[bool]) -> None:
    found = memory(right, f"--recompute-granularity full --recompute-method {text}")
    assert found.layers_per_unit == per_group and found.modules == ()
    assert [found.recomputes_layer(number) for number in range(3)] == layers


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("", ("core_attn",)),
        ("--recompute-modules mamba layernorm mamba", ("mamba", "layernorm")),
        ("--recompute-modules mlp", ("mlp",)),
    ],
)
def test_modules(right, text: str, modules: tuple[str, ...]) -> None:
    found = memory(right, f"--recompute-granularity selective {text}")
    assert found.modules == modules and not found.recomputes_layer(0)


def test_megatrons_older_switch_and_the_way_back_from_what_is_stored(right) -> None:
    found = parsed(right, "--recompute-activations")
    assert found.config.memory.recompute_granularity == "selective"
    assert found.warnings == (
        "--recompute-activations is deprecated; write --recompute-granularity selective.",
    )
    assert from_dict(json.loads(json.dumps(to_dict(found.config)))) == found.config
    stored = to_dict(found.config)
    del stored["memory"]  # older checkpoints lack this section
    assert from_dict(stored).memory == MemoryConfig()


def test_with_graphs_groups_of_one_layer_and_parts_of_layers(right) -> None:
    local, layers = "--cuda-graph-impl local", "--recompute-granularity full --recompute-num-layers"
    assert memory(right, f"{local} {layers} 1 --recompute-method uniform").layers_per_unit == 1
    assert memory(right, f"{local} {layers} 2 --recompute-method block").recomputes_layer(1)
    assert memory(
        right, f"{local} --recompute-activations --recompute-modules mamba mlp"
    ).modules == ("mamba", "mlp")
    whole = "--cuda-graph-impl full_iteration"
    assert memory(right, f"{whole} {layers} 2 --recompute-method uniform").layers_per_unit == 2
