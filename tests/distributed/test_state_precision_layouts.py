"""Optimizer state of lower precision in several parallel layouts: the same gradients give the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.replica_checks import ReplicaCheck, ReplicaMismatchError
from support.layouts import VOCAB, Way, config_of, mine, step_values
from support.optimizer_states import everything_computed, low_state, update
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, assert_same_bits

ONE = Way()
WAYS = [
    Way(2),
    Way(2, distributed_optimizer=True),
    Way(2, tp_size=2, sequence_parallel=True),
    Way(2, ep_size=2, distributed_optimizer=True),
    Way(2, cp_size=2, distributed_optimizer=True),
    Way(4, tp_size=2, ep_size=2, expert_tp_size=1, distributed_optimizer=True),
]


def state_of(job: Job, groups: ParallelGroups, way: Way) -> RunState:
    return RunState(job.model, job.optimizer, groups, AskedRun(config=low_state(way)))


def updated(groups: ParallelGroups, way: Way, steps: range, save: str = "") -> Shards:
    job = build_job(low_state(way), groups, VOCAB)
    update(job, steps)
    if save:
        state_of(job, groups, way).save(CheckpointConfig(save=save))
    return everything_computed(job)


def continued(groups: ParallelGroups, way: Way, steps: range, load: str) -> Shards:
    """Load a checkpoint into a job with another state, and update further."""
    job = build_job(low_state(way), groups, VOCAB)
    update(job, range(50, 51))
    state_of(job, groups, way).load(CheckpointConfig(load=load))
    update(job, steps)
    return everything_computed(job)


@pytest.fixture(scope="module")
def expected(pools: WorkerPools) -> dict[str, Tensor]:
    return assembled(pools.run(updated, 1, ONE, range(5)))


@pytest.mark.shows("Precision", "bf16 moments, masters with remainders")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_same_gradients_give_the_same_bits(
    way: Way, expected: dict[str, Tensor], pools: WorkerPools
) -> None:
    found = assembled(pools.run(updated, way.world_size, way, range(5), layout=way.layout))
    assert_same_bits(found, expected)
    kinds = {name.split("/")[1]: tensor.dtype for name, tensor in found.items() if "exp_" in name}
    assert set(kinds.values()) == {torch.bfloat16}


@pytest.mark.shows("Precision", "bf16 moments, masters with remainders")
@pytest.mark.parametrize(("before", "after"), [(WAYS[3], WAYS[2]), (WAYS[5], ONE)], ids=str)
def test_a_resharded_run_goes_on_with_the_same_bits(
    before: Way, after: Way, expected: dict[str, Tensor], tmp_path: Path, pools: WorkerPools
) -> None:
    folder = str(tmp_path)
    pools.run(updated, before.world_size, before, range(3), folder, layout=before.layout)
    found = pools.run(continued, after.world_size, after, range(3, 5), folder, layout=after.layout)
    assert_same_bits(assembled(found), expected)


FLIPPED = (
    ("model/embedding.weight", 3),
    ("model/embedding.weight", 14),
    ("remainder/embedding.weight", 0),
    ("remainder/layers.1.norm.weight", 15),
    ("exp_avg/embedding.weight", 9),
    ("exp_avg_sq/layers.3.mixer.experts.fc2", 2),
)
"""Tensors of 16-bit words, each with the bit of its first element that is flipped on rank 1."""


def state_flipped(groups: ParallelGroups, way: Way) -> list[str]:
    """Return the report of a comparison of replicas for each flipped bit, and for none."""
    job = build_job(low_state(way), groups, VOCAB)
    update(job, range(2))
    check = ReplicaCheck(job.model, job.optimizer, groups).weights
    tensors = job.optimizer.state_shards()
    tensors |= {f"model/{name}": p.data for name, p in job.buffers.parameters.items()}
    reports = []
    for name, bit in (*FLIPPED, ("", 0)):
        words = tensors[name].view(-1).view(torch.int16) if name in tensors else None
        flip = torch.tensor(1 << bit).to(torch.int16)
        if words is not None and groups.rank == 1:
            words[0] ^= flip
        try:
            check()
            reports.append("")
        except ReplicaMismatchError as error:
            reports.append(str(error))
        if words is not None and groups.rank == 1:
            words[0] ^= flip
    return reports


def test_flipped_bits_of_the_state_are_found_where_it_has_replicas(pools: WorkerPools) -> None:
    """With ZeRO-1 only the weights have replicas; they are compared with those of their owner."""
    replicated, _ = pools.run(state_flipped, 2, WAYS[0])
    for (name, _), report in zip(FLIPPED, replicated):
        assert name.removeprefix("model/") in report
    owned, _ = pools.run(state_flipped, 2, WAYS[1])
    said = "embedding.weight: other bits on rank 1 than the weights that are updated by rank 0"
    assert all(said in report for report in owned[:2])
    assert not replicated[-1] and not owned[-1]


class Trained(NamedTuple):
    """Outcome of a rank of a run: losses, and the state at its end."""

    losses: list[float]
    state: Shards


def trained(
    groups: ParallelGroups,
    way: Way,
    config: RunConfig,
    steps: range,
    save: str = "",
    load: str = "",
) -> Trained:
    """Train on packs, after a load or before a save."""
    job = build_job(config, groups, VOCAB)
    state = RunState(job.model, job.optimizer, groups, AskedRun(config=config))
    if load:
        state.load(CheckpointConfig(load=load))
    losses = []
    for step in steps:
        metrics = job.step(mine(groups, way, step, 2 * groups.dp.size), 1e-2)
        losses.append(step_values(metrics.tolist()).loss)
    low = config.parallel.grad_reduce_in_bf16
    assert job.buffers.low_grads.any() == job.optimizer.remainders.any() == low
    if save:
        state.save(CheckpointConfig(save=save))
    return Trained(losses, everything_computed(job))


@pytest.mark.parametrize("way", [WAYS[1], WAYS[3]], ids=str)
def test_a_run_with_all_of_it_resumes_with_the_same_bits(
    way: Way, tmp_path: Path, pools: WorkerPools
) -> None:
    """Gradients and moments are bf16, and masters are pairs; losses are near those of float32."""
    config, folder = low_state(way), str(tmp_path)
    parallel = dataclasses.replace(config.parallel, grad_reduce_in_bf16=True)
    config = dataclasses.replace(config, parallel=parallel)

    def of(*arguments: Any) -> tuple[list[float], dict[str, Tensor]]:
        found = pools.run(trained, 2, way, *arguments, layout=way.layout)
        return found[0].losses, assembled([rank.state for rank in found])

    losses, expected = of(config, range(4))
    first, _ = of(config, range(2), folder)
    last, found = of(config, range(2, 4), "", folder)
    assert_same_bits(found, expected)
    assert [*first, *last] == losses
    exact, _ = of(config_of(way, bf16=True), range(4))
    assert losses == pytest.approx(exact, rel=1e-2)
