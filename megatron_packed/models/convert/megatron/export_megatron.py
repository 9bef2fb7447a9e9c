"""Export of the weights of a checkpoint as a ``torch_dist`` checkpoint that Megatron loads."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import Step, newest_checkpoint
from megatron_packed.checkpoint.manifest import Manifest, read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.config import flag_names as flags
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.stored_config import stored_problem
from megatron_packed.files.written_files import sync_path
from megatron_packed.layers.kinds.registry import MIXERS
from megatron_packed.models.convert.export_huggingface import new_directory, write_texts
from megatron_packed.models.convert.families.decoder import MULTIPLIERS
from megatron_packed.models.convert.families.family import TABLE
from megatron_packed.models.convert.import_huggingface import OnProgress, silent
from megatron_packed.models.convert.megatron.arguments import UNPADDED
from megatron_packed.models.convert.megatron.folders import BACKEND_FILE, FORMAT, TRACKER
from megatron_packed.models.convert.megatron.names import new_weights, unknown_layers
from megatron_packed.models.convert.megatron.torch_dist import COMMON_STATE

FOLDER = "release"
"""Folder and entry of the tracker file of weights without an iteration, as in Megatron."""


class MegatronTokenizer(NamedTuple):
    """Tokenizer of a checkpoint, in Megatron's terms."""

    options: Mapping[str, Any]
    """Options by Megatron's names, which ``--use-checkpoint-args`` takes there."""
    vocab_size: int | None
    """Vocabulary without padding; None if it is unknown."""
    files: Mapping[str, str | Path] = MappingProxyType({})
    """Names of files to write into the new directory, and the text of each or the file to copy."""


def to_megatron(
    checkpoint: Path,
    directory: Path,
    *,
    step: Step = None,
    tokenizer: MegatronTokenizer | None = None,
    on_progress: OnProgress = silent,
) -> Path:
    """Write the weights of a checkpoint as a hybrid model of Megatron.

    The model's options are stored as ``args``. ``directory`` appears only after all files are
    written. Host memory: the whole model.

    Args:
        checkpoint: one checkpoint, or a directory of checkpoints, of which the newest is exported.
        directory: new directory, for ``--load`` of Megatron.
        step: export the checkpoint of this step; see `checkpoint.load.Step`.
        tokenizer: tokenizer to store with the weights; None stores none.
    Returns:
        The folder of the checkpoint in ``directory``.
    Raises:
        CheckpointError: Megatron does not have the model, the checkpoint is damaged, or
            ``directory`` exists.
    """
    if os.path.lexists(directory):
        raise CheckpointError("exists", path=directory, cure="name a new directory")
    source = newest_checkpoint(checkpoint, step)
    manifest = read_manifest(source)
    model, dtype = _model(manifest, source)
    vocabulary = manifest.metadata["config"]["model"].get("vocab_size")
    named = tokenizer or MegatronTokenizer({}, vocabulary)
    with new_directory(directory, flags.TO_MEGATRON) as temporary:
        folder = temporary / FOLDER
        folder.mkdir()
        tensors = _tensors(source, manifest, model, dtype, on_progress)
        _write(folder, tensors, _arguments(model, named))
        write_texts(temporary, named.files)
        (temporary / TRACKER).write_text(FOLDER)
    return directory / FOLDER


def _model(manifest: Manifest, path: Path) -> tuple[ModelConfig, torch.dtype]:
    """Return the model of a checkpoint, whose vocabulary are all stored rows, and its dtype."""
    stored = manifest.metadata.get("config", {})
    problem = stored_problem(stored)
    table = manifest.tensors.get(f"model/{TABLE}")
    if problem is not None or table is None:
        raise CheckpointError(f"its configuration{problem or ' has no table'}", path=path)
    model = ModelConfig(**{**stored["model"], "vocab_size": table.shape[0]})
    ours = _our_options()
    changed = unknown_layers(model) + [
        option.flag
        for option in section_fields(ModelConfig)
        if option.name in ours and getattr(model, option.name) != option.default
    ]
    if changed:
        raise CheckpointError(
            f"its model has {', '.join(changed)}, which Megatron does not have",
            path=path,
            cure="export it as a Hugging Face model",
        )
    return model, torch.bfloat16 if stored["training"]["bf16"] else torch.float32


def _our_options() -> set[str]:
    """Return the options that Megatron does not have; only their defaults can be exported."""
    ours = set(MULTIPLIERS)
    for kind in MIXERS.values():
        if kind.megatron is not None:
            ours |= set(kind.megatron.without)
        elif (options := kind.kind.options.get("model")) is not None:
            ours |= set(vars(options).get("__annotations__", {}))
    return ours


def _arguments(model: ModelConfig, tokenizer: MegatronTokenizer) -> argparse.Namespace:
    """Return the options of model and tokenizer under Megatron's names.

    The vocabulary without padding is among them.
    """
    size = tokenizer.vocab_size
    values = {
        option.name: getattr(model, option.name)
        for option in section_fields(ModelConfig)
        if option.name
        not in {*_our_options(), "vocab_size", "window_size", "window_attn_skip_freq"}
    }
    window = model.window_size
    return argparse.Namespace(
        **values,
        num_layers=model.num_layers,
        group_query_attention=model.num_query_groups != model.num_attention_heads,
        padded_vocab_size=model.vocab_size,
        **({} if size is None else {UNPADDED: size, "vocab_size": size}),
        window_size=None if window is None else [int(side) for side in window.split(",")],
        window_attn_skip_freq=model.window_attn_skip_freq,
        **tokenizer.options,
    )


def _tensors(
    path: Path,
    manifest: Manifest,
    model: ModelConfig,
    dtype: torch.dtype,
    on_progress: OnProgress,
) -> Iterator[tuple[str, Tensor]]:
    weights = new_weights(model, dtype)
    for number, (weight, names) in enumerate(weights):
        parameter = read_tensor(path, f"model/{weight.name}", manifest)
        if parameter.shape != weight.shape:
            raise CheckpointError(
                f"{weight.name} has another shape",
                path=path,
                expected=list(weight.shape),
                found=list(parameter.shape),
            )
        for part, tensor in weight.split(parameter).items():
            yield names[part], tensor
        on_progress(number + 1, len(weights))


def _write(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], arguments: argparse.Namespace
) -> None:
    """Write the tensors and the options with torch's writer, and the name of the format."""
    options = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0}
    state: dict[str, Any] = {f"{COMMON_STATE}shard_0_1": [options], **dict(tensors)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves on a single process
        save(
            state,
            storage_writer=FileSystemWriter(folder),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
    backend = {"sharded_backend": FORMAT, "sharded_backend_version": 1}
    (folder / BACKEND_FILE).write_text(json.dumps(backend))
    sync_path(folder)
