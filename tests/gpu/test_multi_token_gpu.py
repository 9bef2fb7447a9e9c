"""Multi-token prediction on a GPU: replay equals eager on changing packs, without waits, and bf16
losses are those of float32.
"""

from __future__ import annotations

import pytest
import torch

from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.backends import Backends
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import check_isolation
from megatron_packed.training.build_job import build_job
from support.gpu_graph_steps import (
    DEVICE,
    PACKS,
    STEPS,
    captured,
    config_of,
    different,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import MODEL, VOCAB, T, with_depths
from support.host_waits import assert_no_wait, waiting

pytestmark = pytest.mark.gpu

CONFIG = config_of(with_depths(MODEL))
"""Two depths that share their layers, with latent experts in groups."""


@pytest.fixture
def groups() -> ParallelGroups:
    configure_determinism()
    return ParallelGroups.single(DEVICE)


@pytest.mark.shows(lambda impl: f"graphs: {impl}", of=lambda: (1, CONFIG))
@pytest.mark.parametrize("impl", ["local", "full_iteration", "transformer_engine"])
def test_replay_equals_eager_over_a_hundred_packs_and_waits_for_nothing(
    groups: ParallelGroups, impl: str
) -> None:
    eager = build_job(CONFIG, groups, VOCAB)
    with captured(with_graphs(CONFIG, impl), groups) as (job, graphs):
        steps = steps_of(groups, 1, overflow=True)
        for number, packs in enumerate(steps):
            metrics = [one.step(packs, 1e-3).clone() for one in (eager, job)]
            assert torch.equal(*metrics) and metrics[0].isfinite().all(), number
            losses = metrics[1][job.step.layout.slots["mtp_losses"]]
            assert losses.shape == (2,) and losses.min() > 1, number
        assert different(state_of(job), state_of(eager)) == []
        # One pack of the fourth step has more documents than the largest capture size.
        assert graphs.counters.replays == STEPS * PACKS - 1
        assert not graphs.counters.module_fallbacks
        found = waiting(job.step, steps_of(groups, 1, overflow=False)[:10])
        assert found["launches"] > 0, found
        assert_no_wait(found)
    torch.use_deterministic_algorithms(False)


@pytest.mark.shows("no host sync", of=lambda: (1, CONFIG))
def test_steady_eager_steps_wait_for_nothing(groups: ParallelGroups) -> None:
    job = build_job(CONFIG, groups, VOCAB)
    assert_no_wait(waiting(job.step, steps_of(groups, 1, overflow=False)[:10]))
    torch.use_deterministic_algorithms(False)


@pytest.mark.shows("isolation", of=lambda: (1, CONFIG))
def test_shifts_keep_documents_apart() -> None:
    results = check_isolation(CONFIG.model, DEVICE, torch.bfloat16, Backends())
    assert [str(one) for one in results if not one.passed] == []
    assert [one.quantity for one in results if one.symbol == "/"] == ["outputs", "input gradients"]


def test_losses_of_bf16_kernels_are_those_of_float32() -> None:
    [[batch, *_], *_] = steps_of(ParallelGroups.single(DEVICE), 1, overflow=False)
    losses = []
    for dtype, backends in ((torch.bfloat16, Backends()), (torch.float32, Backends.reference())):
        model = HybridModel(
            CONFIG.model,
            vocab_size=VOCAB,
            max_positions=T,
            device=DEVICE,
            dtype=dtype,
            seed=7,
            backends=backends,
        ).train()
        output = model.forward_backward(batch.to(DEVICE))
        losses.append(torch.stack([output.loss_sum, *output.depth_loss_sums]))
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0)
