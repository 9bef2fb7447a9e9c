"""Export of a checkpoint as a Hugging Face model, with config.json and tokenizer files.

`to_huggingface` writes a model back in the form of the original that it was converted from.
`trained_to_huggingface` writes a model that was trained from scratch, with a new config.json.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import Manifest
from megatron_packed.checkpoint.original_facts import GENERATION_CONFIG
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES
from megatron_packed.config import flag_names as flags
from megatron_packed.config.layer_pattern import DEPTH
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import (
    model_differences,
)
from megatron_packed.config.stored_config import stored_problem
from megatron_packed.data.tokenizers.huggingface_settings import (
    ADDED_TOKENS,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TEMPLATE_FOLDER,
)
from megatron_packed.data.tokenizers.huggingface_settings import CONFIG as SETTINGS
from megatron_packed.files.regular_files import open_regular
from megatron_packed.files.written_files import sync_path
from megatron_packed.models.convert.exported_tensors import ExportedTensors
from megatron_packed.models.convert.families.family import MTP, OUTPUT, TABLE, Family, Fields
from megatron_packed.models.convert.huggingface_config import model_of, read_config
from megatron_packed.models.convert.huggingface_files import (
    INDEX,
    SINGLE,
    open_weights,
    write_files,
)
from megatron_packed.models.convert.import_huggingface import CONFIG, TOKENIZER, OnProgress, silent
from megatron_packed.models.convert.model_weights import weights_of
from megatron_packed.models.convert.stored_weights import WeightSource, weights_in
from megatron_packed.models.convert.trained_config import (
    TrainedOptions,
    config_fields,
    family_for,
    generation_fields,
    json_text,
    zero_parameters,
)
from megatron_packed.models.convert.weight_rows import Weight

TOKENIZER_FILES = (
    TOKENIZER,
    SETTINGS,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
BESIDE = (
    *TOKENIZER_FILES,
    TEMPLATE,
    PROCESSOR_TEMPLATE,
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    GENERATION_CONFIG,
)
"""Files that are copied to an export if they are next to config.json; code is not among them."""
MAX_FILE_BYTES = 5_000_000_000
"""Limit for the tensors of one file, as in transformers."""


class Converted(NamedTuple):
    """Names of Hugging Face tensors of an export that differ from the original."""

    rounded: tuple[str, ...]
    """Tensors whose values were rounded to the original dtype."""
    copied: tuple[str, ...]
    """Tensors outside the text model that were copied from the original."""
    dropped: tuple[str, ...]
    """Tensors outside the text model that the export lacks. If the original is not there, these are
    patterns such as ``mtp.*``.
    """


def to_huggingface(
    checkpoint: Path | WeightSource,
    directory: Path,
    config: Path,
    *,
    base: Path | None = None,
    ignored: Collection[str] = (),
    replaced: Mapping[str, str | Path | None] = {},
    max_file_bytes: int = MAX_FILE_BYTES,
    on_progress: OnProgress = silent,
) -> Converted:
    """Write the weights of a checkpoint as a model of the family that config.json names.

    Copies config.json and the tokenizer's files. ``directory`` appears only after all files are
    written. If the original safetensors files are next to config.json, tensors get the original
    names and dtypes; otherwise they get the family's names and the dtypes of the checkpoint. Host
    memory: twice the largest tensor of the checkpoint.

    Args:
        checkpoint: one checkpoint, or a directory of checkpoints, of which the newest is exported;
            or other weights.
        config: the config.json of the model that the checkpoint was made from.
        base: directory of the original. Its tensors that are not part of the text model are copied.
        replaced: names of files beside the weights that differ from the original, and the text of
            each or the file to copy; None leaves the file out.
    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model, or ``directory`` is
            not empty or cannot be written. ``directory`` is unchanged.
    """
    check_new(directory)
    fields = read_config(config)
    model_of(fields, config, ignored)
    source = weights_in(checkpoint)
    manifest = source.manifest
    family, model = model_of(fields, config, ignored, depths=_depths(manifest))
    bf16 = _check_configuration(manifest, model, source.path)
    dtype = torch.bfloat16 if bf16 else torch.float32
    originals, files = base or config.parent, None
    if base is not None or any(os.path.lexists(originals / name) for name in (SINGLE, INDEX)):
        files, weights = open_weights(originals, family, model, dtype)
    else:
        weights = weights_of(family, model, dtype)
    _check(manifest, weights, source.path)
    exported = ExportedTensors(
        source,
        weights,
        on_progress,
        files.dtypes if files else {},
        files.copies if files else {},
        original=files if base else None,
    )
    with new_directory(directory, flags.TO_HF) as temporary:
        write_files(temporary, exported.listed(), exported.value, max_file_bytes)
        present = [name for name in BESIDE if os.path.lexists(config.parent / name)]
        beside = {name: config.parent / name for name in present}
        write_texts(temporary, {CONFIG: config, **beside, **replaced})
        if TEMPLATE not in replaced:
            paths = (config.parent / TEMPLATE_FOLDER).glob("*.jinja")
            write_texts(temporary, {f"{TEMPLATE_FOLDER}/{path.name}": path for path in paths})
    aside = tuple(files.aside) if files else tuple(_patterns_aside(family, model, fields))
    copied, dropped = (aside, ()) if base else ((), aside)
    return Converted(tuple(exported.rounded), copied, dropped)


def _depths(manifest: Manifest) -> int:
    """Return the depths of multi-token prediction of a checkpoint; 0 if they are unknown."""
    stored: object = manifest.metadata
    for key in ("config", "model", "hybrid_layer_pattern"):
        stored = stored.get(key) if isinstance(stored, Mapping) else None
    return stored.count(DEPTH) if isinstance(stored, str) else 0


def _patterns_aside(family: Family, model: ModelConfig, fields: Fields) -> Iterator[str]:
    """Yield patterns of the tensors that the files of the original may have beside the model."""
    for prefix in family.aside(model):
        if prefix != MTP or fields.get("num_nextn_predict_layers") != 0:
            yield f"{prefix}*"


def trained_to_huggingface(
    checkpoint: Path | WeightSource,
    directory: Path,
    trained: TrainedOptions,
    *,
    family: str | None = None,
    tokenizer_files: Mapping[str, str | Path] = {},
    max_file_bytes: int = MAX_FILE_BYTES,
    on_progress: OnProgress = silent,
) -> Family:
    """Write a model that was trained from scratch as a model of a Hugging Face family.

    Writes config.json and generation_config.json from the model's options, and the weights in the
    dtypes of the checkpoint. ``directory`` appears only after all files are written.

    Args:
        checkpoint: one checkpoint, or a directory of checkpoints, of which the newest is exported;
            or other weights.
        family: name of the family; None takes the first family that can hold the model.
        tokenizer_files: names of further files, and the text of each or the file to copy.
    Returns:
        The family of the exported model.
    Raises:
        CheckpointError: no family can hold the model, the checkpoint is damaged, or ``directory``
            is not empty or cannot be written. ``directory`` is unchanged.
    """
    check_new(directory)
    chosen, model = family_for(trained.model, family)
    source = weights_in(checkpoint)
    weights = weights_of(chosen, model, torch.bfloat16 if trained.bf16 else torch.float32)
    endings = zero_parameters(trained.model, model)
    zeros = [name for name in weights if name.endswith(endings)] if endings else []
    _check(
        source.manifest,
        {name: w for name, w in weights.items() if name not in zeros},
        source.path,
    )
    tied = not model.untie_embeddings_and_output_weights
    copies = {chosen.outside[TABLE]: chosen.outside[OUTPUT]} if tied and chosen.unties else {}
    exported = ExportedTensors(source, weights, on_progress, copies=copies, zeros=zeros)
    texts: dict[str, str | Path] = {
        CONFIG: json_text(config_fields(chosen, model, trained)),
        GENERATION_CONFIG: json_text(generation_fields(trained)),
        **tokenizer_files,
    }
    with new_directory(directory, flags.TO_HF) as temporary:
        write_files(temporary, exported.listed(), exported.value, max_file_bytes)
        write_texts(temporary, texts)
    return chosen


def write_texts(directory: Path, files: Mapping[str, str | Path | None]) -> None:
    """Write texts and copies of files into ``directory``; None stands for no file."""
    for name, content in files.items():
        if content is None:
            continue
        (directory / name).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            with open_regular(content) as source, open(directory / name, "xb") as copy:
                shutil.copyfileobj(source, copy)
        else:
            (directory / name).write_text(content, encoding="utf-8")


def check_new(directory: Path) -> None:
    """Refuse an existing ``directory`` unless it is an empty, real directory.

    At the end the temporary directory is renamed to it, which only an empty directory permits.
    """
    if not os.path.lexists(directory):
        return
    cure = f"name a new directory by {flags.TO_HF}"
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError("is not a directory", path=directory, cure=cure)
    if any(directory.iterdir()):
        raise CheckpointError("is not empty", path=directory, cure=cure)


def _check_configuration(manifest: Manifest, model: ModelConfig, source: Path) -> bool:
    """Refuse a checkpoint of another model; return whether its run trained in bf16."""
    stored = manifest.metadata.get("config", {})
    problem = stored_problem(stored)
    if problem is not None:
        raise CheckpointError(
            f"its configuration{problem}", path=source, cure="use a checkpoint that a run saved"
        )
    different = model_differences(stored["model"], model)
    if different:
        differences = "; ".join(
            f"{p.option} is {p.value} in config.json, but {p.rule}" for p in different
        )
        raise CheckpointError(
            f"belongs to another model: {differences}",
            path=source,
            cure="give the config.json of its model",
        )
    return bool(stored["training"]["bf16"])


@contextmanager
def new_directory(directory: Path, flag: str) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to ``directory`` after all files are written.

    Users do not know it, so errors of writing are reported for ``directory``.

    Args:
        flag: flag by which the user names the directory.
    Raises:
        CheckpointError: the disk refused to write. Errors of reading other files pass unchanged.
    """
    temporary = directory.with_name(f"{directory.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_path(temporary)
        os.rename(temporary, directory)
    except OSError as error:
        # An error of a full disk names no file.
        refused = temporary if error.filename is None else Path(error.filename)
        if refused not in (temporary, *temporary.parents) and temporary not in refused.parents:
            raise
        raise CheckpointError(
            f"cannot be written: {error.strerror}",
            path=directory,
            cure=f"name another directory by {flag}",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_path(directory.parent)


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
                f"{name} is {DTYPE_NAMES[record.dtype]} {list(record.shape)}, but config.json implies "
                f"{DTYPE_NAMES[weight.dtype]} {list(weight.shape)}"
            )
    if problems:
        raise CheckpointError(
            "; ".join(problems[:20]), path=path, cure="give the config.json of this model"
        )
