"""Checkpoints of adapters from any parallel layout into any other, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import Job, build_job
from support.layouts import VOCAB, Way
from support.optimizer_states import everything_computed, low_state, update
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, assert_same_bits

ONE = Way()
ZERO1 = Way(2, distributed_optimizer=True)
TP2 = Way(2, tp_size=2, sequence_parallel=True)
EP2 = Way(2, ep_size=2, distributed_optimizer=True)


def config_of(way: Way, *, adapters: bool = True) -> RunConfig:
    config = low_state(way)
    if not adapters:
        return config
    model = dataclasses.replace(config.model, lora_rank=2, lora_modules_to_save=("final_norm.*",))
    return dataclasses.replace(config, model=model)


def made(groups: ParallelGroups, way: Way, *, adapters: bool = True) -> tuple[Job, RunState]:
    config = config_of(way, adapters=adapters)
    job = build_job(config, groups, VOCAB)
    return job, RunState(job.model, job.optimizer, groups, AskedRun(config=config))


def base_saved(groups: ParallelGroups, way: Way, folder: str) -> None:
    job, state = made(groups, way, adapters=False)
    update(job, range(50, 51))
    state.save(CheckpointConfig(save=f"{folder}/base"))


def updated(groups: ParallelGroups, way: Way, folder: str, steps: int, save: str = "") -> Shards:
    """Start adapters of the base, and update them; return the state of this rank."""
    job, state = made(groups, way)
    state.load(CheckpointConfig(load=f"{folder}/base", finetune=True))
    update(job, range(steps))
    if save:
        state.save(CheckpointConfig(save=save))
    return everything_computed(job)


def continued(groups: ParallelGroups, way: Way, load: str, steps: range) -> Shards:
    """Load adapters and their base into a job with another state, and update further."""
    job, state = made(groups, way)
    update(job, range(60, 61))
    state.load(CheckpointConfig(load=load))
    update(job, steps)
    return everything_computed(job)


@pytest.fixture(scope="module")
def base(pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base that two tensor-parallel ranks saved."""
    folder = tmp_path_factory.mktemp("base")
    pools.run(base_saved, 2, TP2, str(folder), layout=TP2.layout)
    return folder


@pytest.fixture(scope="module")
def expected(pools: WorkerPools, base: Path) -> dict[str, Tensor]:
    return assembled(pools.run(updated, 1, ONE, str(base), 4))


@pytest.mark.parametrize(
    ("before", "after"), [(TP2, ONE), (ZERO1, TP2), (ONE, ZERO1), (EP2, ZERO1)], ids=str
)
def test_adapters_go_on_in_another_layout_with_the_same_bits(
    before: Way,
    after: Way,
    base: Path,
    expected: dict[str, Tensor],
    pools: WorkerPools,
    tmp_path: Path,
) -> None:
    """Weights, masters and moments of adapters, whose base has the same hash in every layout."""
    run = (updated, before.world_size, before, str(base), 2, str(tmp_path))
    pools.run(*run, layout=before.layout)
    load = (continued, after.world_size, after, str(tmp_path), range(2, 4))
    found = assembled(pools.run(*load, layout=after.layout))
    assert_same_bits(found, expected)
    dtypes = {found[name].dtype for name in found if "exp_avg/" in name}
    assert dtypes == {torch.bfloat16}
