"""Adapters as PEFT's folders, back, and merged with their base.

A checkpoint of adapters names its base by a hash. Weights of another base are refused before they
are used.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_packed.checkpoint.directory import RUN_LOCK, RootLock
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import Step
from megatron_packed.checkpoint.original_facts import GENERATION_CONFIG
from megatron_packed.checkpoint.run_metadata import (
    ADAPTERS,
    ORIGINAL,
    BaseWeights,
    metadata_problem,
)
from megatron_packed.checkpoint.save import SavedCheckpoint, save_checkpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.cli.export_trained import (
    kept_facts,
    moved_tokenizer,
    special_ids,
    tokenizer_files,
)
from megatron_packed.cli.export_tuned import chat_files
from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import model_hash, section_to_dict
from megatron_packed.inputs.open_documents import build_tokenizer
from megatron_packed.layers.lora import is_adapter
from megatron_packed.models.convert.adapters.matrices import trained_rows
from megatron_packed.models.convert.adapters.merged_weights import MODEL, MergedWeights
from megatron_packed.models.convert.adapters.peft_folder import (
    PEFT,
    Adapters,
    collected,
    read_adapters,
    refused_by_peft,
    write_adapters,
)
from megatron_packed.models.convert.export_huggingface import BESIDE, check_new
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.huggingface_config import model_of, read_config
from megatron_packed.models.convert.import_huggingface import CONFIG, check_empty
from megatron_packed.models.convert.model_weights import model_on_meta
from megatron_packed.models.convert.stored_weights import StoredWeights
from megatron_packed.models.convert.trained_config import (
    TrainedOptions,
    family_for,
    generation_fields,
    json_text,
)
from megatron_packed.resume.adapters import base_refusal, found_base, refusal_as_base
from megatron_packed.training.trained_model import stored_run

_WAYS = "load them in vLLM (--adapter-for vllm), or merge them with the base (--merge)"


class WrittenAdapters(NamedTuple):
    """Folder of adapters."""

    sentences: tuple[str, ...]
    """Facts about what is in the folder, and who can load it."""
    warning: str | None


def export_adapters(
    checkpoint: Path,
    directory: Path,
    *,
    config: Path | None = None,
    base_name: str | None = None,
    step: Step = None,
    program: str = PEFT,
    tokenizer: str | None = None,
    keep_base_template: bool = False,
    ignored: Collection[str] = (),
) -> WrittenAdapters:
    """Write the adapters of a checkpoint as a folder that PEFT or vLLM loads.

    Args:
        config: config.json of the base; its tokenizer and template go along. None takes the first
            family that can hold the model.
        base_name: name or path of the base for ``base_model_name_or_path``.
        step: step of the checkpoint; None takes the newest.
        program: ``peft`` or ``vllm``.
        tokenizer: present path of the tokenizer, if it was moved after the training.
        keep_base_template: keep the chat template of the base.
    Raises:
        CheckpointError: the checkpoint has no adapters, or the base's family does not fit.
    """
    check_new(directory)
    source, model = _adapters(checkpoint, step)
    family = _family(model, config, ignored)
    stored = {name.removeprefix(MODEL): source.read(name) for name in _trained(source, model)}
    adapters = collected(model, family, stored)
    files: dict[str, str | Path | None] = {}
    sentences: tuple[str, ...] = ()
    warning = None
    if config is not None:
        files = {name: config.parent / name for name in BESIDE if _is_there(config.parent / name)}
        chat = chat_files(
            source.manifest.metadata, source.path, config, tokenizer, keep_base_template
        )
        files |= chat.replaced
        sentences, warning = chat.sentences, chat.warning
    elif "data" in source.manifest.metadata["config"]:
        files, sentences = _trained_files(source, tokenizer)
    files.pop(CONFIG, None)  # the folder has the adapters of a model, and is none
    write_adapters(directory, adapters, program=program, base_model=base_name, files=files)
    return WrittenAdapters((*_facts(adapters, program), *sentences), warning)


def _trained_files(
    source: StoredWeights, tokenizer: str | None
) -> tuple[dict[str, str | Path | None], tuple[str, ...]]:
    """Return the files of the training's tokenizer, with the ends of its answers, and a sentence."""
    run = stored_run(source.manifest.metadata["config"], source.path, None, "cpu")
    data = run.data if tokenizer is None else moved_tokenizer(run.data, tokenizer)
    with closing(build_tokenizer(data, run.model.vocab_size, build_missing=False)) as used:
        files, missing = tokenizer_files(data, used)
        ids = special_ids(run, used)
        original = kept_facts(run, source.manifest.metadata, used)
    options = TrainedOptions(
        model=run.model, bf16=True, max_positions=None, ids=ids, original=original
    )
    generation = json_text(generation_fields(options))
    return {**files, GENERATION_CONFIG: generation}, (missing,) if missing else ()


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _facts(adapters: Adapters, program: str) -> Iterator[str]:
    """Yield sentences about what programs do with the adapters."""
    refused = refused_by_peft(adapters) if program == PEFT else []
    if refused:
        yield (
            f"PEFT loads no adapters of {len(refused)} matrices, such as {refused[0]}, and refuses the "
            f"folder: {_WAYS}."
        )
    if adapters.config.lora_dropout and any(
        weight.stacked and weight.matrices[0].path in adapters.split for weight in adapters.weights
    ):
        yield "lora_dropout is 0, since PEFT has no dropout for routed experts (target_parameters)."
    if adapters.config.lora_keep_balancing and adapters.config.moe_router_enable_expert_bias:
        yield f"Not written: expert biases, which the training changed. A merge has them ({flags.MERGE})."
    if adapters.left_out:
        yield (
            f"Not written, because transformers has no modules for multi-token prediction: "
            f"{len(adapters.left_out)} trained weights, such as {adapters.left_out[0]}."
        )


def _trained(source: StoredWeights, model: ModelConfig) -> list[str]:
    """Return the names of adapters and of parameters that are trained whole."""
    return [
        name
        for name in source.manifest.tensors
        if name.startswith(MODEL)
        and (
            is_adapter(name)
            or any(
                fnmatchcase(name.removeprefix(MODEL), pattern)
                for pattern in model.lora_modules_to_save
            )
        )
    ]


def _adapters(checkpoint: Path, step: Step) -> tuple[StoredWeights, ModelConfig]:
    """Return a checkpoint of adapters, and its model with the options of adapters."""
    source = StoredWeights.newest(checkpoint, step)
    metadata = source.manifest.metadata
    problem = metadata_problem(metadata)
    if problem is None and ADAPTERS not in metadata:
        problem = f"holds whole weights, which {flags.TO_HF} exports"
    if problem is not None:
        raise CheckpointError(problem, path=source.path)
    return source, stored_run(metadata["config"], source.path, None, "cpu").model


def _family(model: ModelConfig, config: Path | None, ignored: Collection[str]) -> Family:
    if config is None:
        return family_for(replace(model, lora_rank=None))[0]
    return model_of(read_config(config), config, ignored, depths=model.mtp_depths)[0]


def merged_weights(
    checkpoint: Path, *, base: Path | None = None, step: Step = None
) -> MergedWeights:
    """Return the sum of a checkpoint's adapters and their base.

    Args:
        base: checkpoint of the base; None takes it where the adapters found it.
    Raises:
        CheckpointError: there are no adapters, or the base is not theirs.
    """
    adapters, model = _adapters(checkpoint, step)
    stored = BaseWeights(**adapters.manifest.metadata[ADAPTERS])
    if base is None and stored.path is None:
        raise CheckpointError(
            f"holds adapters of {stored.name}, of which there is no checkpoint",
            path=adapters.path,
            cure=f"give {flags.PRETRAINED_CHECKPOINT} with a checkpoint of these weights",
        )
    weights, found = _base(base or Path(str(stored.path)))
    problem = base_refusal(adapters.manifest.metadata, found)
    if problem is not None:
        raise CheckpointError(problem, path=adapters.path)
    return MergedWeights(weights, adapters, trained_rows(model), model.lora_scale)


def _base(checkpoint: Path) -> tuple[StoredWeights, BaseWeights]:
    """Return a checkpoint of whole weights, and their identity, which reads all of them."""
    weights = StoredWeights.newest(checkpoint)
    metadata = weights.manifest.metadata
    problem = metadata_problem(metadata) or refusal_as_base(metadata)
    if problem is not None:
        raise CheckpointError(problem, path=weights.path)
    names = [name for name in weights.manifest.tensors if name.startswith(MODEL)]
    shards = (TensorShard.whole(name, weights.read(name)) for name in names)
    seed = metadata["config"]["training"].get("seed", 0)
    return weights, found_base(weights.path, shards, seed=seed)


def save_merged(weights: MergedWeights, root: Path) -> SavedCheckpoint:
    """Write merged weights as a checkpoint that serves ``--pretrained-checkpoint``."""
    manifest = weights.manifest
    config = {k: v for k, v in manifest.metadata["config"].items() if k != "packing"}
    kept = {
        key: manifest.metadata[key]
        for key in (ORIGINAL, "tokenizer_hash")
        if key in manifest.metadata
    }
    shapes = {name: (record.shape, record.dtype) for name, record in manifest.tensors.items()}
    model = stored_run(config, weights.path, None, "cpu").model
    return _save(root, model, shapes, weights.read, config, kept)


def import_adapters(
    directory: Path,
    base: Path,
    root: Path,
    *,
    config: Path | None = None,
    step: Step = None,
    ignored: Collection[str] = (),
) -> tuple[SavedCheckpoint, ModelConfig, list[str]]:
    """Write a checkpoint of the adapters in a folder of PEFT, for ``--load-adapter``.

    Returns the checkpoint, the model with adapters, and the tensors that were rounded to the data type
    of the base.

    Args:
        base: checkpoint of the base that the adapters belong to.
        config: config.json of the base; None takes the first family that can hold the model.
    Raises:
        CheckpointError: the folder or the base cannot be read, or they do not fit each other.
    """
    check_empty(root)
    weights = StoredWeights.newest(base, step)
    metadata = weights.manifest.metadata
    problem = metadata_problem(metadata) or refusal_as_base(metadata)
    if problem is not None:
        raise CheckpointError(problem, path=weights.path)
    plain = stored_run(metadata["config"], weights.path, None, "cpu").model
    model, tensors = read_adapters(directory, plain, _family(plain, config, ignored))
    _, identity = _base(weights.path)
    bf16 = bool(metadata["config"]["training"]["bf16"])
    dtype = torch.bfloat16 if bf16 else torch.float32
    records = weights.manifest.tensors
    values = {
        MODEL + name: value.to(dtype if is_adapter(name) else records[MODEL + name].dtype)
        for name, value in tensors.items()
    }
    rounded = [
        name
        for name, value in tensors.items()
        if not torch.equal(values[MODEL + name].to(value), value)
    ]
    for name in _buffers(model):
        values[MODEL + name] = weights.read(MODEL + name)
    stored = {"model": section_to_dict(model), "training": {"bf16": bf16}}
    kept = {key: metadata[key] for key in (ORIGINAL, "tokenizer_hash") if key in metadata}
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
    metadata = {**kept, ADAPTERS: identity._asdict()}
    return _save(root, model, shapes, values.__getitem__, stored, metadata), model, rounded


def _buffers(model: ModelConfig) -> list[str]:
    meta = model_on_meta(replace(model, lora_rank=None), torch.float32)
    persistent = meta.state_dict().keys() - dict(meta.named_parameters()).keys()
    return sorted(name for name, _ in meta.named_buffers() if name in persistent)


def _save(
    root: Path,
    model: ModelConfig,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Any,
    config: Mapping[str, Any],
    more: Mapping[str, Any],
) -> SavedCheckpoint:
    shards = [
        TensorShard.whole(name, torch.empty(shape, dtype=dtype, device="meta"))
        for name, (shape, dtype) in shapes.items()
    ]
    # There is no run yet, so data positions, random states and hashes are empty.
    metadata = {"progress": {}, "plan_hash": "", "data_hash": "", "layout": {}, "rng": []}
    root.mkdir(parents=True, exist_ok=True)
    with closing(RootLock(root, RUN_LOCK)):
        check_empty(root)
        return save_checkpoint(
            root,
            0,
            shards,
            {**metadata, "config": dict(config), **more},
            run_id=uuid.uuid4().hex[:12],
            config_hash=model_hash(model),
            values=lambda shard: read(shard.name).view(-1),
        )
