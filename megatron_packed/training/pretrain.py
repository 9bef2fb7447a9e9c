"""From a valid configuration to a trained model, and out with the exit code that says how it went.

Exit codes: 0 done; 1 anything unforeseen, with a traceback; 2 usage; 3 data; 4 no checkpoint can be loaded or written;
20 non-finite step under ``--on-nonfinite stop``, after saving the clean weights; 22 out of GPU memory; 75 stopped by a
signal or a time limit after saving (run again to go on).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from megatron_packed.checkpoint.errors import CheckpointError, NoCheckpointError
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import model_hash, to_dict
from megatron_packed.data.errors import DataError
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import seed_all
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import check_isolation
from megatron_packed.optim.schedule import Schedule
from megatron_packed.training.build import Job, build_job, device_of
from megatron_packed.training.console import Console
from megatron_packed.training.data import RunData, build_data
from megatron_packed.training.report import write_report
from megatron_packed.training.signals import EXIT_PREEMPTED, SignalFlag
from megatron_packed.training.state import RunState, model_refusal
from megatron_packed.training.trainer import EXIT_DONE, EXIT_NONFINITE, Trainer
from megatron_packed.training.writers import JsonlWriter, TensorBoardWriter, Writer

EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_OUT_OF_MEMORY = 22


class _DataProblems(DataError):
    """What is wrong with the data on any rank, raised on all of them."""


def pretrain(config: RunConfig) -> NoReturn:
    """Runs the job of this process and ends the process."""
    with SignalFlag() as signal_flag:
        exit_code = _run(config, signal_flag)
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads and half-dead process groups must not change the exit code or keep the process.
    os._exit(exit_code)


def _run(config: RunConfig, signal_flag: SignalFlag) -> int:
    if config.training.deterministic_mode:
        configure_determinism()
    groups = ParallelGroups.create(config.parallel, device_of(config))
    console = Console(groups.rank, config.training.train_iters, config.logging.log_interval)
    try:
        exit_code = _train(config, groups, console, signal_flag)
    except DataError as error:
        speaks = groups.rank == 0 or not isinstance(error, _DataProblems)
        exit_code = _fail(speaks, f"data error: {error}", EXIT_DATA)
    except CheckpointError as error:
        exit_code = _fail(groups.rank == 0, f"checkpoint error: {error}", EXIT_CHECKPOINT)
    except torch.OutOfMemoryError as error:
        cure = "lower --seq-length or --micro-batch-size, or train a smaller model"
        exit_code = _fail(True, f"rank {groups.rank} is out of GPU memory: {error}; {cure}.", EXIT_OUT_OF_MEMORY)
    except Exception:
        traceback.print_exc()
        exit_code = 1
    _write_status(config, groups, exit_code)
    if exit_code in (EXIT_DONE, EXIT_NONFINITE, EXIT_PREEMPTED):
        # All ranks are here. After an error the others learn of it soonest when this process is gone.
        groups.shutdown()
    return exit_code


def _train(config: RunConfig, groups: ParallelGroups, console: Console, signal_flag: SignalFlag) -> int:
    data = _build_data(config, groups, console)
    seed_all(config.training.seed, groups.dp_rank)
    job = build_job(config, groups, data.vocab_size)
    state = RunState(
        job.model,
        job.optimizer,
        groups,
        plan_hash=data.train.plan.hash,
        data_hash=data.train.dataset.content_hash,
        config=to_dict(config),
        model_hash=model_hash(config.model),
    )
    _restore(config, state, console)
    _describe(config, groups, job, data, console.say)
    if config.training.isolation_self_test:
        _self_test(config, groups, job.model, console)
    writers = _writers(config, groups, state.progress.iteration)
    trainer = Trainer(
        config=config,
        groups=groups,
        step=job.step,
        state=state,
        schedule=Schedule.from_config(config.optim, config.training.train_iters),
        train=data.train,
        valid=data.valid,
        flops=FlopCounter(config.model, data.vocab_size),
        console=console,
        writers=writers,
        signal=signal_flag,
    )
    try:
        exit_code = trainer.run()
    finally:
        data.close()
        for writer in writers:
            writer.close()
    if exit_code == EXIT_DONE and groups.rank == 0 and config.logging.report and config.logging.log_jsonl:
        packing = "\n".join(data.packing.sentences())
        page = write_report(config.logging.log_jsonl, config.logging.report, notes=[("Packing", packing)])
        console.say(f"report: {page}")
    return exit_code


def _build_data(config: RunConfig, groups: ParallelGroups, console: Console) -> RunData:
    """The data of this rank; what is wrong on any rank is raised on all, so that none waits in vain."""
    data, problem = None, ""
    try:
        data = build_data(config, groups, console.say)
    except DataError as error:
        problem = str(error)
    problems = dict.fromkeys(text for text in all_gather_json(problem, groups) if text)
    if data is None or problems:
        raise _DataProblems("; ".join(problems))
    return data


def _restore(config: RunConfig, state: RunState, console: Console) -> None:
    """Resumes from ``--load`` if there is something to resume from."""
    options = config.checkpoint
    if options.load is None:
        return
    try:
        loaded = state.load(options)
    except NoCheckpointError:
        is_own = options.save is not None and Path(options.load).absolute() == Path(options.save).absolute()
        if not is_own or options.finetune or options.ckpt_step is not None:
            raise
        console.say(f"No checkpoint in {options.load} yet: starting from random weights.")
        return
    what = "weights of" if options.finetune else "resuming from"
    console.say(f"{what} {loaded.path} (iteration {loaded.step})")
    refusal = model_refusal(loaded.metadata, config.model)
    if refusal is not None:  # only --finetune comes this far
        console.warn(f"{loaded.path} {refusal}; --finetune takes its weights as they are.")


def _describe(
    config: RunConfig, groups: ParallelGroups, job: Job, data: RunData, say: Callable[[str], None]
) -> None:
    precision = "bf16 with fp32 masters" if config.training.bf16 else "fp32"
    say(
        f"model {config.model.hybrid_layer_pattern}: {job.model.num_parameters:,} parameters, {precision}, "
        f"optimizer kernel {job.optimizer.implementation}"
    )
    say(
        f"{groups.world_size} process(es) on {groups.device.type}; packs of {config.packing.tokens_per_pack:,} tokens, "
        f"{config.packs_per_step()} packs a step; plan {data.train.plan.hash[:12]}"
    )


def _self_test(config: RunConfig, groups: ParallelGroups, model: HybridModel, console: Console) -> None:
    """Refuses to train when a document can see another through the kernels in use."""
    results = check_isolation(config.model, groups.device, model.dtype, model.backends)
    leaks = [str(result) for result in results if not result.passed]
    if leaks:
        raise RuntimeError(
            "documents of a pack can see each other: " + "; ".join(leaks) + ". Choose another backend for this op "
            "(docs/isolation.md), or pass --no-isolation-self-test to train on a leak."
        )
    console.say(f"isolation self-test: {len(results)} checks passed")


def _writers(config: RunConfig, groups: ParallelGroups, iteration: int) -> list[Writer]:
    writers: list[Writer] = []
    if groups.rank == 0 and config.logging.log_jsonl:
        writers.append(JsonlWriter(config.logging.log_jsonl, first_iteration=iteration + 1))
    if groups.rank == 0 and config.logging.tensorboard_dir:
        writers.append(TensorBoardWriter(config.logging.tensorboard_dir))
    return writers


def _fail(speaks: bool, text: str, exit_code: int) -> int:
    """What all ranks know rank 0 alone says."""
    if speaks:
        print(text, file=sys.stderr, flush=True)
    return exit_code


def _write_status(config: RunConfig, groups: ParallelGroups, exit_code: int) -> None:
    """``STATUS.json`` beside the checkpoints: torchrun turns every exit code into 1."""
    if groups.rank != 0 or config.checkpoint.save is None:
        return
    path = Path(config.checkpoint.save) / "STATUS.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"exit_code": exit_code}) + "\n")
        os.replace(part, path)
    except OSError as error:
        print(f"{path} cannot be written: {error}", file=sys.stderr, flush=True)
