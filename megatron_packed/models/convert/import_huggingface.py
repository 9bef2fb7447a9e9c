"""A directory of Hugging Face's as a checkpoint of step 0, a tensor at a time, on the CPU."""

from __future__ import annotations

import math
import shlex
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.directory_lock import RUN_LOCK, RootLock
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import find_checkpoints
from megatron_packed.checkpoint.save import SavedCheckpoint, save_checkpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import (
    as_flags,
    model_hash,
    section_to_dict,
)
from megatron_packed.models.convert.huggingface_config import model_of, read_config
from megatron_packed.models.convert.huggingface_files import ModelFiles
from megatron_packed.models.convert.weight_rows import Weight, their_shapes, weights_of

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
ARGS_FILE = "model.args"
OnProgress = Callable[[int, int], None]
"""Learns how many bytes are done, of how many."""


def silent(done: int, total: int) -> None:
    """The default of ``on_progress``."""


class Imported(NamedTuple):
    """A checkpoint made from Hugging Face's weights."""

    saved: SavedCheckpoint
    model: ModelConfig
    flags: str
    """What ``model.args`` holds: a flag on each line."""
    rounded: tuple[str, ...]
    """Tensors of ours with fewer bits than theirs."""


def open_model(
    directory: Path, *, bf16: bool, ignored: Collection[str] = ()
) -> tuple[ModelConfig, ModelFiles, dict[str, Weight]]:
    """The configuration, the files and the tensors of a model, all checked against each other;
    headers alone are read.

    Raises:
        CheckpointError: it is not built, or files are missing, damaged or do not fit config.json.
    """
    if not directory.is_dir():
        problem = "is no directory" if directory.exists() else "does not exist"
        cure = "name the directory of a downloaded model, with config.json and safetensors"
        raise CheckpointError(problem, path=directory, cure=cure)
    path = directory / CONFIG
    family, model = model_of(read_config(path), path, ignored)
    weights = weights_of(family, model, torch.bfloat16 if bf16 else torch.float32)
    files = ModelFiles(directory)
    files.check(their_shapes(weights), directory)
    return model, files, weights


def from_huggingface(
    directory: Path,
    root: Path,
    *,
    bf16: bool = False,
    ignored: Collection[str] = (),
    on_progress: OnProgress = silent,
) -> Imported:
    """Write the checkpoint of step 0 under ``root``, with weights alone, for
    ``--pretrained-checkpoint``, and ``root/model.args`` with the flags of the model.

    Runs and other conversions are kept out of ``root`` meanwhile. Host memory: the largest tensor
    of ours, and the largest of theirs.

    Args:
        bf16: weights for training with ``--bf16``; what it keeps in float32 is float32 in either
        case.
        ignored: keys of config.json that change no output.
    Raises:
        CheckpointError: nothing was written; see `open_model`. Also if a value is not finite, if
            ``root`` holds checkpoints, or if another process writes there.
    """
    _check_empty(root)
    model, files, weights = open_model(directory, bf16=bf16, ignored=ignored)
    flags = _flags(model, directory, bf16)
    root.mkdir(parents=True, exist_ok=True)
    with closing(RootLock(root, RUN_LOCK)):
        _check_empty(root)  # under the lock, so no other process may fill it
        saved = _save(root, directory, model, files, weights, bf16=bf16, on_progress=on_progress)
        (root / ARGS_FILE).write_text(flags)
    narrower = [
        w.name
        for w in weights.values()
        if any(torch.promote_types(files.dtypes[part.name], w.dtype) != w.dtype for part in w.parts)
    ]
    return Imported(saved, model, flags, tuple(narrower))


def _check_empty(root: Path) -> None:
    if find_checkpoints(root):
        raise CheckpointError(
            "holds checkpoints already", path=root, cure=f"name another directory by {flags.SAVE}"
        )


def _flags(model: ModelConfig, directory: Path, bf16: bool) -> str:
    lines = as_flags(model) + [flags.BF16] * bf16
    if (directory / TOKENIZER).is_file():
        lines += [
            f"{flags.TOKENIZER_TYPE} HuggingFaceTokenizer",
            shlex.join([flags.TOKENIZER_MODEL, str(directory)]),
        ]
    return "\n".join(lines) + "\n"


def _save(
    root: Path,
    directory: Path,
    model: ModelConfig,
    files: ModelFiles,
    weights: Mapping[str, Weight],
    *,
    bf16: bool,
    on_progress: OnProgress,
) -> SavedCheckpoint:
    total, done = sum(math.prod(w.shape) * w.dtype.itemsize for w in weights.values()), 0
    meta = {
        f"model/{w.name}": torch.empty(w.shape, dtype=w.dtype, device="meta")
        for w in weights.values()
    }

    def value(shard: TensorShard) -> Tensor:
        nonlocal done
        whole = weights[shard.name.removeprefix("model/")].join(files.read).view(-1)
        low, high = (float(extreme) for extreme in torch.aminmax(whole))
        if not (math.isfinite(low) and math.isfinite(high)):
            found = f"{low} to {high}"
            raise CheckpointError(
                f"{shard.name} is not finite", path=directory, expected="finite values", found=found
            )
        done += whole.nbytes
        on_progress(done, total)
        return whole

    # Of a run that has not begun; positions in data and random states are those of no run.
    metadata = {
        "progress": {},
        "plan_hash": "",
        "data_hash": "",
        "layout": {},
        "rng": [],
        "config": {"model": section_to_dict(model), "training": {"bf16": bf16}},
    }
    shards = [TensorShard.whole(name, tensor) for name, tensor in meta.items()]
    return save_checkpoint(
        root,
        0,
        shards,
        metadata,
        run_id=uuid.uuid4().hex[:12],
        config_hash=model_hash(model),
        values=value,
    )
