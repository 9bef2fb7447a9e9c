"""Export of a checkpoint as a ``torch_dist`` checkpoint that Megatron loads."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
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
from megatron_packed.models.convert.megatron.export_optimizer import (
    KINDS,
    ExportedState,
    exported_state,
)
from megatron_packed.models.convert.megatron.folders import BACKEND_FILE, FORMAT, TRACKER
from megatron_packed.models.convert.megatron.names import new_weights, unknown_layers
from megatron_packed.models.convert.megatron.optimizer_state import MASTER
from megatron_packed.models.convert.megatron.torch_dist import COMMON_STATE
from megatron_packed.models.convert.model_weights import model_on_meta
from megatron_packed.models.convert.weight_rows import Weight

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


class Written(NamedTuple):
    """Checkpoint that Megatron loads."""

    folder: Path
    """Folder of the checkpoint in the new directory."""
    state: ExportedState | str
    """State of the optimizer, or the reason why only weights were written; may be empty."""


class _Source(NamedTuple):
    """Tensor of a new checkpoint: a part of a tensor of the old one."""

    tensor: str
    weight: Weight
    part: str
    dtype: torch.dtype


def to_megatron(
    checkpoint: Path,
    directory: Path,
    *,
    step: Step = None,
    tokenizer: MegatronTokenizer | None = None,
    optimizer: bool = True,
    expert_parallel: int | None = None,
    on_progress: OnProgress = silent,
) -> Written:
    """Write a checkpoint as that of a hybrid model of Megatron.

    The model's options are stored as ``args``. ``directory`` appears only after all files are
    written. Host memory: the largest tensor, twice.

    Args:
        checkpoint: one checkpoint, or a directory of checkpoints, of which the newest is exported.
        directory: new directory, for ``--load`` of Megatron.
        step: export the checkpoint of this step; see `checkpoint.load.Step`.
        tokenizer: tokenizer to store with the weights; None stores none.
        optimizer: write the state of the optimizer, if the checkpoint has it.
        expert_parallel: see `exported_state`.
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
    arguments = _arguments(model, tokenizer or MegatronTokenizer({}, vocabulary))
    weights = new_weights(model, dtype)
    buffers = {name for name, _ in model_on_meta(model, dtype).named_buffers()}
    trained = {weight.name for weight, _ in weights} - buffers
    state = exported_state(source, manifest, trained, expert_parallel) if optimizer else ""
    sources = _sources(weights, manifest, source, set() if isinstance(state, str) else trained)
    common: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0}
    name = tracked = FOLDER
    if not isinstance(state, str):
        vars(arguments).update(state.arguments)
        common |= {"iteration": state.iteration, **state.common}
        name, tracked = f"iter_{state.iteration:07d}", str(state.iteration)
    with new_directory(directory, flags.TO_MEGATRON) as temporary:
        folder = temporary / name
        folder.mkdir()
        _write(folder, sources, _reader(source, manifest, sources, on_progress), common)
        write_texts(temporary, tokenizer.files if tokenizer else {})
        (temporary / TRACKER).write_text(tracked)
    return Written(directory / name, state)


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


def _sources(
    weights: list[tuple[Weight, dict[str, str]]],
    manifest: Manifest,
    path: Path,
    trained: Collection[str],
) -> dict[str, _Source]:
    """Return every tensor of the new checkpoint by its name, in the order of the parameters.

    Args:
        trained: names of the parameters whose state is written.
    """
    sources: dict[str, _Source] = {}
    for weight, names in weights:
        places = {"": f"model/{weight.name}"}
        if weight.name in trained:
            for kind, their in KINDS.items():
                places[f"optimizer.state.{their}."] = f"optimizer/{kind}/{weight.name}"
            if weight.dtype == torch.float32:  # it is its own master
                places[f"optimizer.state.{KINDS[MASTER]}."] = f"model/{weight.name}"
        for prefix, tensor in places.items():
            record = manifest.tensors.get(tensor)
            if record is None or tuple(record.shape) != weight.shape:
                raise CheckpointError(
                    f"{tensor.removeprefix('model/')} has another shape",
                    path=path,
                    expected=list(weight.shape),
                    found=None if record is None else list(record.shape),
                )
            for part, their in names.items():
                sources[prefix + their] = _Source(tensor, weight, part, record.dtype)
    return sources


def _reader(
    path: Path, manifest: Manifest, sources: Mapping[str, _Source], on_progress: OnProgress
) -> Callable[[str], Tensor]:
    """Return the function that reads a tensor by its new name.

    The parts of the tensor that was read last stay in memory until another one is requested.
    """
    current, parts, done = "", dict[str, Tensor](), 0

    def read(name: str) -> Tensor:
        nonlocal current, parts, done
        source = sources[name]
        if source.tensor != current:
            parts = {}  # frees the previous tensor before another is read
            parts = source.weight.split(read_tensor(path, source.tensor, manifest))
            current = source.tensor
        done += 1
        on_progress(done, len(sources))
        return parts[source.part]

    return read


class _ReadPlanner(DefaultSavePlanner):
    """Planner of a save of tensors without memory, each of which is read when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        # Both kinds of flattening turn numbers that are keys of dictionaries into text.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> object:
        value = super().lookup_object(index)
        return self._read(index.fqn) if isinstance(value, Tensor) else value


def _write(
    folder: Path,
    sources: Mapping[str, _Source],
    read: Callable[[str], Tensor],
    common: Mapping[str, Any],
) -> None:
    """Write the tensors and the plain values with torch's writer, and the name of the format."""
    state: dict[str, Any] = {f"{COMMON_STATE}shard_0_1": [dict(common)]}
    for name, source in sources.items():
        shape = next(part.shape for part in source.weight.parts if part.name == source.part)
        state[name] = torch.empty(shape, dtype=source.dtype, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves on a single process
        save(
            state,
            # Without copies ahead, tensors are written in the order of their parameters.
            storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0),
            planner=_ReadPlanner(read),
            no_dist=True,
        )
    backend = {"sharded_backend": FORMAT, "sharded_backend_version": 1}
    (folder / BACKEND_FILE).write_text(json.dumps(backend))
    sync_path(folder)
