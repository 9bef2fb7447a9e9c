"""Contents of gradient buckets at the start of their reductions, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.overlapped_collectives import OverlappedReduce, stages_of_buckets
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from support.bucket_stages import PATTERN, SLOTS, VOCAB, config_of, packs, seen_at_start
from support.stand_in import RecordingBackend

SIZES = {
    "hidden_size": 256,
    "mamba_head_dim": 64,
    "mamba_state_dim": 64,
    "mamba_chunk_size": 64,
    "ffn_hidden_size": 512,
    "moe_ffn_hidden_size": 128,
    "mamba_num_heads": 8,
}
"""Sizes that kernels on GPUs support."""
NO_EXPERTS = {
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
}


def job_of(device: str = "cpu", **options: object) -> Job:
    return build_job(config_of(device, **options), ParallelGroups.single(device), VOCAB)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"untie_embeddings_and_output_weights": True},
        {
            "hybrid_layer_pattern": "M*-*M",
            "add_bias_linear": True,
            "add_qkv_bias": True,
            **NO_EXPERTS,
        },
    ],
    ids=["tied", "untied", "biases"],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_bucket_is_complete_when_its_sum_begins(
    bf16: bool, model: dict[str, object], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets are complete for gradients from autograd and for gradients added by a layer
    itself.
    """
    job = job_of(bf16=bf16, **model)
    seen = seen_at_start(job, monkeypatch)
    job.step(packs(count), 1e-2)
    monkeypatch.undo()
    assert set(seen) == set(job.buffers.layout.buckets) and len(seen) > 6
    for bucket, begun in seen.items():
        assert torch.equal(begun, job.buffers.bucket_grads(bucket)), bucket
        assert begun.any()
    first = [used[0] for used in stages_of_buckets(job.buffers, job.model.stages)]
    assert job.step.overlapped is not None
    assert (
        job.step.overlapped.begun_in_backward == sum(stage > 0 for stage in first) > len(first) / 2
    )


def test_the_order_is_that_of_the_backward_pass() -> None:
    job = job_of(bf16=True)
    overlapped = job.step.overlapped
    assert overlapped is not None
    stages = [stage for stage, _ in overlapped._queue]
    assert stages == sorted(stages, reverse=True) and {0, 1, len(PATTERN)} >= {stages[-1]}
    found = stages_of_buckets(job.buffers, job.model.stages)
    [embedding] = [s.bucket for s in job.buffers.layout.slots if s.name == "embedding.weight"]
    assert (
        found[embedding][0] == 0 and found[embedding][-1] == len(job.model.stages) - 1
    )  # the embedding is tied, so it is in the first and the last stage


def test_what_gets_no_gradient_holds_nothing_up() -> None:
    """All buckets start their reduction, even with unused experts, empty packs or a frozen
    embedding.
    """
    job = job_of(num_experts=64)
    assert job.step.overlapped is not None
    job.step([MicroBatch.build([], SLOTS, scales=(0.0, 0.0))], 1e-2)
    begun = job.step.overlapped.begun_in_backward
    job.step(packs(1), 1e-2)
    assert begun == job.step.overlapped.begun_in_backward > 0
    job.model.embedding.weight.requires_grad_(False)
    job.step(packs(1), 1e-2)
    assert job.step.overlapped._next == len(job.buffers.layout.buckets)


def test_late_parameters_come_after_the_backward_pass() -> None:
    job = job_of()
    late = [job.model.layers[-1].norm.weight]
    overlapped = OverlappedReduce(job.buffers, ParallelGroups.single(), job.model.stages, late=late)
    [bucket] = {
        s.bucket
        for s in job.buffers.layout.slots
        if s.name == f"layers.{len(PATTERN) - 1}.norm.weight"
    }
    assert {b: s for s, b in overlapped._queue}[job.buffers.layout.buckets[bucket]] == 0


def test_micro_batches_before_the_last_begin_nothing() -> None:
    job = job_of()
    overlapped = job.step.overlapped
    assert overlapped is not None
    begun = []
    forward_backward = job.step.forward_backward
    job.step.forward_backward = lambda mb: (forward_backward(mb), begun.append(overlapped._next))[0]  # type: ignore
    job.step(packs(3), 1e-2)
    total = len(job.buffers.layout.buckets)
    assert (
        begun[:2] == [total, total] and 0 < begun[2] < total
    )  # the index is past the end until the last micro-batch begins


def test_after_a_failed_last_micro_batch_no_other_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failed capture of the last micro-batch, later passes start no reductions."""
    job, expected = job_of(), job_of()
    overlapped = job.step.overlapped
    assert overlapped is not None

    def no_memory(_: MicroBatch) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(job.step, "forward_backward", no_memory)
        job.step.last_micro_batch(packs(1)[0])
    seen = seen_at_start(job, monkeypatch)
    job.step.micro_batch(packs(1)[0])
    assert not seen
    monkeypatch.undo()
    assert torch.equal(job.step(packs(3), 1e-2), expected.step(packs(3), 1e-2))


def test_what_ends_a_step_may_run_again_and_begins_the_same_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last micro-batch can run twice, as for a capture, and starts the same reductions."""
    job = job_of()
    job.step(packs(2), 1e-2)
    overlapped = job.step.overlapped
    assert overlapped is not None
    late = [bucket for stage, bucket in overlapped._queue if stage == 0]
    assert 0 < len(late) < len(job.buffers.layout.buckets)
    for _ in range(2):
        with monkeypatch.context() as patch:
            seen = seen_at_start(job, patch)
            overlapped.finish()
        assert list(seen) == late


def check_replays(
    device: str, backend: GraphBackend | None, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Check that every bucket of a step of replayed layers is complete when its reduction
    starts.
    """
    config = config_of(device, graphs=True, **options)
    job, capture_sizes = (
        build_job(config, ParallelGroups.single(device), VOCAB),
        CaptureSizes.from_capacities([5], SLOTS),
    )
    graphs = build_graphs(
        config, job, capture_sizes, ParallelGroups.single(device), lambda line: None, backend
    )
    assert graphs is not None
    with released(graphs):
        capture_graphs(graphs, job.step, 3, ParallelGroups.single(device))
        job.step.graphs = graphs
        with monkeypatch.context() as patch:
            seen = seen_at_start(job, patch)
            job.step(packs(3, capture_sizes), 1e-2)
        assert graphs.counters.replays == 3 and not graphs.counters.module_fallbacks
    for bucket, begun in seen.items():
        assert begun.any() and torch.equal(begun, job.buffers.bucket_grads(bucket)), bucket
    assert job.step.overlapped is not None and job.step.overlapped.begun_in_backward > len(seen) / 2


def test_a_bucket_is_complete_after_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are complete after replays, although autograd does not see the parameters."""
    check_replays("cpu", RecordingBackend(), monkeypatch)


@pytest.mark.gpu
def test_a_bucket_is_complete_after_replays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_replays("cuda", None, monkeypatch, bf16=True, bucket=100_000, **SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model", [{}, {"untie_embeddings_and_output_weights": True}], ids=["tied", "untied"]
)
def test_a_bucket_is_complete_on_a_gpu(
    model: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where kernels add gradients to the buffer, every bucket is complete when its
    reduction starts.
    """
    job = job_of("cuda", bf16=True, bucket=100_000, **SIZES, **model)
    for _ in range(3):
        with monkeypatch.context() as patch:
            seen = seen_at_start(job, patch)
            job.step(packs(2), 1e-3)
        for bucket, begun in seen.items():
            assert torch.equal(begun, job.buffers.bucket_grads(bucket)), bucket
    assert job.step.overlapped is not None and job.step.overlapped.begun_in_backward > len(seen) / 2
