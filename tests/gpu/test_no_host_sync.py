"""Steady training steps never wait for the device.

`host_waits.py` checks this in two ways: by torch's sync debug mode and by a profile.
"""

import pytest
import torch

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.metrics_layout import MetricsLayout
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.optim.spikes import SpikeDetector
from megatron_packed.training.train_step import TrainStep
from support.gpu_layouts import MODEL, VOCAB, T, host_batches
from support.host_waits import assert_no_wait, waiting

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def job():
    groups = ParallelGroups.single(torch.device("cuda", 0))
    model = HybridModel(
        MODEL, vocab_size=VOCAB, max_positions=T, device="cuda", dtype=torch.bfloat16
    ).train()
    layout = MetricsLayout.from_model(model, groups)
    buffers = FlatBuffers(model, extras=layout.extras, counters=layout.counters)
    spikes = SpikeDetector(window=128, factors=(3.0, 10.0), skip=True, device=groups.device)
    return TrainStep(model, buffers, Optimizer(buffers, spikes=spikes), groups)


@pytest.mark.shows("no host sync", of=lambda: (1, MODEL))
def test_ten_steady_steps_wait_for_nothing(job):
    found = waiting(job, host_batches(10))
    assert len(found["values"]) == 18
    assert found["events"] > 1000  # the profile recorded the steps
    assert_no_wait(found)
    assert found["to_host"] <= 10  # one late copy of the metrics for each step


def test_the_proofs_see_a_planted_wait(job):
    batches = host_batches(1)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            job(batches, 1e-4)[0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
