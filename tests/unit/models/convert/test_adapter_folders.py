"""Folders of adapters: what is written, what is read back, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.adapters.factors import Factors, merged
from megatron_packed.models.convert.adapters.peft_config import read_peft_config
from megatron_packed.models.convert.adapters.peft_folder import (
    ADAPTER_WEIGHTS,
    VLLM,
    Adapters,
    collected,
    read_adapters,
    refused_by_peft,
    write_adapters,
)
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.huggingface_config import model_of
from megatron_packed.models.convert.huggingface_files import ModelFiles, write_safetensors
from megatron_packed.models.convert.model_weights import model_on_meta
from support.converted_model import FAMILIES, LLAMA, QWEN3_5_MOE, convert, converted
from support.json_lines import read_json

MODELS = {
    **FAMILIES,
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", "text_config": QWEN3_5_MOE, "vision_config": {}},
    "granitemoehybrid": {
        **LLAMA,
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "rope_theta": 10000.0,
    },
}
STEM = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


def base(name: str) -> tuple[Family, ModelConfig]:
    return model_of(MODELS[name], Path("config.json"))


def random_adapters(name: str, **options: Any) -> tuple[Adapters, Tensors]:
    """Return random adapters of a tiny model, and the same by their names in the model."""
    family, config = base(name)
    lora = replace(config, lora_rank=2, lora_alpha=4.0, **options)
    generator = torch.Generator().manual_seed(1)
    stored = {
        key: torch.randn(parameter.shape, generator=generator)
        for key, parameter in model_on_meta(lora, torch.float32).named_parameters()
        if parameter.requires_grad
    }
    return collected(lora, family, stored), stored


@pytest.mark.parametrize("options", [{}, {"lora_modules_to_save": ("embedding.*", "final_norm.*")}])
@pytest.mark.parametrize("name", ["nemotron_h", "llama", "mixtral", "granitemoehybrid"])
def test_a_folder_returns_to_the_bit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    adapters, stored = random_adapters(name, **options)
    write_adapters(tmp_path / "folder", adapters, base_model="the/base")
    family, config = base(name)
    model, tensors = read_adapters(tmp_path / "folder", config, family)
    assert (model.lora_rank, model.lora_alpha) == (2, 4.0)
    assert model.lora_target_modules == ("all-linear",)
    assert tensors.keys() == stored.keys()
    for key, value in tensors.items():
        rows = config.vocab_size if key == "embedding.weight" else None  # the others pad the table
        assert torch.equal(value[:rows], stored[key][:rows]), key
    assert read_peft_config(tmp_path / "folder").base_model == "the/base"


def test_some_targets_return(tmp_path: Path) -> None:
    words = ("layers.0.mixer.qkv", "gate_proj")
    adapters, stored = random_adapters("llama", lora_target_modules=words, lora_rslora=True)
    write_adapters(tmp_path / "folder", adapters)
    fields = read_json(tmp_path / "folder" / "adapter_config.json")
    assert fields["target_modules"][0] == "model.layers.0.mlp.gate_proj"  # complete paths
    family, config = base("llama")
    model, tensors = read_adapters(tmp_path / "folder", config, family)
    assert model.lora_rslora and tensors.keys() == stored.keys()
    for path, factors in collected(model, family, tensors).split.items():
        assert all(map(torch.equal, factors, adapters.split[path]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nemotron_h", "model.backbone.layers.1.mixer.experts.3.up_proj.lora_A.weight"),
        ("mixtral", "model.model.layers.0.block_sparse_moe.experts.2.w3.lora_B.weight"),
        (
            "qwen3_5_moe",
            "model.model.language_model.layers.0.mlp.experts.base_layer.lora_A.weight",
        ),
    ],
)
def test_names_of_vllm(name: str, expected: str, tmp_path: Path) -> None:
    adapters, _ = random_adapters(name)
    write_adapters(tmp_path / "folder", adapters, program=VLLM)
    assert f"base_model.{expected}" in ModelFiles(tmp_path / "folder", ADAPTER_WEIGHTS).places


def test_experts_that_vllm_cannot_load_are_refused(tmp_path: Path) -> None:
    adapters, _ = random_adapters("granitemoehybrid")
    with pytest.raises(CheckpointError, match="vLLM has no adapters of the experts of granite"):
        write_adapters(tmp_path / "folder", adapters, program=VLLM)
    assert not (tmp_path / "folder").exists()


def test_what_peft_refuses_is_known() -> None:
    paths = refused_by_peft(random_adapters("nemotron_h")[0])
    assert paths == ["model.layers.0.mixer.out_proj", "model.layers.3.mixer.out_proj"]


def test_an_alpha_of_one_matrix_is_multiplied_into_B(tmp_path: Path) -> None:
    adapters, stored = random_adapters("llama")
    write_adapters(tmp_path / "folder", adapters)
    change(tmp_path / "folder", alpha_pattern={"down_proj": 12}, rank_pattern={"k_proj": 2})
    _, tensors = read_adapters(tmp_path / "folder", base("llama")[1], base("llama")[0])
    for key, value in tensors.items():
        factor = 3 if key.endswith("fc2.lora.B") else 1
        assert torch.equal(value, stored[key] * factor)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**read_json(path), **fields}))


def rewrite(folder: Path, edit: Callable[[Tensors], object]) -> None:
    files = ModelFiles(folder, ADAPTER_WEIGHTS)
    tensors = {name: files.read(name) for name in files.places}
    edit(tensors)
    (folder / ADAPTER_WEIGHTS).unlink()
    listed = [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    write_safetensors(folder / ADAPTER_WEIGHTS, listed, tensors.__getitem__)


OPTIONS = {
    "use_dora": (True, "use_dora is True, but adapters with a magnitude"),
    "bias": ("all", "bias is 'all', but it must be none"),
    "lora_bias": (True, "lora_bias is True, but adapters have no bias here"),
    "fan_in_fan_out": (True, "fan_in_fan_out is True"),
    "trainable_token_indices": ([1], "save the whole table"),
    "layer_replication": ([[0, 1]], "layers cannot be repeated"),
    "peft_type": ("IA3", "peft_type is 'IA3', but it must be LORA"),
    "task_type": ("SEQ_CLS", "task_type is 'SEQ_CLS'"),
    "init_lora_weights": ("pissa", "a start that leaves the base's weights"),
    "r": (True, "r is True, but it must be a whole number"),
    "lora_alpha": ("8", "lora_alpha is '8', but it must be a number above 0"),
    "lora_dropout": (1, "lora_dropout is 1, but"),
    "target_parameters": ("experts", "target_parameters is 'experts', but"),
    "rank_pattern": ({"q_proj": 4}, "q_proj has rank 4 and others have 2"),
    "alpha_pattern": ({"(a+)+": 4}, r"alpha_pattern has '\(a\+\)\+', but only names"),
    "new_option": (1, "new_option is 1, but this option is unknown"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_changes_the_function_is_refused(option: str, tmp_path: Path) -> None:
    adapters, _ = random_adapters("llama")
    write_adapters(tmp_path / "folder", adapters)
    value, problem = OPTIONS[option]
    change(tmp_path / "folder", **{option: value})
    with pytest.raises(CheckpointError, match=problem):
        read_adapters(tmp_path / "folder", base("llama")[1], base("llama")[0])


def test_a_missing_option_is_named_in_the_cure(tmp_path: Path) -> None:
    adapters, _ = random_adapters("llama")
    write_adapters(tmp_path / "folder", adapters)
    path = tmp_path / "folder" / "adapter_config.json"
    fields = read_json(path)
    del fields["lora_alpha"]
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="lora_alpha is missing; add lora_alpha with the"):
        read_adapters(tmp_path / "folder", base("llama")[1], base("llama")[0])


EDITS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "misspelled": (
        lambda t: t.update({f"{STEM[:-4]}porj.lora_A.weight": t.pop(f"{STEM}.lora_A.weight")}),
        f"did you mean {STEM}.lora_A.weight",
    ),
    "without B": (lambda t: t.pop(f"{STEM}.lora_B.weight"), "lora_B.weight is missing"),
    "another shape": (
        lambda t: t.update({f"{STEM}.lora_A.weight": torch.ones(2, 5)}),
        r"lora_A.weight is \[2, 5\], but rank 2 and the base need \[2, 32\]",
    ),
    "not finite": (
        lambda t: t.update({f"{STEM}.lora_A.weight": torch.full((2, 32), math.nan)}),
        "is not finite",
    ),
    "no module": (
        lambda t: t.update({"base_model.model.model.nomr.weight": torch.ones(32)}),
        "belongs to no module of the base",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    adapters, _ = random_adapters("llama")
    write_adapters(tmp_path / "folder", adapters)
    edit, problem = EDITS[case]
    rewrite(tmp_path / "folder", edit)
    with pytest.raises(CheckpointError, match=problem):
        read_adapters(tmp_path / "folder", base("llama")[1], base("llama")[0])


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    adapters, _ = random_adapters("llama")
    write_adapters(tmp_path / "folder", adapters)
    (tmp_path / "folder" / ADAPTER_WEIGHTS).rename(tmp_path / "folder" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle"):
        read_adapters(tmp_path / "folder", base("llama")[1], base("llama")[0])


USES = {
    "--to-peft out --load ours": "holds whole weights, which --to-hf exports",
    "--merge --load ours --save out": "holds whole weights, which --to-hf exports",
    "--to-peft out": "--load is required with --to-peft.",
    "--to-peft out --load ours --adapter-for vlm": "did you mean vllm?",
    "--to-peft out --load ours --merge": "--merge has no effect with --to-peft; leave it out.",
    "--to-hf out --load ours --adapter-for vllm": "--adapter-for has no effect with --to-hf",
    "--merge --load ours": "--save is required with --merge.",
    "--from-peft hf --load ours --save out": "adapter_config.json: does not exist; name",
    "--to-hf out --load ours --pretrained-checkpoint ours": "has no effect with --to-hf",
    "--save out": "one of the arguments",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    converted(folder, family="llama")
    return folder


@pytest.mark.parametrize("words", USES)
def test_invalid_uses_are_one_sentence(
    words: str,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folders)
    assert convert(*words.replace("out", str(tmp_path / "out")).split()) in (2, 4)
    assert USES[words] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_merge_rounds_once() -> None:
    """The sum is that of float32, rounded to the dtype of the weight; rows without adapter stay."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 8, generator=generator).bfloat16()
    factors = Factors(*(torch.randn(shape, generator=generator) for shape in ((4, 8), (6, 2))))
    rows = torch.tensor([0, 1, -1, 1, 0, -1])
    found = merged(weight, factors, 0.5, rows)
    wide = weight.float()
    for row, number in enumerate(rows.tolist()):
        if number >= 0:
            wide[row] += 0.5 * (factors.B[row] @ factors.A[2 * number : 2 * number + 2])
    assert found.dtype == torch.bfloat16 and torch.equal(found, wide.bfloat16())


def test_an_import_says_that_a_base_in_bf16_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, _ = converted(tmp_path, family="llama")
    low, folder = tmp_path / "low", tmp_path / "folder"
    assert convert("--from-hf", hf, "--save", low, "--bf16") == 0
    adapters, _ = random_adapters("llama")
    write_adapters(folder, adapters, base_model=str(hf))
    assert convert("--from-peft", folder, "--load", low, "--save", tmp_path / "lora") == 0
    assert "tensors were rounded to the data type of the base" in capsys.readouterr().out


def test_a_folder_goes_through_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export says what PEFT refuses, with the ways out, and has the same bytes."""
    hf, ours = converted(tmp_path, family="nemotron_h")
    folder, lora, again = (tmp_path / name for name in ("folder", "lora", "again"))
    adapters, _ = random_adapters("nemotron_h", lora_dropout=0.25)
    write_adapters(folder, adapters, base_model=str(hf))
    assert read_json(folder / "adapter_config.json")["lora_dropout"] == 0  # because of its experts
    assert convert("--from-peft", folder, "--load", ours, "--save", lora) == 0
    assert "rounded" not in capsys.readouterr().out
    assert convert("--to-peft", again, "--load", lora, "--hf-base", hf) == 0
    said = capsys.readouterr().out
    assert "PEFT loads no adapters of 2 matrices, such as model.layers.0.mixer.out_proj" in said
    assert "(--adapter-for vllm), or merge them with the base (--merge)" in said
    for name in ("adapter_config.json", ADAPTER_WEIGHTS):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    words = ["--load", lora, "--adapter-for", "vllm"]
    assert convert("--to-peft", tmp_path / "vllm", *words) == 0
    assert "PEFT" not in capsys.readouterr().out
