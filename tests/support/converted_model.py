"""Small Hugging Face models of each family on disk, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.cli.main import main
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.huggingface_config import model_of
from megatron_packed.models.convert.huggingface_files import ModelFiles, write_files
from megatron_packed.models.convert.import_huggingface import open_model
from megatron_packed.models.convert.model_weights import weights_of
from support.json_lines import read_json

FIELDS: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*M-",
    "vocab_size": 61,
    "hidden_size": 32,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 24,
    "time_step_limit": [0.0, float("inf")],
    "auto_map": {"A": "code.A"},
}
"""config.json as in files of the hub: with a pattern, and with ``Infinity``."""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
}
QWEN3_5_MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
FAMILIES = {
    "nemotron_h": FIELDS,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "llama": LLAMA,
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
}


def write_model(
    directory: Path,
    family: str = "nemotron_h",
    *,
    bf16: bool = False,
    max_file_bytes: int = 20_000,
    depths: int = 0,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write random weights in files of some kB and config.json; return the weights by name.

    Args:
        bf16: store weights in bf16, except A_log, D and the router's bias in float32, as large
            models do.
        depths: depths of multi-token prediction.
        changes: changed fields of config.json.
    """
    fields = {**FAMILIES[family], **changes}
    names, config = model_of(fields, directory, depths=depths)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for weight in weights_of(names, config, torch.float32).values():
        for part in weight.parts:
            kept = part.name.endswith(("A_log", "D", "correction_bias"))
            dtype = torch.bfloat16 if bf16 and not kept else torch.float32
            value = torch.randn(part.shape, generator=generator) * 0.2 + ("norm" in part.name)
            tensors[part.name] = value.to(dtype)
    directory.mkdir(exist_ok=True)
    write_tensors(directory, tensors, max_file_bytes)
    (directory / "config.json").write_text(json.dumps(fields))
    return tensors


def write_tensors(
    directory: Path, tensors: dict[str, torch.Tensor], max_file_bytes: int = 10**9
) -> None:
    """Write tensors in place of those of a Hugging Face model."""
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    listed = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_files(directory, listed, tensors.__getitem__, max_file_bytes)


def change_fields(directory: Path, **fields: Any) -> None:
    """Change fields of a model's config.json."""
    config = directory / "config.json"
    config.write_text(json.dumps({**read_json(config), **fields}))


def contents(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a Hugging Face model."""
    files = ModelFiles(directory)
    return {name: files.read(name) for name in files.places}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that the names, dtypes and bits of tensors are equal."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def opened(directory: Path, **options: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Return the model and the weights that a Hugging Face model gives."""
    model, files, weights = open_model(directory, bf16=False, **options)
    return model, {name: weight.join(files.read) for name, weight in weights.items()}


def converted(folder: Path, *words: object, family: str = "nemotron_h") -> tuple[Path, Path]:
    """Write a model and import it; return both folders."""
    hf, ours = folder / "hf", folder / "ours"
    write_model(hf, family)
    assert from_hf(hf, ours, *words) == 0
    return hf, ours


def convert(*words: object) -> int:
    """Return the exit code of ``megatron-packed convert``."""
    return main(["convert", *map(str, words)])


def from_hf(source: Path, target: Path, *words: object) -> int:
    """Return the exit code of ``convert --from-hf``."""
    return convert("--from-hf", source, "--save", target, *words)


def to_hf(target: Path, checkpoint: Path, *words: object) -> int:
    """Return the exit code of ``convert --to-hf``."""
    return convert("--to-hf", target, "--load", checkpoint, *words)


def imported(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint of ours, parameters by their names in the model."""
    manifest = read_manifest(path)
    return {
        name.removeprefix("model/"): read_tensor(path, name, manifest) for name in manifest.tensors
    }
