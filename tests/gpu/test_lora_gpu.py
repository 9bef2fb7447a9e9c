"""Runs with adapters: replayed steps equal eager ones, nothing waits, documents are isolated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.lora import is_adapter
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_job import Job, build_job
from support import gpu_graph_steps, gpu_layouts
from support.gpu_graph_steps import (
    DEVICE,
    PACKS,
    STEPS,
    config_of,
    different,
    options_of,
    state_of,
    steps_of,
)
from support.gpu_layouts import MODEL, VOCAB, T, host_batches, sizes_of
from support.gpu_memory_modes import captured, compared, run
from support.host_waits import assert_no_wait, waiting
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu

STEADY = 10
LAYERS = dataclasses.replace(
    MODEL, hybrid_layer_pattern="MG*-E", lora_rank=8, lora_alpha=16.0, lora_dropout=0.1
)
LOW_STATE = OptimizerConfig(
    lr=1e-3, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
)
ISOLATED = ModelConfig(
    **gpu_layouts.LAYERS, hybrid_layer_pattern="MG*-", lora_rank=8, lora_alpha=16.0
)
"""A model without experts, which couple documents by design."""
LAYOUTS = {
    "tp2 sp": {},
    "ep2 zero overlap": {},
    "cp2 a2a": {},
}
"""Layouts of two ranks, and changes of the model."""


def adapted(**optimizer: Any) -> RunConfig:
    config = config_of(LAYERS)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, **optimizer))


def assert_adapters_alone(job: Job) -> None:
    """Check that exactly the factors of adapters are trained, in every kind of layer."""
    trained = set(job.buffers.parameters)
    assert trained and all(map(is_adapter, trained))
    kinds = ("qkv", "in_proj", "out_proj", "experts.fc1_lora", "experts.fc2_lora")
    assert [kind for kind in kinds if not any(kind in name for name in trained)] == []


@pytest.fixture(scope="module", name="eager")
def _eager(groups: ParallelGroups) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the metrics of eager steps over a hundred packings, and the state after them."""
    job = build_job(adapted(), groups, VOCAB)
    assert_adapters_alone(job)
    frozen = {name: p.clone() for name, p in job.model.named_parameters() if not p.requires_grad}
    metrics = run(job, steps_of(groups, 1, overflow=True))
    for name, parameter in job.model.named_parameters():
        if parameter.requires_grad:
            assert parameter.any(), f"{name} was not trained"
        else:
            assert torch.equal(parameter, frozen[name]), f"the base changed: {name}"
    return metrics, state_of(job)


@pytest.mark.shows(lambda impl: f"graphs: {impl}", of=lambda: (1, LAYERS))
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_a_hundred_replayed_packings_are_the_eager_ones_and_wait_for_nothing(
    impl: str, eager: tuple[list[Tensor], dict[str, Tensor]], groups: ParallelGroups
) -> None:
    """Metrics and state are equal to the bit; one pack fits no graph, and its step is eager."""
    config = dataclasses.replace(adapted(), cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    with captured(config, groups) as (job, graphs):
        assert_adapters_alone(job)
        compared(job, run(job, steps_of(groups, 1, overflow=True)), eager)
        counters = graphs.counters
        assert (counters.replays, counters.fallbacks.total()) == (STEPS * PACKS - 1, 1)
        assert not counters.module_fallbacks
        found = waiting(job.step, steps_of(groups, 1, overflow=False)[:STEADY])
        assert found["launches"] > 0, found
        assert_no_wait(found)


@pytest.mark.shows("no host sync", of=lambda: (1, LAYERS))
def test_eager_steps_wait_for_nothing(groups: ParallelGroups) -> None:
    job = build_job(adapted(), groups, VOCAB)
    found = waiting(job.step, host_batches(STEADY))
    assert found["events"] > 1000  # the profile recorded the steps
    assert_no_wait(found)
    assert found["to_host"] <= STEADY  # one late copy of the metrics for each step


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_adapters_with_state_in_bf16_replay_the_eager_steps(
    impl: str, groups: ParallelGroups
) -> None:
    config = dataclasses.replace(config_of(LAYERS, main_grads_dtype="bf16"), optim=LOW_STATE)
    eager = build_job(config, groups, VOCAB)
    steps = steps_of(groups, 1, overflow=True)[:5]
    expected = run(eager, steps), state_of(eager)
    config = dataclasses.replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    with captured(config, groups) as (job, _):
        compared(job, run(job, steps), expected)


@pytest.mark.shows("isolation", of=lambda: (1, ISOLATED))
def test_documents_do_not_touch_each_other(groups: ParallelGroups) -> None:
    """After one document changed, the losses of the others have the same bits."""
    config = config_of(ISOLATED)
    job = build_job(config, groups, VOCAB)
    run(job, steps_of(groups, 1, overflow=False)[:3])  # now no B is zero
    lengths = [300, 1, 200, 129, 100]
    base = [(torch.arange(n).numpy() % VOCAB, None) for n in lengths]
    changed = list(base)
    changed[2] = ((base[2][0] + 1) % VOCAB, None)
    losses = []
    for documents in (base, changed):
        pack = MicroBatch.build(documents, T, 32, (1e-3, 0.5, 1e-3, 1e-3))
        losses.append(job.model(pack.to(DEVICE)).per_token_loss_T.clone())
    rows = slice(sum(lengths[:2]), sum(lengths[:3]))
    others = torch.ones(T, dtype=torch.bool, device=DEVICE)
    others[rows] = False
    assert not torch.equal(losses[0][rows], losses[1][rows])
    assert torch.equal(losses[0][others], losses[1][others])


def compare(groups: ParallelGroups, layout: str, impl: str) -> dict[str, Any]:
    """Compare replayed with eager steps in a layout."""
    configure_determinism()
    model = dataclasses.replace(LAYERS, **LAYOUTS[layout])
    config = config_of(model)
    config = dataclasses.replace(config, parallel=ParallelConfig(**options_of(layout, impl)))
    eager = build_job(config, groups, VOCAB)
    # A bound that cannot overflow, because these steps are not repeated.
    model = dataclasses.replace(config.model, moe_expert_rank_capacity_factor=8.0)
    graphs_of_run = CudaGraphConfig(cuda_graph_impl=impl)
    config = dataclasses.replace(config, model=model, cuda_graph=graphs_of_run)
    with gpu_graph_steps.captured(config, groups) as (job, graphs):
        steps = steps_of(groups, config.parallel.document_alignment, overflow=False)[:STEADY]
        metrics = [run(one, steps) for one in (eager, job)]
        for one in (eager, job):
            one.buffers.wait_params()
        found = {
            "finite": all(bool(one.isfinite().all()) for one in metrics[0]),
            "equal": [torch.equal(*pair) for pair in zip(*metrics, strict=True)],
            "different": different(state_of(job), state_of(eager)),
            "replays": graphs.counters.replays,
            "fallbacks": graphs.counters.fallbacks.total(),
        }
        return found | waiting(job.step, steps)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_replay_the_eager_steps(layout: str, impl: str, nccl_pools: WorkerPools) -> None:
    sizes = sizes_of(options_of(layout, impl))
    for found in nccl_pools.run(compare, 2, layout, impl, layout=sizes, timeout=300):
        assert found["finite"] and found["equal"] == [True] * STEADY, found
        assert not found["different"] and found["replays"] > 0, found
        assert found["fallbacks"] == 0 and found["launches"] > 0, found
        assert_no_wait(found)
