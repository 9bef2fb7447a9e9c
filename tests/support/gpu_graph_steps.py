"""Steps with graphs on GPUs: configurations, changing packs, and a job's state.

Importing this module sets the variables of deterministic libraries.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The libraries read these at import or first use; child processes inherit them.
os.environ |= {
    "MAMBA_DETERMINISTIC": "1",
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
    "TRITON_CACHE_AUTOTUNING": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_GRAPH_REGISTER": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}

import numpy as np
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.cuda_graphs.step_graphs import StepGraphs
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from support.gpu_layouts import LAYOUTS, LAYOUTS_OF_FOUR, MODEL, VOCAB, T

CAPTURE_SIZES = CaptureSizes.from_capacities([8, 32], T)
STEPS, PACKS, EPOCHS = 25, 4, 4
OVERFLOWS = 3
"""Number of the step in which a pack of the first data-parallel rank exceeds all capture sizes."""


def steps_of(groups: ParallelGroups, alignment: int, *, overflow: bool) -> list[list[MicroBatch]]:
    """Return this rank's pinned packs by step.

    Micro-batch i has the same capture size on all ranks, or none has a capture size for it.
    """
    random, steps = np.random.default_rng(0), []
    for number in range(STEPS):
        packs = []
        for _ in range(PACKS):
            lengths = random.integers(1, T // 32, size=random.integers(1, 30))
            packs.append([(random.integers(0, VOCAB, length), None) for length in lengths])
        if overflow and number == OVERFLOWS:
            packs[0] = [(random.integers(0, VOCAB, 20), None) for _ in range(40)]
        main, *depths = (
            1 / sum(max(len(tokens) - ahead, 0) for pack in packs for tokens, _ in pack)
            for ahead in (1, 2, 3)
        )
        scales = (main, 1 / PACKS, *depths)
        mine = []
        for first in range(0, PACKS, groups.dp.size):
            together = packs[first : first + groups.dp.size]
            most = max(map(len, together))
            capture_size = CAPTURE_SIZES.smallest_for(most, T)
            room = (
                (most, None)
                if capture_size is None
                else (capture_size.capacity, capture_size.max_seqlen)
            )
            mine.append(
                MicroBatch.build(
                    together[groups.dp.rank], T, room[0], scales, room[1], alignment
                ).pin_memory()
            )
        steps.append(mine)
    return steps


def options_of(name: str, impl: str) -> dict[str, Any]:
    """Return the options of a layout; graphs of whole steps gather all parameters at their end."""
    late = {"overlap_param_gather"} if impl == "full_iteration" else set()
    return {
        option: value
        for option, value in (LAYOUTS | LAYOUTS_OF_FOUR)[name].items()
        if option not in late
    }


def with_graphs(config: RunConfig, impl: str) -> RunConfig:
    return dataclasses.replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))


@contextmanager
def captured(
    config: RunConfig, groups: ParallelGroups, job: Job | None = None
) -> Iterator[tuple[Job, StepGraphs]]:
    """Yield a job whose steps replay graphs, and its graphs."""
    job = job or build_job(config, groups, VOCAB)
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print)
    assert graphs is not None
    with released(graphs):
        capture_graphs(graphs, job.step, PACKS, groups, first=True)
        job.step.graphs = graphs
        yield job, graphs


DEVICE = torch.device("cuda", 0)
GATHERED_LATER = {"overlap_param_gather"}
"""Options that graphs of whole steps do not support."""


def config_of(
    model: ModelConfig = MODEL, tokens: int = T, *, deterministic: bool = True, **parallel: Any
) -> RunConfig:
    return RunConfig(
        model=model,
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=tokens, global_batch_size=PACKS),
        optim=OptimizerConfig(lr=1e-3),
        parallel=ParallelConfig(
            **{name: value for name, value in parallel.items() if name not in GATHERED_LATER}
        ),
        training=TrainingConfig(
            train_iters=8,
            bf16=True,
            device="cuda",
            deterministic_mode=deterministic,
            loss_spike_policy="skip",
            loss_spike_window=4,
        ),
        logging=LoggingConfig(log_params_norm=True, log_num_zeros_in_grad=True),
    )


def state_of(job: Job) -> dict[str, torch.Tensor]:
    """Return copies of everything that the next step depends on."""
    tensors = (
        dict(job.model.state_dict())
        | dict(job.model.named_buffers())
        | job.optimizer.state_shards()
    )
    assert job.optimizer.spikes is not None
    tensors["spikes"] = job.optimizer.spikes.recent
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
