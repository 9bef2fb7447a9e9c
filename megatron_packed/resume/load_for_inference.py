"""Loading of a trained model from a checkpoint, in one process, for inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_packed.checkpoint.load import Step, load_checkpoint
from megatron_packed.checkpoint.load_attempt import LoadedCheckpoint
from megatron_packed.checkpoint.run_metadata import BaseWeights, Metadata, tokenizer_warning
from megatron_packed.config.run import RunConfig
from megatron_packed.data.tokenizers.base import Tokenizer, meaning_hash, vocabulary
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.run_model import build_model
from megatron_packed.resume.adapters import (
    base_folder,
    base_refusal,
    found_base,
    no_adapters,
    refusal_as_base,
    stored_base,
)
from megatron_packed.resume.allowed_changes import CheckpointUse, refusal_of_use
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.held_state import HeldPart, held_state


def load_model(
    config: RunConfig,
    tokenizer: Tokenizer,
    device: torch.device | str = "cpu",
    *,
    warn: Callable[[str], None],
    on_loaded: Callable[[Path], None] = lambda path: None,
) -> HybridModel:
    """Load the newest valid checkpoint of ``--load`` into a new model, and return it in eval mode.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the texts.
        device: device of the model.
        warn: receives a sentence if the model was trained with another tokenizer.
        on_loaded: receives the path of the loaded checkpoint.
    Raises:
        ValueError: ``--load`` is not given.
        CheckpointError: there is no checkpoint of this model.
    """
    folder, step = config.checkpoint.answers_with
    if folder is None:
        raise ValueError("--load is not given; name the directory of the checkpoints.")
    stored = stored_base(folder, step)
    if stored is None and config.checkpoint.load_adapter is not None:
        raise no_adapters(folder)
    if stored is not None:  # random weights are those of the training
        config = replace(config, training=replace(config.training, seed=stored.seed))
    model = build_model(config, vocabulary(tokenizer, config.model.vocab_size), device)
    if stored is None:
        loaded = _read(folder, step, model, HeldPart.WHOLE, _accept(config))
    else:
        loaded = _load_adapters(folder, step, model, config, stored)
    on_loaded(loaded.path)
    # Not an error: other files of the same tokenizer may write some tokens in another way.
    warning = tokenizer_warning(loaded.path, loaded.metadata, meaning_hash(tokenizer))
    if warning is not None:
        warn(warning)
    return model.eval()


def _load_adapters(
    folder: str, step: Step, model: HybridModel, config: RunConfig, stored: BaseWeights
) -> LoadedCheckpoint:
    """Load adapters with the base that ``--load``, ``--pretrained-checkpoint`` or they name."""
    options = config.checkpoint
    given, step_of_base = options.pretrained_checkpoint, None
    if options.load_adapter is not None and options.load is not None:
        given, step_of_base = options.load, options.ckpt_step
    where, path = base_folder(folder, stored, given), None
    if where is not None:
        path = _read(where, step_of_base, model, HeldPart.BASE, refusal_as_base).path
    shards = [held.shard for held in held_state(model, part=HeldPart.BASE)]
    base = found_base(path, shards, seed=stored.seed)
    accepts = _accept(config)

    def refused(metadata: Metadata) -> str | None:
        return accepts(metadata) or base_refusal(metadata, base)

    return _read(folder, step, model, HeldPart.ADAPTERS, refused)


def _accept(config: RunConfig) -> Callable[[Metadata], str | None]:
    return partial(refusal_of_use, CheckpointUse.INFER, AskedRun(config=config))


def _read(
    folder: str,
    step: Step,
    model: HybridModel,
    part: HeldPart,
    accept: Callable[[Metadata], str | None],
) -> LoadedCheckpoint:
    return load_checkpoint(
        folder,
        [held.shard for held in held_state(model, part=part)],
        step=step,
        allow_extra=("optimizer/", "rng/", "callback/"),
        accept=accept,
    )
