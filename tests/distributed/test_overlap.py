"""Steps with overlap against steps without: equal bits on CPUs, metrics within 2 % on two GPUs.

The options are ``--overlap-grad-reduce`` and ``--overlap-param-gather``. Sums of two numbers do not
depend on their order. So on CPUs all results are compared bit for bit if two ranks are summed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.distributed import collectives
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.overlapped_collectives import OverlappedGather, stages_of_buckets
from megatron_packed.training.build_job import Job, build_job
from support.layouts import VOCAB, Way, config_of, mine, run_state
from support.process_pools import WorkerPools, run_distributed
from support.whole_state import assembled, assert_same_bits, everything

STEPS = 2
"""Number of steps; the second uses weights that were gathered with overlap."""
BUCKET = 4000
"""Bucket size in elements; the small model then has about twelve buckets."""


def with_overlap(way: Way, overlap: bool, **options: Any) -> RunConfig:
    """Return the configuration with or without overlap.

    Parameters are gathered with overlap only if they have several owners.
    """
    config = config_of(way, **options)
    gather = overlap and way.distributed_optimizer
    parallel = dataclasses.replace(
        config.parallel,
        ddp_bucket_size=BUCKET,
        overlap_grad_reduce=overlap,
        overlap_param_gather=gather,
    )
    return dataclasses.replace(config, parallel=parallel)


def job_of(
    groups: ParallelGroups, way: Way, overlap: bool, *, bf16: bool = False, **model: Any
) -> Job:
    config = with_overlap(way, overlap, bf16=bf16, **model)
    training = dataclasses.replace(config.training, device=groups.device.type)
    return build_job(dataclasses.replace(config, training=training), groups, VOCAB)


def train(
    groups: ParallelGroups, way: Way, count: int, overlap: bool, bf16: bool
) -> dict[str, Any]:
    job = job_of(groups, way, overlap, bf16=bf16)
    metrics, begun, under_way = [], [], []
    for step in range(STEPS):
        metrics.append(job.step(mine(groups, way, step, count), 1e-2).clone())
        if job.step.overlapped is not None:
            begun.append(job.step.overlapped.begun_in_backward)
        if isinstance(job.buffers.gather, OverlappedGather):
            under_way.append(job.buffers.gather.under_way)
    layout = job.buffers.layout
    late = {id(parameter) for parameter in job.model.shared_gradients().parameters}
    held_back = {
        slot.bucket for slot in layout.slots if id(job.buffers.parameters[slot.name]) in late
    }
    held_back |= {
        number
        for number, used in enumerate(stages_of_buckets(job.buffers, job.model.stages))
        if not used[0]
    }
    return {
        "metrics": torch.stack(metrics).cpu(),
        "state": [(*shard[:3], shard[3].cpu()) for shard in everything(job)],
        "begun": begun,
        "early": len(layout.buckets) - len(held_back),
        "under_way": under_way,
        "experts": sum(bucket.part.expert for bucket in layout.buckets),
    }


WAYS = [
    (Way(2), 2),
    (Way(2), 6),
    (Way(2, distributed_optimizer=True), 6),
    (Way(2, distributed_optimizer=True), 2),
    (Way(2, ep_size=2), 6),
    (Way(2, cp_size=2), 1),
    (Way(4, 2, True), 2),
    (Way(4, 2, True, True, 2, 1), 2),
]


@pytest.mark.shows("eager", of=lambda way: (way.world_size, with_overlap(way, overlap=True)))
@pytest.mark.parametrize(("way", "count"), WAYS, ids=str)
def test_the_same_bits_with_and_without_overlap(way: Way, count: int, pools: WorkerPools) -> None:
    """Check that metrics, weights and moments of all steps are equal bit for bit.

    Also check that reductions start in the backward pass, and that parameters are gathered later.
    """
    bf16 = way.distributed_optimizer
    expected, found = (
        pools.run(train, way.world_size, way, count, overlap, bf16, layout=way.layout)
        for overlap in (False, True)
    )
    for one, other in zip(expected, found):
        assert torch.equal(one["metrics"], other["metrics"]) and one["metrics"][:, 0].min() > 1
        assert other["begun"] == [other["early"]] * STEPS and other["early"] >= 1
        assert one["begun"] == []
        assert (other["experts"] > 0) == (way.ep_size > 1)
        if way.distributed_optimizer:
            assert min(other["under_way"]) >= 5
    assert_same_bits(
        assembled([rank["state"] for rank in found]),
        assembled([rank["state"] for rank in expected]),
    )


def order_of_calls(groups: ParallelGroups, way: Way) -> list[tuple[str, int]]:
    """Record name and size of each started collective; the last rank has packs without documents."""
    job, calls = job_of(groups, way, True), []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "_reduce_scatter", "_all_gather"):
            owner = collectives.dist if name == "all_reduce" else collectives
            call = getattr(owner, name)

            def noting(*args: Any, _name: str = name, _call: Any = call, **kwargs: Any) -> Any:
                if kwargs.get("async_op"):
                    calls.append((_name, args[0].numel()))
                return _call(*args, **kwargs)

            patch.setattr(owner, name, noting)
        packs = mine(groups, way, 0, 6)
        if groups.rank == groups.world_size - 1:
            # Use only the pack without documents.
            packs = mine(groups, way, 0, 6)[-1:] * len(packs)
        job.step(packs, 1e-2)
        job.buffers.wait_params()
    return calls


@pytest.mark.parametrize("way", [Way(2, distributed_optimizer=True), Way(2, ep_size=2)], ids=str)
def test_ranks_begin_the_same_in_the_same_order(way: Way, pools: WorkerPools) -> None:
    one, other = pools.run(order_of_calls, 2, way, layout=way.layout)
    assert one == other and len(one) > (10 if way.distributed_optimizer else 5)
    assert {name for name, _ in one} == (
        {"_reduce_scatter", "all_reduce", "_all_gather"}
        if way.distributed_optimizer
        else {"all_reduce"}
    )


def readers(groups: ParallelGroups, way: Way, folder: str) -> dict[str, Any]:
    """Return results of evaluation, of a save and of a write while parameters are being gathered."""
    found, losses = {}, {}
    for overlap in (False, True):
        job = job_of(groups, way, overlap, bf16=True)
        packs = mine(groups, way, 0, 2)
        job.step(packs, 1e-2)
        gather = job.buffers.gather
        assert (gather is not None) == overlap
        with torch.no_grad():
            job.model.eval()
            # No explicit wait: modules wait for the parameters that they use.
            losses[overlap] = job.model(packs[0]).loss_sum.item()
            job.model.train()
        # Evaluation does not use the parameters of multi-token prediction.
        stages = stages_of_buckets(job.buffers, job.model.stages)
        unused = sum(used[0] > job.model.config.num_layers + 1 for used in stages)
        assert unused and (gather is None or gather.under_way == unused)
        job.step(packs, 1e-2)
        run_state(job, groups, way).save(CheckpointConfig(save=f"{folder}/{overlap}"))
        assert gather is None or gather.under_way == 0
        job.optimizer.write_params()
        # The second call must wait for the all-gather that the first call started.
        job.optimizer.write_params()
        found[overlap] = everything(job)
    return {"losses": losses, "state": found}


def test_who_reads_parameters_waits_for_them(tmp_path: Path, pools: WorkerPools) -> None:
    way = Way(2, distributed_optimizer=True)
    ranks = pools.run(readers, 2, way, str(tmp_path))
    for found in ranks:
        assert found["losses"][True] == found["losses"][False]
    assert_same_bits(
        *(assembled([found["state"][overlap] for found in ranks]) for overlap in (False, True))
    )


@pytest.mark.shows("eager", of=lambda way: (way.world_size, with_overlap(way, overlap=True)))
@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "way", [Way(2), Way(2, distributed_optimizer=True), Way(2, ep_size=2), Way(2, 2, True)], ids=str
)
def test_the_same_numbers_on_two_gpus(way: Way) -> None:
    """Compare two GPUs with a tolerance: some bf16 kernels add in a changing order."""
    expected, found = (
        run_distributed(
            train, 2, way, 6, overlap, True, backend="nccl", layout=way.layout, timeout=300.0
        )
        for overlap in (False, True)
    )
    for one, other in zip(expected, found):
        torch.testing.assert_close(one["metrics"], other["metrics"], rtol=2e-2, atol=2e-3)
        assert other["begun"] == [other["early"]] * STEPS and other["early"] >= 1
