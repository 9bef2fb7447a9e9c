"""Small checkpoints in Megatron's format ``torch_dist``, written with the classes of torch."""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

PATTERN = "M*-E/*E"
ARGS: dict[str, Any] = {
    "hybrid_layer_pattern": PATTERN,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 8,
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_latent_size": 6,
    "moe_shared_expert_intermediate_size": 12,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_load_balancing_type": ["aux_loss"],
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "none",
}
"""Options of a hybrid model with one layer of each kind, under Megatron's names."""
SHAPES = {
    "embedding.word_embeddings.weight": (128, 16),
    "decoder.layers.0.mixer.in_proj.layer_norm_weight": (16,),
    "decoder.layers.0.mixer.in_proj.weight.z": (32, 16),
    "decoder.layers.0.mixer.in_proj.weight.x": (32, 16),
    "decoder.layers.0.mixer.in_proj.weight.B": (16, 16),
    "decoder.layers.0.mixer.in_proj.weight.C": (16, 16),
    "decoder.layers.0.mixer.in_proj.weight.dt": (4, 16),
    "decoder.layers.0.mixer.conv1d.weight.x": (32, 1, 4),
    "decoder.layers.0.mixer.conv1d.weight.B": (16, 1, 4),
    "decoder.layers.0.mixer.conv1d.weight.C": (16, 1, 4),
    "decoder.layers.0.mixer.conv1d.bias.x": (32,),
    "decoder.layers.0.mixer.conv1d.bias.B": (16,),
    "decoder.layers.0.mixer.conv1d.bias.C": (16,),
    "decoder.layers.0.mixer.A_log": (4,),
    "decoder.layers.0.mixer.D": (4,),
    "decoder.layers.0.mixer.dt_bias": (4,),
    "decoder.layers.0.mixer.norm.weight": (32,),
    "decoder.layers.0.mixer.out_proj.weight": (16, 32),
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": (16,),
    "decoder.layers.1.self_attention.linear_qkv.weight": (32, 16),
    "decoder.layers.1.self_attention.linear_proj.weight": (16, 16),
    "decoder.layers.2.mlp.linear_fc1.layer_norm_weight": (16,),
    "decoder.layers.2.mlp.linear_fc1.weight": (48, 16),
    "decoder.layers.2.mlp.linear_fc2.weight": (16, 24),
    "decoder.layers.3.pre_mlp_layernorm.weight": (16,),
    "decoder.layers.3.mlp.router.weight": (4, 16),
    "decoder.layers.3.mlp.router.expert_bias": (4,),
    "decoder.layers.3.mlp.experts.experts.linear_fc1.weight": (4, 16, 6),
    "decoder.layers.3.mlp.experts.experts.linear_fc2.weight": (4, 6, 8),
    "decoder.layers.3.mlp.fc1_latent_proj.weight": (6, 16),
    "decoder.layers.3.mlp.fc2_latent_proj.weight": (16, 6),
    "decoder.layers.3.mlp.shared_experts.linear_fc1.weight": (24, 16),
    "decoder.layers.3.mlp.shared_experts.linear_fc2.weight": (16, 12),
    "decoder.final_norm.weight": (16,),
    "mtp.layers.0.enorm.weight": (16,),
    "mtp.layers.0.hnorm.weight": (16,),
    "mtp.layers.0.eh_proj.weight": (16, 32),
    "mtp.layers.0.final_layernorm.weight": (16,),
    "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.layer_norm_weight": (16,),
    "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight": (32, 16),
    "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_proj.weight": (16, 16),
    "mtp.layers.0.mtp_model_layer.layers.1.pre_mlp_layernorm.weight": (16,),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight": (4, 16),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.expert_bias": (4,),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.experts.linear_fc1.weight": (4, 16, 6),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.experts.linear_fc2.weight": (4, 6, 8),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.fc1_latent_proj.weight": (6, 16),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.fc2_latent_proj.weight": (16, 6),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.shared_experts.linear_fc1.weight": (24, 16),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.shared_experts.linear_fc2.weight": (16, 12),
    "output_layer.weight": (128, 16),
}
"""Shape of every tensor of that model, as megatron-core 0.19.2 with Transformer Engine names them."""


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random tensors of the hybrid model."""
    source = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=source, dtype=torch.float32).to(dtype)
        for name, shape in SHAPES.items()
    }


GROUPS = [
    {"wd_mult": mult, "lr": 0.002, "betas": [0.9, 0.95], "eps": 1e-7, "step": 6.0}
    for mult in (1.0, 0.0)
]
TRAINED: dict[str, Any] = {
    "optimizer": {
        "optimizer": {"param_groups": GROUPS},
        "param_state_sharding_type": "fully_reshardable",
    },
    "opt_param_scheduler": {
        "max_lr": 0.003,
        "lr_warmup_steps": 4,
        "num_steps": 14,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 400,
        "min_lr": 0.0001,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_style": "constant",
        "wd_incr_steps": 400,
    },
}
"""Counters and constants of an optimizer after 7 iterations, one of which was skipped."""
TRAINED_ARGS = {**ARGS, "consumed_train_samples": 14, "seq_length": 32, "clip_grad": 0.5}


def optimizer(
    found: Mapping[str, Tensor], master: str = "param", prefix: str = "", seed: int = 9
) -> dict[str, Tensor]:
    """Return random moments and float32 values of all trained tensors of a model.

    Args:
        master: Megatron's name of the float32 values.
        prefix: beginning of the names, ``chained_0.`` for the first of several optimizers.
    """
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in found.items():
        if name.endswith("expert_bias"):
            continue
        beginning = f"{prefix}optimizer.state"
        state[f"{beginning}.exp_avg.{name}"] = torch.randn(tensor.shape, generator=draw)
        state[f"{beginning}.exp_avg_sq.{name}"] = torch.rand(tensor.shape, generator=draw)
        rest = torch.rand(tensor.shape, generator=draw) * 1e-3 * tensor.float()
        state[f"{beginning}.{master}.{name}"] = tensor.float() + rest
    return state


def in_blocks(tensor: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return a tensor as older versions store those of an optimizer: cut into blocks, each flat."""
    rows = [tensor]
    for dim, count in enumerate(counts):
        rows = [part for one in rows for part in one.chunk(count, dim)]
    return torch.stack([one.reshape(-1) for one in rows]).view(*counts, -1)


def cut(tensor: Tensor, parts: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the parts of a tensor, cut along its first dimension that allows it."""
    for axis, size in enumerate(tensor.shape):
        if size % parts == 0:
            begins = torch.zeros(parts, tensor.dim(), dtype=torch.int64)
            begins[:, axis] = torch.arange(parts) * (size // parts)
            return list(zip(map(tuple, begins.tolist()), tensor.chunk(parts, axis)))
    return [((0,) * tensor.dim(), tensor)]


def write(
    folder: Path,
    found: Mapping[str, Tensor] | None = None,
    args: Mapping[str, Any] | None = ARGS,
    *,
    parts: int = 1,
    common_file: bool = False,
    more: Mapping[str, Any] | None = None,
    blocks: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write a checkpoint.

    Args:
        found: tensors by name, by default those of `tensors`.
        args: Megatron's options; None writes none, as NeMo.
        parts: number of parts of each tensor, in one file for each.
        common_file: write the options to ``common.pt``, as older versions.
        more: further plain values, for example `TRAINED`.
        blocks: number of blocks along each dimension, for tensors that are stored as blocks.
    """
    found = tensors() if found is None else found
    shapes = {
        name: {"nd_reformulated_orig_global_shape": found[name].shape} for name in blocks or {}
    }
    found = {**found, **{name: in_blocks(found[name], how) for name, how in (blocks or {}).items()}}
    folder.mkdir(parents=True)
    files = [bytearray() for _ in range(parts)]
    about: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def put(index: MetadataIndex, value: Any, file: int) -> None:
        archive = io.BytesIO()
        torch.save(value, archive)
        name, length = f"__{file}_0.distcp", len(archive.getvalue())
        places[index] = _StorageInfo(name, len(files[file]), length)
        files[file] += archive.getvalue()

    for name, tensor in found.items():
        pieces = cut(tensor, parts)
        chunks = [ChunkStorageMetadata(torch.Size(b), piece.shape) for b, piece in pieces]
        properties = TensorProperties(dtype=tensor.dtype)
        about[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
        for number, (begin, piece) in enumerate(pieces):
            put(MetadataIndex(name, torch.Size(begin)), piece.clone(), number)
    common = {"iteration": 7, "checkpoint_version": 3.0, **(more or {})}
    if args is not None:
        common["args"] = argparse.Namespace(**args)
    if common_file:
        torch.save(common, folder / "common.pt")
    else:
        about["common_state/shard_0_1"] = BytesStorageMetadata()
        put(MetadataIndex("common_state/shard_0_1"), [common], 0)
    for number, content in enumerate(files):
        (folder / f"__{number}_0.distcp").write_bytes(content)
    metadata = Metadata(about, None, places)
    metadata.mcore_data = shapes
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))


def write_trained(
    folder: Path,
    state: Mapping[str, Tensor] | None = None,
    args: Mapping[str, Any] | None = TRAINED_ARGS,
    more: Mapping[str, Any] = TRAINED,
    **how: Any,
) -> None:
    """Write the weights of `tensors` with the state of an optimizer, by default of `optimizer`."""
    found = tensors()
    write(
        folder, {**found, **(optimizer(found) if state is None else state)}, args, more=more, **how
    )


@contextmanager
def changed_metadata(folder: Path) -> Iterator[Any]:
    """Yield the metadata of a checkpoint for changes, and write them."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))
