"""Loading of a trained model from a checkpoint, in one process, for inference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.run_metadata import tokenizer_warning
from megatron_packed.config.run import RunConfig
from megatron_packed.data.tokenizers.base import Tokenizer, meaning_hash, vocabulary
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.run_model import build_model
from megatron_packed.resume.allowed_changes import CheckpointUse, refusal_of_use
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.held_state import held_state


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
    if config.checkpoint.load is None:
        raise ValueError("--load is not given; name the directory of the checkpoints.")
    model = build_model(config, vocabulary(tokenizer, config.model.vocab_size), device)
    loaded = load_checkpoint(
        config.checkpoint.load,
        [held.shard for held in held_state(model)],
        step=config.checkpoint.ckpt_step,
        allow_extra=("optimizer/", "rng/", "callback/"),
        accept=partial(refusal_of_use, CheckpointUse.INFER, AskedRun(config=config)),
    )
    on_loaded(loaded.path)
    # Not an error: other files of the same tokenizer may write some tokens in another way.
    warning = tokenizer_warning(loaded.path, loaded.metadata, meaning_hash(tokenizer))
    if warning is not None:
        warn(warning)
    return model.eval()
