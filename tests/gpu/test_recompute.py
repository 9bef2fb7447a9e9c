"""Recomputation on GPUs: every bit of steps without it, eager and replayed, without a wait; and
memory falls.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from test_full_iteration_gpu import GATHERED_LATER, config_of, different, state_of
from test_layouts_no_host_sync import MODEL
from test_no_host_sync import VOCAB
from test_parallel_graphs_gpu import (
    CAPTURE_SIZES,
    LAYOUTS,
    PACKS,
    steps_of,
)  # sets deterministic variables, too

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.memory import RECOMPUTED_IN, MemoryConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.cuda_graphs.step_graphs import StepGraphs
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.testing import WorkerPool
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import (
    audit_graphs,
    build_graphs,
    capture_graphs,
    released,
)
from megatron_packed.training.build_job import Job, build_job
from support.host_waits import waiting

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
STEPS = 5
"""One of them with a pack that fits no capacity."""


def full(method: str, number: int) -> MemoryConfig:
    return MemoryConfig(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=number
    )


def selective(*modules: str) -> MemoryConfig:
    return MemoryConfig(recompute_granularity="selective", recompute_modules=modules)


NONE = MemoryConfig()
MODES = {
    "layers": full("uniform", 1),
    "groups": full("uniform", 3),
    "two layers": full("block", 2),
    **{module: selective(module) for module in (*RECOMPUTED_IN, "layernorm")},
    "parts": selective(*RECOMPUTED_IN, "layernorm"),
    "small parts": selective("core_attn", "layernorm", "moe_act"),
}


def config_with(
    memory: MemoryConfig, *, dropout: float = 0.0, engine: bool = False, **options: Any
) -> RunConfig:
    config = config_of(dataclasses.replace(MODEL, hidden_dropout=dropout), **options)
    layers = "transformer_engine" if engine else "local"
    training = dataclasses.replace(config.training, transformer_impl=layers)
    return dataclasses.replace(config, memory=memory, training=training)


def packs(groups: ParallelGroups, alignment: int = 1) -> list[list[MicroBatch]]:
    return steps_of(groups, alignment, overflow=True)[:STEPS]


def run(job: Job, steps: list[list[MicroBatch]]) -> list[torch.Tensor]:
    torch.manual_seed(11)
    return [job.step(micro_batches, 1e-3).clone() for micro_batches in steps]


def compared(
    job: Job,
    found: list[torch.Tensor],
    expected: tuple[list[torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    assert all(metrics.isfinite().all() for metrics in expected[0])
    assert all(torch.equal(*pair) for pair in zip(found, expected[0], strict=True))
    assert different(state_of(job), expected[1]) == []


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    configure_determinism()
    yield ParallelGroups.single(DEVICE)
    torch.use_deterministic_algorithms(False)


@cache
def without(dropout: float, engine: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    groups = ParallelGroups.single(DEVICE)
    job = build_job(config_with(NONE, dropout=dropout, engine=engine), groups, VOCAB)
    return run(job, packs(groups)), state_of(job)


@pytest.mark.shows("recompute", "one process")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_without(mode: str, dropout: float, groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES[mode], dropout=dropout), groups, VOCAB)
    compared(job, run(job, packs(groups)), without(dropout, engine=False))
    assert not torch.equal(without(0.1, engine=False)[0][0], without(0.0, engine=False)[0][0])


@pytest.mark.shows("recompute", "TE layers")
@pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
)
@pytest.mark.parametrize("mode", ["groups", "parts", "small parts"])
def test_with_transformer_engines_layers(mode: str, groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES[mode], engine=True), groups, VOCAB)
    compared(job, run(job, packs(groups)), without(0.0, engine=True))


@pytest.mark.shows(lambda impl: f"graphs: {impl}", "recompute")
@pytest.mark.parametrize(
    ("impl", "mode"),
    [("local", mode) for mode in MODES if mode != "groups"]
    + [("full_iteration", mode) for mode in ("layers", "groups", "parts", "small parts")],
)
def test_replayed_steps_are_those_without_and_wait_for_nothing(
    impl: str, mode: str, groups: ParallelGroups
) -> None:
    replayed(
        dataclasses.replace(
            config_with(MODES[mode]), cuda_graph=CudaGraphConfig(cuda_graph_impl=impl)
        ),
        groups,
    )


@contextmanager
def captured(
    config: RunConfig, groups: ParallelGroups, *, all_of_it: bool = True
) -> Iterator[tuple[Job, StepGraphs]]:
    """A job whose steps replay graphs, of all that there is or of what can be captured."""
    job = build_job(config, groups, VOCAB)
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print)
    assert graphs is not None
    with released(graphs):
        capture_graphs(graphs, job.step, PACKS, groups, first=True)
        job.step.graphs = graphs
        assert bool(graphs.refusals) != all_of_it
        yield job, graphs


def replayed(
    config: RunConfig,
    groups: ParallelGroups,
    steps_by: Callable[..., list[torch.Tensor]] = run,
    *,
    engine: bool = False,
) -> dict[str, Any]:
    """Replays steps, one micro-batch of them eagerly, against those without; what the host did in
    steady ones.
    """
    with captured(config, groups) as (job, graphs):
        compared(job, steps_by(job, packs(groups)), without(0.0, engine=engine))
        assert (
            graphs.counters.fallbacks.total() == 1 and graphs.counters.replays == STEPS * PACKS - 1
        )
        assert not graphs.counters.module_fallbacks
        steady = steps_of(groups, 1, overflow=False)[:6]
        found = waiting(job.step, steady)
        assert (
            found["finite"]
            and found["launches"] > 0
            and found["waits"] == []
            and found["pageable"] == []
        ), found
        job.buffers.zero_grad()
        audited = audit_graphs(graphs, job.step, steady[0][0], deterministic=True, seed=0)
        assert audited is not None and audited.endswith("(largest difference 0.0e+00)")
        return found


@pytest.mark.shows("no host sync", "recompute")
@pytest.mark.parametrize("mode", ["layers", "groups", "parts", "small parts"])
def test_eager_steps_wait_for_nothing_random_states_included(
    mode: str, groups: ParallelGroups
) -> None:
    job = build_job(config_with(MODES[mode], dropout=0.1, deterministic=False), groups, VOCAB)
    found = waiting(job.step, steps_of(groups, 1, overflow=False)[:6])
    assert found["finite"] and found["waits"] == [] and found["pageable"] == [], found


# ------------------------------------------------------------------------------------------------------------
# memory

PATTERN, TOKENS, HIDDEN = "M*-E" * 3, 8192, 1024
LARGE = dataclasses.replace(
    MODEL,
    hybrid_layer_pattern=PATTERN,
    hidden_size=HIDDEN,
    num_attention_heads=16,
    ffn_hidden_size=4 * HIDDEN,
    mamba_num_heads=32,
    moe_ffn_hidden_size=HIDDEN,
    moe_shared_expert_intermediate_size=HIDDEN,
)


def requested_bytes() -> int:
    """Of tensors, without what the allocator rounds them up by."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def kept_and_peak(memory: MemoryConfig, groups: ParallelGroups) -> tuple[int, int]:
    """Bytes of tensors between the passes of a micro-batch, and allocated at its peak, beyond those
    before it.
    """
    job = build_job(
        dataclasses.replace(config_of(LARGE, TOKENS, deterministic=False), memory=memory),
        groups,
        VOCAB,
    )
    random = np.random.default_rng(0)
    documents = [(random.integers(0, VOCAB, TOKENS // 16), None) for _ in range(16)]
    micro_batch = MicroBatch.build(documents, TOKENS, 16, (1e-4, 1.0)).to(DEVICE)
    for _ in range(2):  # kernels are tuned in the first
        gc.collect()
        torch.cuda.synchronize()
        before, requested = torch.cuda.memory_allocated(), requested_bytes()
        torch.cuda.reset_peak_memory_stats()
        output = job.model(micro_batch)
        kept = requested_bytes() - requested
        output.loss.backward()
        del output
        peak = torch.cuda.max_memory_allocated() - before
    return kept, peak


def test_memory_falls_by_what_sizes_of_tensors_say(groups: ParallelGroups) -> None:
    modes = {"none": NONE, **MODES, "one group": full("uniform", len(PATTERN))}
    found = {name: kept_and_peak(memory, groups) for name, memory in modes.items()}
    for name, (kept, peak) in found.items():
        print(
            f"{name:12} kept between the passes {kept / 2**20:8,.1f} MiB, at the peak {peak / 2**20:8,.1f} MiB"
        )
    hidden = TOKENS * HIDDEN * torch.bfloat16.itemsize
    assert found["layers"][0] - found["one group"][0] == (len(PATTERN) - 1) * hidden
    assert found["groups"][0] - found["one group"][0] == (len(PATTERN) // 3 - 1) * hidden
    assert found["none"][0] - found["layernorm"][0] >= (len(PATTERN) - PATTERN.count("E")) * hidden
    for name in MODES:
        assert found[name][0] < found["none"][0], name
        assert found[name][1] <= found["none"][1], name
    assert found["layers"][0] < found["none"][0] / 5
    assert found["layers"][1] < found["groups"][1] < found["none"][1]
    assert max(found["layers"][1], found["parts"][1]) < 0.75 * found["none"][1]


# ---------------------------------------------------------------------------------------------------------
# two GPUs


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="nccl", collective_timeout=300) as started:
        yield started


def compare(groups: ParallelGroups, options: dict[str, Any]) -> dict[str, tuple[bool, list[str]]]:
    """Mode -> whether metrics are the same, and what of the state is not."""
    configure_determinism()
    alignment = config_of(**options).document_alignment
    expected: tuple[list[torch.Tensor], dict[str, torch.Tensor]] | None = None
    answers = {}
    for name, memory in {
        "none": NONE,
        **{mode: MODES[mode] for mode in ("groups", "two layers", "parts")},
    }.items():
        job = build_job(config_with(memory, dropout=0.1, **options), groups, VOCAB)
        found = run(job, packs(groups, alignment))
        expected = expected or (found, state_of(job))
        same = all(torch.equal(*pair) for pair in zip(found, expected[0], strict=True))
        answers[name] = (same, different(state_of(job), expected[1]))
    return answers


@pytest.mark.shows("recompute", of=lambda name: (2, config_of(**LAYOUTS[name])))
@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["dp2 zero overlap", "tp2 sp", "cp2 a2a", "cp2 p2p", "ep2"])
def test_layouts_of_two_gpus(name: str, pool: WorkerPool) -> None:
    options = {key: value for key, value in LAYOUTS[name].items() if key not in GATHERED_LATER}
    sizes = {
        axis: size
        for axis, size in ParallelConfig(**options).layout_sizes.items()
        if size is not None
    }
    for found in pool.run(compare, options, layout=sizes, timeout=300):
        assert all(answer == (True, []) for answer in found.values()), found
