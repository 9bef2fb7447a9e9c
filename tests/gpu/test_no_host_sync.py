"""No host synchronisation in steady training steps, by both proofs.

``set_sync_debug_mode("error")`` sees torch's own synchronising calls; the profile sees those of every library.
"""

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_packed.config.model import ModelConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.late_metrics import LateMetrics
from megatron_packed.training.train_step import TrainStep, counter_slots, extra_slots

pytestmark = pytest.mark.gpu

T, VOCAB = 2048, 512
SYNCHRONISING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuCtxSynchronize",
                 "cuStreamSynchronize", "cuEventSynchronize", "cudaMemcpy", "cuMemcpyDtoH_v2")  # fmt: skip


def host_batches(count: int) -> list[list[MicroBatch]]:
    """Steps of two pinned micro-batches, one of exact capacity and one padded; every pack holds other documents."""
    random = np.random.default_rng(0)
    steps = []
    for step in range(count):
        batches = []
        for part in range(2):
            lengths = random.integers(1, 2 * T // (3 + step + part), size=2 + step + part)
            documents = [(random.integers(0, VOCAB, length), None) for length in lengths if length]
            while sum(len(tokens) for tokens, _ in documents) > T:
                documents.pop()
            batches.append(MicroBatch.build(documents, T, (None, 32)[part], scales=(1e-3, 0.5)).pin_memory())
        steps.append(batches)
    return steps


@pytest.fixture(scope="module")
def job():
    config = ModelConfig(
        hybrid_layer_pattern="M*-E", hidden_size=256, num_attention_heads=4, num_query_groups=2,
        kv_channels=64, ffn_hidden_size=512, squared_relu=True, normalization="RMSNorm",
        add_bias_linear=False, position_embedding_type="rope", mamba_num_heads=8, mamba_head_dim=64,
        mamba_state_dim=64, mamba_num_groups=2, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256,
        moe_shared_expert_intermediate_size=256, moe_aux_loss_coeff=1e-2, moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
    )  # fmt: skip
    groups = ParallelGroups.single(torch.device("cuda", 0))
    model = HybridModel(config, vocab_size=VOCAB, max_positions=T, device="cuda", dtype=torch.bfloat16).train()
    buffers = FlatBuffers(model, extras=extra_slots(groups), counters=counter_slots(model))
    return TrainStep(model, buffers, Optimizer(buffers), groups)


def run(step: TrainStep, late: LateMetrics, steps: list[list[MicroBatch]]) -> list[list[float]]:
    arrived = [late.push(number, step(batches, 1e-4)) for number, batches in enumerate(steps)]
    return [one.values for one in arrived if one is not None]


def test_ten_steady_steps_wait_for_nothing(job):
    late = LateMetrics(job.metrics.numel(), torch.device("cuda"))
    run(job, late, host_batches(10))  # compiles and tunes for every shape there is
    late.flush()
    steps = host_batches(10)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        values = run(job, late, steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(values) == 9 and np.isfinite(values).all()
    late.flush()

    steps = host_batches(10)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler, record_function("steady_steps"):
        run(job, late, steps)
    late.flush()
    events = profiler.events()
    window = next(e for e in events if e.name == "steady_steps").time_range
    inside = [e for e in events if window.start <= e.time_range.start and e.time_range.end <= window.end]
    assert len(inside) > 1000  # the profile did see the steps
    waits = sorted({e.name for e in inside if e.name in SYNCHRONISING})
    copies = sorted({e.name for e in inside if "Memcpy" in e.name and "Pageable" in e.name})
    assert waits == [] and copies == [], (waits, copies)
    to_host = [e for e in inside if e.name.startswith("Memcpy DtoH")]
    assert len(to_host) <= 10  # the late metrics, one per step


def test_the_proofs_see_a_planted_wait(job):
    batches = host_batches(1)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            job(batches, 1e-4)[0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
