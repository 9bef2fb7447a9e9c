"""A kind of layer is one new file: its options are parsed, checked, shown, stored and converted."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import megatron_packed
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.kinds.layer_kind import (
    EVERYTHING,
    KINDS,
    RESERVED,
    LayerKind,
    LayerPart,
    check_names,
    record_of,
)
from megatron_packed.config.layer_pattern import DEPTH, REFUSED_SYMBOLS
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import every_field
from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS
from megatron_packed.config.sections.memory import PARTS

PACKAGE = Path(megatron_packed.__file__).parent
KIND = """
from megatron_packed.config.conditions import layers
from megatron_packed.config.kinds.convolution import ConvolutionKernels
from megatron_packed.config.kinds.layer_kind import LayerKind, LayerPart, Shared
from megatron_packed.config.options import option
from megatron_packed.config.sections.model_parts.stack import StackOptions

NAME = "short convolution"


class ShortConvolutionOptions(StackOptions, group=NAME, only_if=layers("S")):
    short_conv_width: int = option(4, "Width of the convolution of an S layer.", minimum=2, maximum=4)
    short_conv_groups: int = option(
        8, "Number of groups of channels of an S layer.", minimum=1, divides="hidden_size"
    )


KIND = LayerKind(
    symbol="S",
    name=NAME,
    options={"model": ShortConvolutionOptions, "training": ConvolutionKernels},
    backends={"causal_conv1d": "conv_backend"},
    carries_order=True,
    shared=(Shared("short_conv_groups"),),
    exchanges=lambda parallel: "heads",
    heads=("short_conv_groups",),
    graph_modules=("short",),
    mixer_module="short",
    inside_norm=("short_norm", "short_in_proj"),
    parts=(LayerPart("short_norm", "norm"), LayerPart("short_in_proj", "mixer.in_proj")),
)
"""
PROGRAM = """
import json, sys
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.parser.help_text import help_text
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.serialise import from_dict, to_dict

base = "--hidden-size 64 --seq-length 16 --lr 1 --train-iters 1 --mock-data --hybrid-layer-pattern".split()


def result(text, world_size=1):
    try:
        config = parse([*base, *text.split()], world_size=world_size)
    except ConfigError as error:
        return [[one.option, one.value, one.rule, one.cure] for one in error.problems]
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    idle = without_effect(config, world_size)
    return [config.model.short_conv_groups, config.training.backends["causal_conv1d"], idle]


answers = {text: result(text, *size) for text, *size in json.loads(sys.argv[1])}
print(json.dumps({"answers": answers, "help": help_text(120, everything=True)}))
"""
WRONG_GROUPS = ["--short-conv-groups", "7", "must divide --hidden-size (64)"]
CASES = {
    "S-": [8, "auto", {}],
    "S- --short-conv-groups 4 --conv-backend reference": [4, "reference", {}],
    "- --short-conv-width 3": [8, "auto", {"model.short_conv_width": "the pattern has no S layer"}],
    "S- --short-conv-groups 7": [[*WRONG_GROUPS, "choose from 1, 2, 4, 8, 16, 32, 64"]],
    "S- --short-conv-width 5": [
        ["--short-conv-width", "5", "must be >= 2 and <= 4", "give a whole number >= 2 and <= 4"]
    ],
    "S- --short-conv-groups 1 --tensor-model-parallel-size 2": [
        [
            "--tensor-model-parallel-size",
            "2",
            "does not divide --short-conv-groups (1)",
            "choose from 1",
        ]
    ],
    "S- --short-conv-groups 2 --context-parallel-size 4": [
        [
            "--context-parallel-size",
            "4",
            "does not divide --short-conv-groups (2)",
            "choose from 1, 2",
        ]
    ],
    "S- --cuda-graph-impl local --cuda-graph-modules short": [8, "auto", {}],
    "S- --recompute-granularity selective --recompute-modules short": [8, "auto", {}],
    "S- --fine-grained-activation-offloading --offload-modules short_in_proj": [8, "auto", {}],
    "- --fine-grained-activation-offloading --offload-modules short_in_proj": [
        [
            "--offload-modules",
            "short_in_proj",
            "saves no tensor: the pattern - has no S (short convolution) layer",
            "leave short_in_proj out",
        ]
    ],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    """Return the answers of a package whose only difference is the new file."""
    root = tmp_path_factory.mktemp("package")
    for folder in ("", "config", "config/kinds"):
        own = root / "megatron_packed" / folder
        own.mkdir()
        for path in (PACKAGE / folder).iterdir():
            if path.name not in ("config", "kinds", "__pycache__"):
                (own / path.name).symlink_to(path)
    (root / "megatron_packed/config/kinds/short_convolution.py").write_text(KIND)
    cases = [
        (text, 4) if "context" in text else (text, 2) if "tensor" in text else (text,)
        for text in CASES
    ]
    command = [sys.executable, "-B", "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(
        command, cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("text", CASES)
def test_a_new_kind_is_one_file(answers, text) -> None:
    assert answers["answers"][text] == CASES[text]


def test_the_help_shows_the_new_kind(answers) -> None:
    found = " ".join(answers["help"].split())
    assert "G gated delta net, S short convolution, * attention" in found
    assert "Model: short convolution --short-conv-width N Width of the convolution" in found
    assert "short are everything after the norm" in found and "short_in_proj" in found


def test_names_of_modules_belong_to_one_kind() -> None:
    """Two kinds may have the same part, as the norm before MLPs and experts, but no other name."""
    for names in ("graph_modules", "recompute_modules"):
        found = [name for kind in KINDS.values() for name in getattr(kind, names)]
        assert len(set(found)) == len(found)
    assert set(MODULE_LAYERS.values()) == set(KINDS)
    of_kinds = [part for kind in KINDS.values() for part in kind.parts]
    assert set(of_kinds) == set(PARTS.values())


def test_records_name_options() -> None:
    fields = {about.name: about for about in every_field()}
    for kind in KINDS.values():
        for section, options in kind.options.items():
            assert {fields[about.name].section for about in dataclasses.fields(options)} == {
                section
            }
        named = {*kind.required, *kind.refused_elsewhere, *kind.backends.values(), *kind.heads}
        assert named | {shared.option for shared in kind.shared} <= fields.keys()


NORM = LayerPart("norm_of_it", "norm")


@pytest.mark.parametrize(
    "record, said",
    [
        ({"symbol": "|"}, "'|'; choose one character"),
        ({"symbol": "s"}, "'s'; choose one character"),
        ({"symbol": "SS"}, "'SS'; choose one character"),
        ({"symbol": ""}, "''; choose one character"),
        ({"recomputed": {"other": ("other",)}, "parts": (NORM,)}, "recomputed['other']"),
        ({"parts": (NORM, LayerPart("norm_of_it", "mixer.fc1"))}, "give each part another name"),
        ({"parts": (NORM,), "inside_norm": ("norm",)}, "no part ['norm'], which `inside_norm`"),
    ],
)
def test_a_wrong_record_is_refused(record: dict, said: str) -> None:
    with pytest.raises(ValueError) as error:
        LayerKind(**{"symbol": "S", "name": "short convolution", **record})
    assert said in str(error.value)


@pytest.mark.parametrize(
    "part, said",
    [
        ({"path": "fc1"}, "path 'fc1'; write 'norm', or 'mixer.'"),
        ({"path": "mixer.fc1", "saves": "output"}, "saves 'output'; choose 'input'"),
    ],
)
def test_a_wrong_part_is_refused(part: dict, said: str) -> None:
    with pytest.raises(ValueError) as error:
        LayerPart("short_fc1", **part)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "changes, option",
    [
        ({"graph_modules": ("mlp",)}, "'mlp' for --cuda-graph-modules"),
        ({"mixer_module": "mamba"}, "'mamba' for --recompute-modules"),
        (
            {"parts": (LayerPart("mlp_fc1", "mixer.fc1", EVERYTHING),)},
            "'mlp_fc1' for --offload-mod",
        ),
    ],
)
def test_two_kinds_with_one_name_for_different_modules_are_refused(changes, option) -> None:
    check_names(KINDS.values())
    with pytest.raises(ValueError) as error:
        check_names([*KINDS.values(), LayerKind(symbol="S", name="short convolution", **changes)])
    assert option in str(error.value)


def test_a_record_with_another_name_is_refused() -> None:
    module = ModuleType("short_convolution")
    assert record_of(module, "KIND", LayerKind) is None
    module.SHORT = KINDS["-"]
    with pytest.raises(ImportError, match="no LayerKind with the name KIND, but SHORT; call the"):
        record_of(module, "KIND", LayerKind)
    module.KIND = KINDS["-"]
    assert record_of(module, "KIND", LayerKind) is KINDS["-"]


def test_reserved_symbols_are_those_of_the_pattern() -> None:
    assert {*RESERVED} == {DEPTH, *REFUSED_SYMBOLS}


def test_layers_that_exchange_no_tokens_refuse_context_parallelism(monkeypatch) -> None:
    alone = dataclasses.replace(KINDS["G"], exchanges=lambda parallel: "")
    monkeypatch.setitem(KINDS._records, "G", alone)
    flags = "--hidden-size 64 --seq-length 16 --lr 1 --train-iters 1 --mock-data --context-parallel-size 2"
    with pytest.raises(ConfigError, match="exchange no tokens between ranks") as error:
        parse([*flags.split(), "--hybrid-layer-pattern", "G-"], world_size=2)
    assert [problem.option for problem in error.value.problems] == ["--context-parallel-size"]
