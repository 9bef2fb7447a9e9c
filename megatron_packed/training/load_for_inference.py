"""Loading of a trained model from a checkpoint, in one process, for inference."""

from __future__ import annotations

import torch

from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.config.run import RunConfig
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.training.build_job import build_model
from megatron_packed.training.checkpoint_metadata import metadata_problem
from megatron_packed.training.checkpoint_refusals import model_refusal, precision_refusal
from megatron_packed.training.run_state import held_state


def load_model(
    config: RunConfig, vocab_size: int, device: torch.device | str = "cpu"
) -> HybridModel:
    """Load the newest valid checkpoint of ``--load`` into a new model, and return it in eval mode.

    Raises:
        ValueError: ``--load`` is not given.
        CheckpointError: there is no checkpoint of this model.
    """
    if config.checkpoint.load is None:
        raise ValueError("--load is not given; name the directory of the checkpoints.")
    model = build_model(config, vocab_size, device)
    load_checkpoint(
        config.checkpoint.load,
        [held.shard for held in held_state(model)],
        step=config.checkpoint.ckpt_step,
        allow_extra=("optimizer/", "rng/"),
        accept=lambda metadata: (
            metadata_problem(metadata)
            or precision_refusal(metadata, model.dtype)
            or model_refusal(metadata, config.model)
        ),
    )
    return model.eval()
