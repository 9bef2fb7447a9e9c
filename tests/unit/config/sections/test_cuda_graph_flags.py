"""Flags of CUDA graphs: Megatron's spellings, capacities, modules, and the message on a machine
without a GPU.
"""

import json
from importlib.machinery import ModuleSpec

import pytest
import yaml

from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.parser.help_text import help_text
from megatron_packed.config.parser.parse import parse, parse_with_sources
from megatron_packed.config.parser.print_config import config_yaml
from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS, CudaGraphConfig
from megatron_packed.config.serialise import from_dict, to_dict
from support.command_lines import argv_of

LOCAL = "--cuda-graph-impl local"
GLOBAL_LOADS = "--moe-router-load-balancing-type global_aux_loss"


def graphs(right, text: str) -> CudaGraphConfig:
    return parse(argv_of(right, text)).cuda_graph


def test_no_graphs_by_default(right) -> None:
    assert not graphs(right, "").enabled
    assert graphs(right, "--cuda-graph-impl none") == graphs(right, "") == CudaGraphConfig()


@pytest.mark.parametrize(
    ("text", "capacities"),
    [
        ("", None),
        ("--cuda-graph-max-packed-seqs auto", None),
        ("--cuda-graph-max-packed-seqs=auto", None),
        ("--cuda-graph-max-packed-seqs", (50,)),
        ("--cuda-graph-max-packed-seqs --bf16", (50,)),
        ("--cuda-graph-max-packed-seqs 64", (64,)),
        ("--cuda-graph-max-packed-seqs 64 16 64", (16, 64)),
        ("--thd-max-packed-sequences 33", (33,)),
    ],
)
def test_capacities(right, text: str, capacities: tuple[int, ...] | None) -> None:
    assert graphs(right, f"{LOCAL} {text}").capacities == capacities


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("", ()),
        ("--cuda-graph-modules full", ()),
        ("--cuda-graph-modules mlp attn mlp", ("attn", "mlp")),
        ("--cuda-graph-scope mamba", ("mamba",)),
    ],
)
def test_modules(right, text: str, modules: tuple[str, ...]) -> None:
    assert graphs(right, f"{LOCAL} {text}").modules == modules


def test_the_part_in_front_of_experts_has_two_names(right) -> None:
    right["--hybrid-layer-pattern"] = "ME"
    experts = f"{LOCAL} --num-experts 4 --disable-bias-linear --cuda-graph-modules"
    assert graphs(right, f"{experts} moe_router moe_preprocess").modules == ("moe_router",)
    assert graphs(right, f"{experts} moe mamba").modules == ("mamba", "moe")
    assert set(MODULE_LAYERS.values()) == set(KINDS)


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("--cuda-graph-impl full_iteration", False),
        ("--cuda-graph-impl full_iteration --overlap-grad-reduce", True),
        (f"{LOCAL} --overlap-grad-reduce", False),
        (f"--cuda-graph-impl full_iteration {GLOBAL_LOADS} --moe-aux-loss-coeff 0.1", True),
        (f"--cuda-graph-impl full_iteration {GLOBAL_LOADS} --moe-aux-loss-coeff 0", False),
        (f"{LOCAL} {GLOBAL_LOADS} --moe-aux-loss-coeff 0.1", False),
        ("--overlap-grad-reduce --expert-model-parallel-size 2", False),
        (f"{LOCAL} --expert-model-parallel-size 2", True),
        (f"{LOCAL} --expert-model-parallel-size 2 --cuda-graph-modules mamba moe_router", False),
        (f"{LOCAL} --expert-model-parallel-size 2 --cuda-graph-modules mamba moe", True),
        ("--cuda-graph-impl full_iteration --expert-model-parallel-size 2", True),
        (f"{LOCAL} --tensor-model-parallel-size 2", False),
    ],
)
def test_whether_graphs_hold_collectives_between_ranks_with_different_packs(
    right, text: str, shares: bool
) -> None:
    """Check whether ranks with different packs must use the same capture sizes. They must if graphs
    contain collectives between these ranks. Ranks that share a pack always have the same size.
    """
    experts = (
        "--hybrid-layer-pattern ME --num-experts 4 --disable-bias-linear "
        "--moe-token-dispatcher-type allgather --global-batch-size 4"
    )
    assert parse(argv_of(right, f"{experts} {text}"), world_size=2).shares_captures == shares


def test_megatrons_older_switches(right, tmp_path, monkeypatch) -> None:
    argv = argv_of(right)
    parsed = parse_with_sources([*argv, "--enable-cuda-graph"])
    assert parsed.config.cuda_graph.cuda_graph_impl == "local"
    assert parsed.warnings == ("--enable-cuda-graph is deprecated; write --cuda-graph-impl local.",)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: ModuleSpec("any", None, origin="somewhere")
    )
    external = parse_with_sources([*argv, "--external-cuda-graph"])
    assert external.config.cuda_graph.cuda_graph_impl == "transformer_engine"
    for value, impl in (("true", "local"), ("false", "none")):
        (tmp_path / "run.yaml").write_text(f"enable-cuda-graph: {value}\n")
        assert parse([*argv, "--config", "run.yaml"]).cuda_graph.cuda_graph_impl == impl


def test_words_in_a_file_and_back_from_what_is_printed_and_stored(right, tmp_path) -> None:
    argv = argv_of(right)
    for written, capacities in (("auto", None), ("[32, 8]", (8, 32)), ("7", (7,))):
        (tmp_path / "run.yaml").write_text(
            f"cuda_graph:\n  cuda_graph_impl: local\n  cuda_graph_max_packed_seqs: {written}\n"
            "  cuda_graph_modules: full\n"
        )
        parsed = parse_with_sources([*argv, "--config", "run.yaml"])
        assert parsed.config.cuda_graph.capacities == capacities
        text = config_yaml(parsed)
        assert yaml.safe_load(text) == to_dict(parsed.config)
        assert from_dict(json.loads(json.dumps(to_dict(parsed.config)))) == parsed.config
        assert ("run.yaml:3 (auto)" in text) == (capacities is None)


def test_help_shows_words_and_what_a_bare_flag_means() -> None:
    text = " ".join(help_text(100, everything=True).split())
    assert "--cuda-graph-max-packed-seqs N [N ...] | auto" in text
    assert (
        "The flag without a value means 50. [auto; documents; also --thd-max-packed-sequences]"
        in text
    )


def test_without_a_gpu_it_says_why_it_runs_eagerly(right) -> None:
    local = graphs(right, f"{LOCAL} --device cpu")
    assert "CUDA graphs need a GPU, and this run is on cpu" in local.eager_reason("cpu")
    assert local.eager_reason("cuda") == graphs(right, "").eager_reason("cpu") == ""
