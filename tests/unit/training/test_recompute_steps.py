"""Steps with recomputation and offload equal steps without, bit for bit, in every graph mode."""

import dataclasses

import pytest
import torch

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_graphs import audit_graphs
from megatron_packed.training.build_job import build_job
from support.bucket_stages import config_of as config_with_overlap
from support.bucket_stages import packs, seen_at_start
from support.recomputed_steps import (
    EACH_INPUT,
    GROUPS_OF_3,
    INPUTS,
    LAYERS,
    PARTS,
    TRAVELLERS,
    VOCAB,
    Run,
    captured_by,
)
from support.stand_in import RecordingBackend
from support.step_jobs import config_of, micro_batch, state_hash

SMALL_PARTS = MemoryConfig(
    recompute_granularity="selective", recompute_modules=("core_attn", "layernorm", "moe_act")
)


def mode_of(memory):
    """Return the row of the support matrix to which a case belongs."""
    return "offload" if memory.offloads else "recompute"


@pytest.mark.shows(
    lambda impl: "eager" if impl == "none" else f"graphs: {impl}",
    mode_of,
    of=lambda: (1, config_of()),
)
@pytest.mark.parametrize(
    ("impl", "memory"),
    [
        pytest.param("none", GROUPS_OF_3, id="eager, groups"),
        pytest.param("local", LAYERS, id="captured layers, layers"),
        pytest.param("local", PARTS, id="captured layers, parts"),
        pytest.param("local", SMALL_PARTS, id="captured layers, small parts"),
        pytest.param("transformer_engine", LAYERS, id="by TransformerEngine, layers"),
        pytest.param("transformer_engine", PARTS, id="by TransformerEngine, parts"),
        pytest.param("transformer_engine", SMALL_PARTS, id="by TransformerEngine, small parts"),
        pytest.param("full_iteration", GROUPS_OF_3, id="whole steps, groups"),
        pytest.param("full_iteration", PARTS, id="whole steps, parts"),
        pytest.param("none", INPUTS, id="eager, inputs offloaded"),
        pytest.param("none", TRAVELLERS, id="eager, parts offloaded"),
        pytest.param("local", EACH_INPUT, id="captured layers, inputs offloaded"),
        pytest.param("local", TRAVELLERS, id="captured layers, parts offloaded"),
        pytest.param("full_iteration", INPUTS, id="whole steps, inputs offloaded"),
        pytest.param("full_iteration", TRAVELLERS, id="whole steps, parts offloaded"),
    ],
)
def test_every_step_has_the_same_bits(impl, memory, eager_steps):
    """All metrics and the state equal those of eager steps without recomputation and offload.

    The state has weights, moments, expert biases and random state.
    """
    run = Run(captured_by(impl), memory, RecordingBackend() if impl != "none" else None)
    for number, (metrics, digest) in enumerate(eager_steps):
        assert torch.equal(run.step(number), metrics) and state_hash(run.job) == digest, number
    if memory.offloads:
        assert run.job.model.offload.pool.pinned > 0
    if impl == "none":
        return
    counters = run.graphs.counters
    assert counters.fallbacks == {"more than 5 documents": 1} and counters.replays == 5
    assert not counters.module_fallbacks
    run.job.buffers.zero_grad()
    assert (
        audit_graphs(run.graphs, run.job.step, micro_batch([20, 9, 3]), deterministic=True, seed=1)
        is not None
    )


def test_a_nan_is_named_as_without():
    found = []
    for memory in (MemoryConfig(), GROUPS_OF_3):
        run = Run(config_of(cuda_graph_impl="none"), memory)
        batches = [micro_batch([20, 9, 3], seed) for seed in range(3)]
        batches[1].scales[0] = float("nan")
        found.append(run.job.step(batches, 1e-2).clone())
    assert found[0][run.job.step.layout.slots["nonfinite"]] == 1
    assert torch.equal(*(metrics.nan_to_num() for metrics in found))


@pytest.mark.parametrize("memory", [LAYERS, GROUPS_OF_3, PARTS], ids=["layers", "groups", "parts"])
def test_a_bucket_is_complete_when_its_sum_begins(memory, monkeypatch):
    """Overlapped reductions start as early as without recomputation, and on complete buckets."""
    config = config_with_overlap()
    begun = []
    for one in (MemoryConfig(), memory):
        job = build_job(dataclasses.replace(config, memory=one), ParallelGroups.single(), VOCAB)
        with monkeypatch.context() as patch:
            seen = seen_at_start(job, patch)
            job.step(packs(2), 1e-2)
        assert len(seen) == len(job.buffers.layout.buckets)
        for bucket, gradients in seen.items():
            assert gradients.any() and torch.equal(gradients, job.buffers.bucket_grads(bucket)), (
                bucket
            )
        begun.append((job.step.overlapped.begun_in_backward, list(seen), job.buffers.grads.clone()))
    assert begun[0][:2] == begun[1][:2] and torch.equal(begun[0][2], begun[1][2])
    assert begun[0][0] > len(begun[0][1]) / 2
