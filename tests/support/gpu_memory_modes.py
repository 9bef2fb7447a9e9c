"""Recomputation and offload on GPUs: jobs, comparisons of their results, and their memory."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.cuda_graphs.step_graphs import StepGraphs
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import (
    audit_graphs,
)
from megatron_packed.training.build_job import Job, build_job
from support import gpu_graph_steps
from support.gpu_graph_steps import (
    PACKS,
    config_of,
    different,
    state_of,
    steps_of,
)
from support.gpu_layouts import MODEL, VOCAB, with_depths
from support.host_waits import assert_no_wait, waiting

DEVICE = torch.device("cuda", 0)
STEPS = 5
"""Number of steps; one of them has a pack that fits no capacity."""
NONE = MemoryConfig()


def config_with(
    memory: MemoryConfig,
    *,
    dropout: float = 0.0,
    transformer_engine: bool = False,
    depths: bool = False,
    **options: Any,
) -> RunConfig:
    model = with_depths(MODEL) if depths else MODEL
    config = config_of(dataclasses.replace(model, hidden_dropout=dropout), **options)
    layers = "transformer_engine" if transformer_engine else "local"
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


@cache
def without(
    dropout: float, transformer_engine: bool, depths: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    groups = ParallelGroups.single(DEVICE)
    config = config_with(
        NONE, dropout=dropout, transformer_engine=transformer_engine, depths=depths
    )
    job = build_job(config, groups, VOCAB)
    return run(job, packs(groups)), state_of(job)


@contextmanager
def captured(
    config: RunConfig, groups: ParallelGroups, *, all_of_it: bool = True
) -> Iterator[tuple[Job, StepGraphs]]:
    """Yield a job whose steps replay graphs, with all modules captured or only some."""
    with gpu_graph_steps.captured(config, groups) as (job, graphs):
        assert bool(graphs.refusals) != all_of_it
        yield job, graphs


def replayed(
    config: RunConfig,
    groups: ParallelGroups,
    steps_by: Callable[..., list[torch.Tensor]] = run,
    *,
    transformer_engine: bool = False,
) -> dict[str, Any]:
    """Compare steps with graphs, one of whose micro-batches is eager, with steps without graphs.

    Returns:
        Calls of the host in steady steps.
    """
    with captured(config, groups) as (job, graphs):
        compared(
            job, steps_by(job, packs(groups)), without(0.0, transformer_engine=transformer_engine)
        )
        assert (
            graphs.counters.fallbacks.total() == 1 and graphs.counters.replays == STEPS * PACKS - 1
        )
        assert not graphs.counters.module_fallbacks
        steady = steps_of(groups, 1, overflow=False)[:6]
        found = waiting(job.step, steady)
        assert found["launches"] > 0, found
        assert_no_wait(found)
        job.buffers.zero_grad()
        audited = audit_graphs(graphs, job.step, steady[0][0], deterministic=True, seed=0)
        assert audited is not None and audited.endswith("(largest difference 0.0e+00)")
        return found


PATTERN, TOKENS, HIDDEN = "M*-EG" * 3, 8192, 1024
LARGE = dataclasses.replace(
    MODEL,
    hybrid_layer_pattern=PATTERN,
    hidden_size=HIDDEN,
    num_attention_heads=16,
    ffn_hidden_size=4 * HIDDEN,
    mamba_num_heads=32,
    linear_num_key_heads=8,
    linear_num_value_heads=16,
    moe_ffn_hidden_size=HIDDEN,
    moe_shared_expert_intermediate_size=HIDDEN,
    moe_shared_expert_gate=True,
)


def requested_bytes() -> int:
    """Return the bytes of tensors as requested, without the rounding of the allocator."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def kept_and_peak(memory: MemoryConfig, groups: ParallelGroups) -> tuple[int, int]:
    """Return the bytes that a micro-batch keeps from forward to backward, and its peak.

    Both are in addition to the bytes before the micro-batch.
    """
    job = build_job(
        dataclasses.replace(config_of(LARGE, TOKENS, deterministic=False), memory=memory),
        groups,
        VOCAB,
    )
    random = np.random.default_rng(0)
    documents = [(random.integers(0, VOCAB, TOKENS // 16), None) for _ in range(16)]
    micro_batch = MicroBatch.build(documents, TOKENS, 16, (1e-4, 1.0)).to(DEVICE)
    for _ in range(2):  # the first pass tunes kernels
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
