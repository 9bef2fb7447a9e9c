"""A checkpoint's weights as a Hugging Face model: its names, config.json and the tokenizer's files."""

from __future__ import annotations

import math
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_packed.checkpoint.directory import sync_directory
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import find_checkpoints
from megatron_packed.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES
from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import (
    model_differences,
)
from megatron_packed.config.stored_config import stored_problem
from megatron_packed.models.convert.huggingface_config import model_of, read_config
from megatron_packed.models.convert.huggingface_files import INDEX, SINGLE, ModelFiles, write_files
from megatron_packed.models.convert.import_huggingface import CONFIG, TOKENIZER, OnProgress, silent
from megatron_packed.models.convert.weight_rows import Weight, their_shapes, weights_of

BESIDE = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
"""Files that go along with an export where they lie beside config.json; code is not among them."""
MAX_FILE_BYTES = 5_000_000_000
"""As transformers cuts them."""


@dataclass
class _Exported:
    """Tensors of theirs from a checkpoint; the last tensor of ours is kept, as its parts are wanted
    one by one.
    """

    directory: Path
    manifest: Manifest
    weights: Mapping[str, Weight]
    dtypes: Mapping[str, torch.dtype]
    on_progress: OnProgress

    def __post_init__(self) -> None:
        self.owner = {
            part.name: weight for weight in self.weights.values() for part in weight.parts
        }
        self.rounded: list[str] = []
        self.total = sum(
            math.prod(part.shape) * self.dtypes[part.name].itemsize
            for w in self.weights.values()
            for part in w.parts
        )
        self.done = 0
        self.current = ""
        self.parts: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        weight = self.owner[name]
        if self.current != weight.name:
            self.parts.clear()  # before the next one is read
            whole = read_tensor(self.directory, f"model/{weight.name}", self.manifest)
            self.current = weight.name
            self.parts = weight.split(whole)
        kept = self.parts[name]
        given = kept.to(self.dtypes[name])
        if given.dtype != kept.dtype and not torch.equal(given.to(kept.dtype), kept):
            self.rounded.append(name)
        self.done += given.nbytes
        self.on_progress(self.done, self.total)
        return given


def to_huggingface(
    checkpoint: Path,
    directory: Path,
    config: Path,
    *,
    ignored: Collection[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    on_progress: OnProgress = silent,
) -> tuple[str, ...]:
    """Write the weights of a checkpoint under the names of config.json's family, config.json and
    the tokenizer's files.

    ``directory`` appears when all is written. Tensors have the dtypes of the original's where its
    safetensors lie beside config.json, else those of the checkpoint. Host memory: twice the largest
    tensor of ours.

    Args:
        checkpoint: a directory of checkpoints, of which the last published counts, or one
        checkpoint.
        config: the config.json of the model that the checkpoint was made from.
    Returns:
        Names of tensors whose values were rounded to the original's dtype.
    Raises:
        CheckpointError: nothing was written: the checkpoint is damaged or belongs to another model,
            or ``directory`` is not empty or cannot be written.
    """
    _check_new(directory)
    family, model = model_of(read_config(config), config, ignored)
    found = _newest(checkpoint)
    manifest = read_manifest(found)
    bf16 = _check_configuration(manifest, model, found)
    weights = weights_of(family, model, torch.bfloat16 if bf16 else torch.float32)
    _check(manifest, weights, found)
    kept = {part.name: weight.dtype for weight in weights.values() for part in weight.parts}
    dtypes = kept | _original_dtypes(config.parent, their_shapes(weights))
    exported = _Exported(found, manifest, weights, dtypes, on_progress)
    _write_model(directory, config, exported, max_file_bytes)
    return tuple(exported.rounded)


def _check_new(directory: Path) -> None:
    """Refuse a directory that no other can be renamed to, or that holds something."""
    if not os.path.lexists(directory):
        return
    cure = f"name a new directory by {flags.TO_HF}"
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError("is no directory", path=directory, cure=cure)
    if any(directory.iterdir()):
        raise CheckpointError("is not empty", path=directory, cure=cure)


def _check_configuration(manifest: Manifest, model: ModelConfig, found: Path) -> bool:
    """Refuse a checkpoint of another model; return whether its run trained in bf16."""
    stored = manifest.metadata.get("config", {})
    problem = stored_problem(stored)
    if problem is not None:
        raise CheckpointError(
            f"its configuration{problem}", path=found, cure="use a checkpoint of a run"
        )
    different = model_differences(stored["model"], model)
    if different:
        words = "; ".join(
            f"{p.option} is {p.value} by config.json, and {p.rule}" for p in different
        )
        raise CheckpointError(
            f"belongs to another model: {words}", path=found, cure="give its own config.json"
        )
    return bool(stored["training"]["bf16"])


def _write_model(directory: Path, config: Path, exported: _Exported, max_file_bytes: int) -> None:
    """Write weights, config.json and what lies beside it; ``directory`` appears at the end."""
    tensors = [
        (part.name, exported.dtypes[part.name], part.shape)
        for weight in exported.weights.values()
        for part in weight.parts
    ]
    temporary = directory.with_name(f"{directory.name}.tmp-{uuid.uuid4().hex[:12]}")
    with _writing(temporary, directory):
        temporary.mkdir(parents=True)
        try:
            write_files(temporary, tensors, exported.value, max_file_bytes)
            shutil.copyfile(config, temporary / CONFIG)
            for name in BESIDE:
                if (config.parent / name).is_file():
                    shutil.copyfile(config.parent / name, temporary / name)
            sync_directory(temporary)
            os.rename(temporary, directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    sync_directory(directory.parent)


@contextmanager
def _writing(temporary: Path, directory: Path) -> Iterator[None]:
    """What the disk refuses is told of the place that the user named, not of the temporary one
    beside it.

    Raises:
        CheckpointError: the disk's answer, to all but what is read elsewhere.
    """
    try:
        yield
    except OSError as error:
        refused = (
            temporary if error.filename is None else Path(error.filename)
        )  # a full disk names no file
        if refused not in (temporary, *temporary.parents) and temporary not in refused.parents:
            raise
        raise CheckpointError(
            f"cannot be written: {error.strerror}",
            path=directory,
            cure=f"name another directory by {flags.TO_HF}",
        ) from error


def _newest(path: Path) -> Path:
    """The checkpoint that is meant; damage is not passed over in silence."""
    if os.path.lexists(path / MANIFEST):
        return path
    candidates = find_checkpoints(path)
    if not candidates:
        found, cure = "none" if path.exists() else "no such directory", "name what a run saved to"
        expected = "step_<number>/manifest.json"
        raise CheckpointError("no checkpoint", path=path, expected=expected, found=found, cure=cure)
    if candidates[0].problem is not None:
        raise CheckpointError(
            candidates[0].problem, cure=f"name another step's directory by {flags.LOAD}"
        )
    return candidates[0].path


def _check(manifest: Manifest, weights: Mapping[str, Weight], path: Path) -> None:
    wanted = {f"model/{weight.name}": weight for weight in weights.values()}
    problems = [f"{name} is missing" for name in wanted if name not in manifest.tensors]
    problems += [
        f"{name} is extra"
        for name in manifest.tensors
        if name.startswith("model/") and name not in wanted
    ]
    for name, weight in wanted.items():
        record = manifest.tensors.get(name)
        if record is not None and (record.shape, record.dtype) != (weight.shape, weight.dtype):
            problems.append(
                f"{name} is {DTYPE_NAMES[record.dtype]} {list(record.shape)}, and config.json makes it "
                f"{DTYPE_NAMES[weight.dtype]} {list(weight.shape)}"
            )
    if problems:
        raise CheckpointError(
            "; ".join(problems[:20]), path=path, cure="give the config.json of this model"
        )


def _original_dtypes(
    directory: Path, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.dtype]:
    """Of the files beside config.json; nothing where there are none."""
    if not any(os.path.lexists(directory / name) for name in (SINGLE, INDEX)):
        return {}
    files = ModelFiles(directory)
    files.check(shapes, directory)
    return files.dtypes
