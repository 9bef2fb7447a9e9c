"""Import of a Hugging Face model as the checkpoint of step 0, tensor by tensor on the CPU."""

from __future__ import annotations

import math
import os
import shlex
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.directory import RUN_LOCK, RootLock
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import find_checkpoints
from megatron_packed.checkpoint.original_facts import (
    GENERATION_CONFIG,
    TOKENIZER_HASH,
    read_facts,
)
from megatron_packed.checkpoint.run_metadata import ORIGINAL
from megatron_packed.checkpoint.save import SavedCheckpoint, save_checkpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import model_flags, model_hash, section_to_dict
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import meaning_hash, vocabulary
from megatron_packed.data.tokenizers.untrusted_tokenizer import open_tokenizer
from megatron_packed.files.written_files import write_file
from megatron_packed.models.convert.families.symbols import MAMBA
from megatron_packed.models.convert.huggingface_config import CHUNK_SIZES, model_of, read_config
from megatron_packed.models.convert.huggingface_files import ModelFiles, by_prefix, open_weights
from megatron_packed.models.convert.weight_rows import Weight

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
ARGS_FILE = "model.args"
OnProgress = Callable[[int, int], None]
"""Callback that gets the bytes written until now and the total number of bytes."""


def silent(done: int, total: int) -> None:
    """Report nothing; the default of ``on_progress``."""


class TrainedState(NamedTuple):
    """State of training that is saved with imported weights, so that a run continues it."""

    iteration: int
    steps: int
    """Steps that the optimizer has made."""
    progress: dict[str, Any]
    """Counters of the run, by their names in a checkpoint."""
    optim: dict[str, Any] | None
    """Options of the optimizer and of its schedule; None if the schedule is not known."""
    tensors: Mapping[str, tuple[Weight, Callable[[str], Tensor]]]
    """By name, each tensor of the optimizer, and the function that reads its parts."""


class Imported(NamedTuple):
    """Checkpoint that was made from Hugging Face weights."""

    saved: SavedCheckpoint
    model: ModelConfig
    flags: str
    """Text of ``model.args``: one flag on each line."""
    rounded: tuple[str, ...]
    """Names of checkpoint tensors with a narrower dtype than the tensors that they come from."""
    notes: tuple[str, ...]
    """Sentences about differences from the Hugging Face model."""


def open_model(
    directory: Path, *, bf16: bool, ignored: Collection[str] = (), depths: int = 0
) -> tuple[ModelConfig, ModelFiles, dict[str, Weight]]:
    """Read config.json and the headers of the weights, and check them against each other.

    Args:
        ignored: see `from_huggingface`.
        depths: depths of multi-token prediction; see `from_huggingface`.
    Returns:
        The configuration, the open files and, by name, each tensor of the project's model.
    Raises:
        CheckpointError: the model is not supported, or files are missing, damaged or do not fit
            config.json.
    """
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        cure = "name the directory of a downloaded model, with config.json and safetensors files"
        raise CheckpointError(problem, path=directory, cure=cure)
    path = directory / CONFIG
    family, model = model_of(read_config(path), path, ignored, depths=depths)
    dtype = torch.bfloat16 if bf16 else torch.float32
    files, weights = open_weights(directory, family, model, dtype)
    return model, files, weights


def from_huggingface(
    directory: Path,
    root: Path,
    *,
    bf16: bool = False,
    ignored: Collection[str] = (),
    depths: int = 0,
    on_progress: OnProgress = silent,
) -> Imported:
    """Write a checkpoint of step 0 under ``root`` that contains only weights.

    The checkpoint serves ``--pretrained-checkpoint``. The flags of the model are written to
    ``root/model.args``. During the conversion a lock keeps training runs and other conversions
    out of ``root``. Host memory: the largest tensor of the checkpoint plus the largest tensor of
    the Hugging Face model. The metadata has the facts of `original_facts`, for a later export.

    Args:
        bf16: write weights for training with ``--bf16``. Parameters that such a training keeps in
            float32 are float32 in either case.
        ignored: keys of config.json that do not affect the model's output.
        depths: depths of multi-token prediction of the new model; 0 passes over its tensors. If
            the files have the layers of one depth, all depths use them.
    Raises:
        CheckpointError: the model cannot be imported (see `open_model`), a value is not finite,
            ``root`` already contains checkpoints, or another process writes there. No checkpoint
            was written. ``root`` was not created for a model that cannot be imported.
    """
    check_empty(root)
    model, files, weights = open_model(directory, bf16=bf16, ignored=ignored, depths=depths)
    fields = read_config(directory / CONFIG)
    original, left_out = read_facts(directory / CONFIG, fields)
    tokenizer_hash, unusable = _tokenizer(directory, model)
    if tokenizer_hash:
        original[TOKENIZER_HASH] = tokenizer_hash
    notes = (*_notes(fields, left_out, model, files), *unusable)
    return import_weights(
        root,
        directory,
        model,
        files.read,
        weights,
        files.dtypes.__getitem__,
        bf16=bf16,
        more_flags=_tokenizer_flags(directory),
        notes=notes,
        on_progress=on_progress,
        original=original,
    )


def _tokenizer(directory: Path, model: ModelConfig) -> tuple[str, list[str]]:
    """Return the hash of the model's tokenizer, and why a run would refuse it, as sentences.

    The hash is empty if there is no readable tokenizer.json.
    """
    if not (directory / TOKENIZER).is_file():
        return "", []
    tokenizer_hash = ""
    try:
        with closing(open_tokenizer(directory)) as tokenizer:
            tokenizer_hash = meaning_hash(tokenizer)
            vocabulary(tokenizer, model.vocab_size)
    except DataError as error:
        return tokenizer_hash, [f"No run can use this tokenizer with these weights: {error}"]
    return tokenizer_hash, []


def _notes(
    fields: Mapping[str, Any], left_out: Sequence[str], model: ModelConfig, files: ModelFiles
) -> Iterator[str]:
    """Yield sentences about what was passed over, and about another chunk size.

    Args:
        fields: keys of config.json.
        left_out: keys of generation_config.json that the checkpoint does not keep.
    """
    if files.aside:
        yield f"Passed over, because they are not part of the text model: {by_prefix(files.aside)}."
        if any(name.startswith("mtp.") for name in files.aside):
            yield f"{flags.MTP_DEPTHS} N converts multi-token prediction (mtp.*) too, as N depths."
    if left_out:
        yield (
            f"The checkpoint does not keep these keys of {GENERATION_CONFIG}: "
            f"{', '.join(left_out)}. An export with {flags.HF_BASE} has them."
        )
    for key in CHUNK_SIZES & fields.keys():
        if MAMBA in model.hybrid_layer_pattern and fields[key] != model.mamba_chunk_size:
            yield (
                f"{key} {fields[key]} was read as {model.mamba_chunk_size}. The chunk size changes "
                "only the rounding."
            )


def check_empty(root: Path) -> None:
    """Refuse a directory that contains checkpoints."""
    if find_checkpoints(root):
        raise CheckpointError(
            "already contains checkpoints",
            path=root,
            cure=f"name another directory by {flags.SAVE}",
        )


def _tokenizer_flags(directory: Path) -> list[str]:
    if not os.path.lexists(directory / TOKENIZER):
        return []
    return [
        f"{flags.TOKENIZER_TYPE} HuggingFaceTokenizer",
        shlex.join([flags.TOKENIZER_MODEL, str(directory)]),
    ]


def import_weights(
    root: Path,
    directory: Path,
    model: ModelConfig,
    read: Callable[[str], Tensor],
    weights: Mapping[str, Weight],
    dtype_of: Callable[[str], torch.dtype],
    *,
    bf16: bool,
    more_flags: Sequence[str] = (),
    notes: tuple[str, ...],
    on_progress: OnProgress,
    trained: TrainedState | None = None,
    original: Mapping[str, Any] | None = None,
) -> Imported:
    """Write the checkpoint of step 0, or of the iteration of ``trained``, and ``model.args``.

    Every tensor is read twice, because all values are checked before ``root`` is made.

    Args:
        directory: source of the weights, for messages.
        read: returns the tensor of a part of a weight by name.
        dtype_of: returns the dtype of the tensor of a part by name.
        more_flags: lines of ``model.args`` after those of the model.
        notes: see `Imported`.
        trained: state of training to save with the weights.
        original: facts of the Hugging Face model, as `read_facts` returns them.
    Raises:
        CheckpointError: a value is not finite, a second moment is negative, ``root`` contains
            checkpoints, or another process writes there.
    """
    sources = {f"model/{w.name}": (w, read) for w in weights.values()}
    sources.update(trained.tensors if trained else {})
    total, done = 2 * sum(math.prod(w.shape) * w.dtype.itemsize for w, _ in sources.values()), 0

    def joined(name: str) -> Tensor:
        nonlocal done
        weight, read_part = sources[name]
        parameter = weight.join(read_part).view(-1)
        _check_values(name, parameter, directory)
        done += parameter.nbytes
        on_progress(done, total)
        return parameter

    for name in sources:
        joined(name)
    text = "\n".join([*model_flags(model), *[flags.BF16] * bf16, *more_flags]) + "\n"
    root.mkdir(parents=True, exist_ok=True)
    with closing(RootLock(root, RUN_LOCK)):
        check_empty(root)  # another process may have saved there before the lock
        tensors = {name: weight for name, (weight, _) in sources.items()}
        saved = save_weights(root, model, tensors, joined, bf16, trained, original)
        write_file(root / ARGS_FILE, text.encode())
    rounded = tuple(
        weight.name
        for weight in weights.values()
        if any(
            torch.promote_types(dtype_of(part.name), weight.dtype) != weight.dtype
            for part in weight.parts
        )
    )
    return Imported(saved, model, text, rounded, notes)


def save_weights(
    root: Path,
    model: ModelConfig,
    tensors: Mapping[str, Weight],
    joined: Callable[[str], Tensor],
    bf16: bool,
    trained: TrainedState | None,
    original: Mapping[str, Any] | None,
) -> SavedCheckpoint:
    """Write the checkpoint of `import_weights`.

    Args:
        tensors: every tensor of the checkpoint by name.
        joined: returns the values of a tensor by name.
    """
    shards = [
        TensorShard.whole(name, torch.empty(w.shape, dtype=w.dtype, device="meta"))
        for name, w in tensors.items()
    ]
    if trained is not None:
        shards.append(TensorShard.whole("optimizer/step", torch.tensor([float(trained.steps)])))
    # There is no run yet, so data positions, random states and hashes are empty.
    config: dict[str, Any] = {"model": section_to_dict(model), "training": {"bf16": bf16}}
    if trained is not None and trained.optim is not None:
        config["optim"] = trained.optim
    metadata = {
        "progress": trained.progress if trained else {},
        "plan_hash": "",
        "data_hash": "",
        "layout": {},
        "rng": [],
        "config": config,
        **({} if original is None else {ORIGINAL: original}),
    }
    if original is not None and TOKENIZER_HASH in original:
        # Runs replace this hash by that of their own tokenizer, and keep the fact of the original.
        metadata["tokenizer_hash"] = original[TOKENIZER_HASH]
    return save_checkpoint(
        root,
        trained.iteration if trained else 0,
        shards,
        metadata,
        run_id=uuid.uuid4().hex[:12],
        config_hash=model_hash(model),
        values=lambda shard: joined(shard.name) if shard.name in tensors else shard.tensor,
    )


def _check_values(name: str, values: Tensor, directory: Path) -> None:
    """Check that values are finite, and that those of Adam's second moment are not negative."""
    low, high = (float(extreme) for extreme in torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        value_range = f"{low} to {high}"
        raise CheckpointError(
            f"{name} is not finite", path=directory, expected="finite values", found=value_range
        )
    if low < 0 and name.startswith("optimizer/exp_avg_sq/"):
        raise CheckpointError(f"{name} is negative", path=directory, expected="squares", found=low)
