"""Steady steps on two and four GPUs never wait for the device, in all layouts.

`host_waits.py` checks this in two ways: by torch's sync debug mode and by a profile.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_job import build_job
from support.gpu_layouts import (
    EVERY_LAYOUT,
    LAYOUTS,
    LAYOUTS_OF_FOUR,
    STEPS,
    VOCAB,
    T,
    batches,
    model_of,
    sizes_of,
)
from support.host_waits import assert_no_wait, waiting
from support.process_pools import run_distributed


def steady_steps(
    groups: ParallelGroups, model: ModelConfig, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the host waits found in steady steps. The same number of warm-up steps runs first."""
    config = RunConfig(
        model=model,
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=T, global_batch_size=4),
        optim=OptimizerConfig(lr=1e-4),
        parallel=ParallelConfig(**options),
        training=TrainingConfig(
            train_iters=STEPS,
            bf16=True,
            device="cuda",
            loss_spike_policy="skip",
            loss_spike_window=4,
        ),
    )
    job = build_job(config, groups, VOCAB)
    return waiting(job.step, batches(groups, config.parallel.document_alignment))


@pytest.mark.shows(
    "no host sync",
    of=lambda name, processes: (processes, model_of(name), (LAYOUTS | LAYOUTS_OF_FOUR)[name]),
)
@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("name, processes", EVERY_LAYOUT)
def test_steady_steps_wait_for_nothing(name: str, processes: int) -> None:
    options = (LAYOUTS | LAYOUTS_OF_FOUR)[name]
    for found in run_distributed(
        steady_steps,
        processes,
        model_of(name),
        options,
        backend="nccl",
        layout=sizes_of(options),
        timeout=300,
    ):
        assert found["events"] > 1000 and found["nccl"] > 0
        assert_no_wait(found)
        assert found["to_host"] <= STEPS


@pytest.mark.parametrize("layouts, processes", [(LAYOUTS, 2), (LAYOUTS_OF_FOUR, 4)])
def test_every_layout_is_one_of_as_many_processes(
    layouts: dict[str, dict[str, Any]], processes: int
) -> None:
    """Check the number of processes of each layout, also on machines without a GPU."""
    for options in layouts.values():
        assert (
            ParallelLayout(
                world_size=processes, **ParallelConfig(**options).layout_sizes
            ).world_size
            == processes
        )
