"""Graphs of whole steps: equal to eager steps bit for bit, k + 1 launches, no wait, a clean end."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import NO_LABEL, MicroBatch
from megatron_packed.training.build_graphs import (
    audit_graphs,
    build_graphs,
    capture_graphs,
    released,
)
from megatron_packed.training.build_job import Job, build_job
from support.gpu_capture import assert_ends, poison_pool
from support.gpu_graph_steps import (
    CAPTURE_SIZES,
    DEVICE,
    GATHERED_LATER,
    PACKS,
    config_of,
    different,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import LAYOUTS, MODEL, VOCAB, sizes_of
from support.host_waits import assert_no_wait, waiting
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu


def build(
    config: RunConfig, groups: ParallelGroups, capture_sizes: CaptureSizes = CAPTURE_SIZES
) -> tuple[Job, FullIterationGraphs]:
    """Return a job with graphs of whole steps that are not captured yet."""
    job = build_job(config, groups, VOCAB)
    graphs = build_graphs(with_graphs(config, "full_iteration"), job, capture_sizes, groups, print)
    assert isinstance(graphs, FullIterationGraphs)
    job.step.graphs = graphs
    return job, graphs


@pytest.fixture(scope="module")
def groups() -> ParallelGroups:
    configure_determinism()
    return ParallelGroups.single(DEVICE)


@pytest.fixture(scope="module")
def jobs(groups: ParallelGroups) -> Iterator[tuple[Job, Job, FullIterationGraphs]]:
    """Yield an eager job and a job with graphs of whole steps, with the same weights."""
    eager = build_job(config_of(), groups, VOCAB)
    job, graphs = build(config_of(), groups)
    with released(graphs):
        capture_graphs(graphs, job.step, PACKS, groups, first=True)
        assert not graphs.refusals and graphs.counters.captures == len(CAPTURE_SIZES.sizes) + 1
        assert different(state_of(job), state_of(eager)) == []
        yield eager, job, graphs
    torch.use_deterministic_algorithms(False)


@pytest.mark.shows("graphs: full_iteration", of=lambda: (1, config_of()))
def test_steps_over_a_hundred_packings_are_the_eager_ones_bit_for_bit(
    jobs: tuple[Job, Job, FullIterationGraphs], groups: ParallelGroups
):
    """Metrics and state of steps equal those of eager steps bit for bit.

    Steps have one, two or four micro-batches, each with another pack. Most fit one of the two
    capture sizes, one fits none. Between steps the memory of the graphs is set to NaN.
    """
    eager, job, graphs = jobs
    packs = [one for step in steps_of(groups, 1, overflow=True) for one in step]
    replays, fallbacks = graphs.counters.replays, graphs.counters.fallbacks.total()
    seen = {one.layout.capacity for one in packs}
    left = iter(packs)
    for number, k in enumerate([1, 2, 4] * 14 + [2]):
        micro_batches = list(islice(left, k))
        poison_pool(graphs.backend.pool)
        lr = 1e-3 / (1 + number)
        metrics = [
            one.step(micro_batches, lr, stop_requested=number == 7).clone() for one in (eager, job)
        ]
        assert torch.equal(*metrics) and metrics[0].isfinite().all(), number
        assert StepValues.from_list(metrics[1].tolist()).stop_requested == (number == 7)
        assert different(state_of(job), state_of(eager)) == [], number
    assert seen >= set(CAPTURE_SIZES.capacities) and max(seen) > CAPTURE_SIZES.largest
    assert graphs.counters.replays - replays == 99
    assert graphs.counters.fallbacks.total() - fallbacks == 1


def test_k_micro_batches_are_k_and_one_launches_without_a_wait(
    jobs: tuple[Job, Job, FullIterationGraphs], groups: ParallelGroups
):
    eager, job, _ = jobs
    steps = [
        packs[: (1, 2, 4)[number % 3]]
        for number, packs in enumerate(steps_of(groups, 1, overflow=False)[:9])
    ]
    found = waiting(job.step, steps)
    assert found["launches"] == sum(map(len, steps)) + len(steps), found
    assert_no_wait(found)
    waiting(eager.step, steps)  # so that both jobs have the same state in later tests


@pytest.mark.parametrize("bad", [0, 3])
def test_a_nan_is_named_and_changes_nothing(
    jobs: tuple[Job, Job, FullIterationGraphs], groups: ParallelGroups, bad: int
):
    eager, job, _ = jobs
    steps = steps_of(groups, 1, overflow=False)
    before = state_of(job)
    steps[0][bad].scales[0] = float("nan")
    metrics = [one.step(steps[0], 1e-3).clone() for one in (eager, job)]
    values = StepValues.from_list(metrics[1].tolist())
    assert values.nonfinite and values.bad_micro_batches == {0: bad}
    assert torch.equal(metrics[0].nan_to_num(), metrics[1].nan_to_num())
    assert different(state_of(job), before) == []
    metrics = [one.step(steps[1], 1e-3).clone() for one in (eager, job)]
    assert torch.equal(*metrics) and different(state_of(job), state_of(eager)) == []
    assert len(different(state_of(job), before)) > 10


def without_targets(packs: list[MicroBatch]) -> list[MicroBatch]:
    for pack in packs:
        pack.loss_mask.zero_()
        pack.labels.fill_(NO_LABEL)
    return [dataclasses.replace(pack, num_target_tokens=0) for pack in packs]


def test_spikes_and_steps_without_targets_are_left_out_by_replay_as_eagerly(
    jobs: tuple[Job, Job, FullIterationGraphs], groups: ParallelGroups
):
    """The graph that ends a step skips steps without targets and steps with a loss spike."""
    eager, job, graphs = jobs
    steps = steps_of(groups, 1, overflow=False)
    for micro_batches in steps[:5]:  # similar losses, which give the medians for the next steps
        for one in (eager, job):
            one.step(micro_batches, 1e-3)
    spike, empty = (
        steps_of(groups, 1, overflow=False)[0],
        without_targets(steps_of(groups, 1, overflow=False)[1]),
    )
    spike[1].scales[0] *= 1000
    fallbacks = graphs.counters.fallbacks.total()
    for micro_batches, left_out in (
        (spike, True),
        (steps[0], False),
        (empty, True),
        (steps[1], False),
    ):
        before = state_of(job)
        metrics = [one.step(micro_batches, 1e-3).clone() for one in (eager, job)]
        values = StepValues.from_list(metrics[1].tolist())
        assert torch.equal(*metrics) and different(state_of(job), state_of(eager)) == []
        assert bool(values.spikes) == (micro_batches is spike) and values.no_targets == (
            micro_batches is empty
        )
        changed = different(state_of(job), before)
        assert set(changed) <= {"spikes"} if left_out else len(changed) > 10, changed
    assert graphs.counters.fallbacks.total() == fallbacks


def test_validation_by_replay_and_audit(
    jobs: tuple[Job, Job, FullIterationGraphs], groups: ParallelGroups
):
    eager, _, _ = jobs
    job, graphs = build(config_of(), groups)
    graphs.parts["validation"] = job.step.validation_micro_batch
    with released(graphs):
        capture_graphs(graphs, job.step, PACKS, groups, first=True)
        job.optimizer.load_state(
            {name: shard.clone() for name, shard in eager.optimizer.state_shards().items()}
        )
        for buffer, other in zip(job.model.buffers(), eager.model.buffers()):
            buffer.copy_(other)
        packs = [one for step in steps_of(groups, 1, overflow=False) for one in step][:6]
        for one in (eager, job):
            one.step.validation_loss.zero_()
            for micro_batch in packs:
                one.step.validate(micro_batch)
        assert graphs.counters.replays == len(packs)
        assert job.step.validation_loss > 0 and torch.equal(
            job.step.validation_loss, eager.step.validation_loss
        )
        before = state_of(job)
        found = audit_graphs(graphs, job.step, packs[0], deterministic=True, seed=0)
        assert (
            found
            == "whole steps (micro-batch) replay what they compute (largest difference 0.0e+00)"
        )
        assert different(state_of(job), before) == [] and not job.buffers.storage.any()


def reserved_mib(job: Job, steps: list[list[MicroBatch]]) -> float:
    """Return the largest memory reserved in some steps after warm-up, in MiB."""
    for round_ in range(2):
        if round_:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for micro_batches in steps:
            job.step(micro_batches, 1e-4)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() / 2**20


def test_memory(groups: ParallelGroups):
    """Graphs of four capacities and the update hold little more memory than an eager step."""
    tokens, capture_sizes = 8192, CaptureSizes.from_capacities([16, 64, 128, 256], 8192)
    model = dataclasses.replace(
        MODEL,
        hybrid_layer_pattern="M*-" * 4,
        hidden_size=1024,
        num_attention_heads=16,
        ffn_hidden_size=4096,
        mamba_num_heads=32,
        num_experts=None,
        moe_latent_size=None,
        moe_ffn_hidden_size=None,
        moe_shared_expert_intermediate_size=None,
        moe_router_enable_expert_bias=False,
        moe_aux_loss_coeff=0.0,
    )
    random = np.random.default_rng(0)

    def pack(count: int) -> MicroBatch:
        capture_size = capture_sizes.smallest_for(count, tokens)
        assert capture_size is not None
        documents = [(random.integers(0, VOCAB, tokens // count), None) for _ in range(count)]
        return MicroBatch.build(
            documents, tokens, capture_size.capacity, (1e-4, 0.5), capture_size.max_seqlen
        ).pin_memory()

    steps = [[pack(count), pack(16)] for count in (2, 50, 100, 200)]
    config = config_of(model, tokens, deterministic=False)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() / 2**20
    job, graphs = build(config, groups, capture_sizes)
    job.step.graphs = None
    eager = reserved_mib(job, steps)
    job.step.graphs = graphs
    with released(graphs):
        capture_graphs(graphs, job.step, 2, groups, first=True)
        found = reserved_mib(job, steps)
        print(
            f"reserved at the peak: eager {eager:,.0f} MiB, whole steps {found:,.0f} MiB, of which graphs hold "
            f"{graphs.counters.memory_mib:,.0f} MiB; captured in {graphs.counters.capture_seconds:.1f} s"
        )
        assert graphs.counters.hit_rate == 1.0 and not graphs.refusals
        assert found <= 1.10 * eager, (
            f"{found:,.0f} MiB, eager {eager:,.0f} MiB, of which tests before left {before:,.0f} MiB"
        )


EXIT = """
import sys
from contextlib import nullcontext
import torch
from torch import distributed
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch

torch.cuda.set_device(0)
distributed.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1)
total = torch.zeros(256, device="cuda")
started = []

def part(micro_batch):
    total.add_(micro_batch.loss_mask)
    started.append(distributed.all_reduce(total, async_op=True))
    started.pop().wait()

def pack(size):
    return MicroBatch.build([(torch.arange(100).numpy(), None)], 256, size.capacity, (1.0, 1.0), size.max_seqlen)

capture_sizes = CaptureSizes.from_capacities([4], 256)
graphs = FullIterationGraphs(
    {"micro-batch": part}, lambda: distributed.all_reduce(total), rehearsing=nullcontext, places=lambda: [],
    total_tokens=256, capture_sizes=capture_sizes, device=torch.device("cuda", 0),
)
graphs.tune(pack)
graphs.capture(pack)
total.zero_()
graphs.run("micro-batch", part, pack(capture_sizes.sizes[0]).pin_memory())
graphs.finish_step(lambda: distributed.all_reduce(total))
assert graphs.counters.replays == 1 and graphs.counters.captures == 2 and total.sum().item() == 99
graphs.close()
distributed.destroy_process_group()
print("the end", flush=True)
"""


def test_the_process_ends_with_collectives_captured(tmp_path):
    """A process that captured collectives ends without a hang.

    One collective runs on another stream, like an overlapped reduction, and one on the main stream.
    """
    assert_ends(EXIT, tmp_path)


# Two GPUs.


def compare(groups: ParallelGroups, options: dict[str, Any]) -> dict[str, Any]:
    """Run some steps eagerly and by replay of whole steps, one with a NaN on the last rank."""
    configure_determinism()
    config = config_of(**options)
    eager = build_job(config, groups, VOCAB)
    job, graphs = build(config, groups)
    alignment = config.parallel.document_alignment
    with released(graphs):
        capture_graphs(graphs, job.step, PACKS, groups, first=True)
        equal = []
        for micro_batches in steps_of(groups, alignment, overflow=True)[:6]:
            metrics = [one.step(micro_batches, 1e-3).clone() for one in (eager, job)]
            equal.append(torch.equal(*metrics))
        differing = different(state_of(job), state_of(eager))
        steady = steps_of(groups, alignment, overflow=False)[:6]
        bad, before = steps_of(groups, alignment, overflow=False)[0], state_of(job)
        if groups.dp.rank == groups.dp.size - 1:
            bad[1].scales[0] = float("nan")
        values = StepValues.from_list(job.step(bad, 1e-3).tolist())
        changed = different(state_of(job), before)
        spike = steps_of(groups, alignment, overflow=False)[1]
        if groups.dp.rank == groups.dp.size - 1:
            spike[1].scales[0] *= 1000
        spikes = StepValues.from_list(job.step(spike, 1e-3).tolist()).spikes
        left_out = set(different(state_of(job), before)) <= {"spikes"}
        audited = audit_graphs(graphs, job.step, steady[0][0], deterministic=True, seed=0)
        return waiting(job.step, steady) | {
            "steps": equal,
            "state": differing,
            "nonfinite": values.nonfinite,
            "bad": values.bad_micro_batches,
            "changed": changed,
            "spikes": [one.name for one in spikes],
            "left_out": left_out,
            "audited": audited,
            "fallbacks": dict(graphs.counters.fallbacks),
            "refusals": [one.reason for one in graphs.refusals],
            "expected": sum(map(len, steady)) + len(steady),
            "graph_mib": graphs.counters.memory_mib,
        }


@pytest.mark.shows("graphs: full_iteration", of=lambda name: (2, config_of(**LAYOUTS[name])))
@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["dp2 zero", "dp2 overlap", "dp2 zero overlap", "tp2 sp", "ep2"])
def test_layouts_of_two_gpus(name: str, nccl_pools: WorkerPools) -> None:
    options = {key: value for key, value in LAYOUTS[name].items() if key not in GATHERED_LATER}
    for rank, found in enumerate(
        nccl_pools.run(compare, 2, options, layout=sizes_of(options), timeout=300)
    ):
        print(
            f"{name}, rank {rank}: graphs hold {found['graph_mib']:.0f} MiB, {found['launches']} launches"
        )
        assert all(found["steps"]) and found["state"] == [], found
        assert (
            found["nonfinite"] and set(found["bad"].values()) == {1} and max(found["bad"]) == 1
        ), found
        assert found["changed"] == [] and found["refusals"] == [], found
        assert "loss" in found["spikes"] and found["left_out"], found
        assert sum(found["fallbacks"].values()) == 1, found
        assert found["audited"].endswith("(largest difference 0.0e+00)"), found
        assert found["launches"] == found["expected"] and found["nccl"] > 0, found
        assert_no_wait(found)
