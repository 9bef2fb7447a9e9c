"""Optimizer state of an exported checkpoint, as megatron-core's distributed optimizer saves it.

The layout is ``fully_reshardable``, which Megatron loads in any parallel layout. It has a tensor of
each of `KINDS` for each parameter, named as in ``optimizer_state.py``. Groups of parameters have
Adam's constants and its number of steps. Megatron finds the group of a parameter by the group's
values, of which the learning rates must be those of its command line.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import Manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.checkpoint.run_metadata import RunProgress, metadata_problem
from megatron_packed.config.resumed_options import with_implied
from megatron_packed.config.run import RunConfig, unchecked_stored
from megatron_packed.models.convert.megatron.optimizer_state import FIRST, MASTER, SECOND
from megatron_packed.optim.schedules import Schedule, WeightDecaySchedule

KINDS = {FIRST: FIRST, SECOND: SECOND, MASTER: "param"}
"""Kinds of state in a checkpoint of this project, and their names in the layout."""
_SHARDING = "fully_reshardable"
_STEP = "optimizer/step"
_ALONE = "only the weights are written, and training begins with new moments"


@dataclass(frozen=True, kw_only=True)
class ExportedState:
    """Plain values that Megatron needs to continue a run."""

    iteration: int
    common: dict[str, Any]
    """Entries of the common state beside ``args``: optimizer, schedule and layout."""
    arguments: dict[str, Any]
    """Entries of ``args``: counters, and lengths of the schedule that are nowhere else."""
    lr: float
    min_lr: float


def exported_state(
    path: Path, manifest: Manifest, trained: Collection[str], expert_parallel: int | None
) -> ExportedState | str:
    """Return the state of the optimizer, or the reason why there is none; empty if none was saved.

    Args:
        path: the checkpoint.
        trained: names of the parameters, without buffers.
        expert_parallel: size of Megatron's expert parallelism, with which its number of optimizers
            depends; None for that of the checkpoint's run.
    Raises:
        CheckpointError: the metadata of the checkpoint are damaged.
    """
    metadata = manifest.metadata
    problem = metadata_problem(metadata)
    if problem is not None:
        raise CheckpointError(problem, path=path)
    iteration = metadata["progress"].get("iteration", 0)
    if not iteration or _STEP not in manifest.tensors:
        return ""
    without = [name for name in trained if f"optimizer/{FIRST}/{name}" not in manifest.tensors]
    if without:
        return f"{without[0]} has no moments, because it was frozen: {_ALONE}."
    stored = with_implied(metadata["config"])
    of_run = "packing" in stored
    if not of_run:
        # An imported checkpoint has no packs; all lengths of its schedule are in samples.
        length = stored.get("optim", {}).get("lr_decay_samples")
        stored["packing"] = {"global_batch_size": 1, "micro_batch_size": 1}
        stored["training"] = {**stored["training"], "train_samples": length}
    config = unchecked_stored(stored)
    if config.training.train_iters is None and config.training.train_samples is None:
        return f"The checkpoint has no length of the learning-rate schedule: {_ALONE}."
    if expert_parallel is None:
        expert_parallel = config.parallel.expert_model_parallel_size
    # Older checkpoints do not count packs.
    packs = iteration * config.packs_per_step() if of_run else 0
    progress = RunProgress(**{"consumed_packs": packs, **metadata["progress"]})
    steps = int(read_tensor(path, _STEP, manifest).item())
    state = _state(config, progress, steps, expert_parallel)
    if of_run:
        packing = config.packing
        state.arguments["global_batch_size"] = packing.global_batch_size
        state.arguments["seq_length"] = packing.seq_length
    return state


def _state(
    config: RunConfig, progress: RunProgress, steps: int, expert_parallel: int
) -> ExportedState:
    optim, packing = config.optim, config.packing
    batch, samples = packing.global_batch_size, progress.samples(packing.micro_batch_size)
    ahead = samples - progress.iteration * batch
    rate, decay = (
        Schedule.from_config(config, ahead),
        WeightDecaySchedule.from_config(config, ahead),
    )
    wsd = config.wsd_decay_iters
    constants = {
        "lr": rate.at(progress.iteration),
        "max_lr": rate.lr,
        "min_lr": rate.min_lr,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_eps,
        "bias_correction": True,
        "step": steps,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
    }

    def optimizer(is_expert_parallel: bool) -> dict[str, Any]:
        groups = [
            {
                **constants,
                "wd_mult": mult,
                "weight_decay": mult * decay.at(progress.iteration),
                "is_expert_parallel": is_expert_parallel,
            }
            for mult in (1.0, 0.0)
        ]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": _SHARDING}

    # With expert parallelism, Megatron has an optimizer of its own for experts.
    has_two = expert_parallel > 1 and config.model.num_experts is not None
    common = {
        "optimizer": {0: optimizer(False), 1: optimizer(True)} if has_two else optimizer(False),
        "opt_param_scheduler": {
            "max_lr": rate.lr,
            "min_lr": rate.min_lr,
            "lr_warmup_steps": _samples(rate.warmup_steps, batch),
            "lr_decay_steps": _samples(rate.decay_steps, batch),
            "lr_decay_style": rate.decay_style,
            "num_steps": _samples(progress.iteration + rate.ahead, batch),
            "start_wd": decay.start,
            "end_wd": decay.end,
            "wd_incr_style": decay.incr_style,
            "wd_incr_steps": _samples(decay.incr_steps, batch),
        },
        "content_metadata": {
            "distrib_optim_sharding_type": _SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    arguments = {
        "consumed_train_samples": samples,
        "expert_model_parallel_size": expert_parallel,
        "no_save_rng": True,
        "lr_warmup_init": rate.warmup_init,
        "lr_wsd_decay_samples": None if wsd is None else _samples(wsd, batch),
        "lr_wsd_decay_style": rate.wsd_decay_style,
        "clip_grad": optim.clip_grad,
    }
    return ExportedState(
        iteration=progress.iteration,
        common=common,
        arguments=arguments,
        lr=rate.lr,
        min_lr=rate.min_lr,
    )


def _samples(iterations: float, batch: int) -> int | float:
    """Return a length in samples; lengths from fractions may be no whole number, as in Megatron."""
    length = iterations * batch
    return int(length) if length == int(length) else length
