"""Compares steps with whole E layers in graphs, with captured routers alone, and without graphs.

    torchrun --nproc_per_node 2 benchmarks/expert_graphs.py [--quick]

The share is that of one rank of a model like Nemotron-3-Nano (`moe_bench.py`), with 16 experts on each
of two ranks. Both dispatchers run. Bounds of expert buffers follow the routing of the first step. The
peak is that of the timed steps plus the graph pool, next to the estimate of `megatron-packed plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from typing import Any

import torch

import harness
import moe_bench
from layouts import CAPACITY, QUICK_STEPS, config_of, quick, steps_of
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import build_job
from megatron_packed.training.expert_bounds import ExpertBounds
from megatron_packed.training.metrics_layout import StepValues
from megatron_packed.training.run_estimate import estimates, usual
from workloads import device_from

EAGER, ROUTER, WHOLE = "eager", "router", "whole E layers"
GRAPHS = {
    EAGER: CudaGraphConfig(),
    ROUTER: CudaGraphConfig(
        cuda_graph_impl="local", cuda_graph_modules=("attn", "mamba", "moe_router")
    ),
    WHOLE: CudaGraphConfig(cuda_graph_impl="local"),
}
STEPS, WARM, PACKS = 16, 6, 4


def run(
    config: RunConfig, groups: ParallelGroups, steps: list[list[MicroBatch]], c: dict[str, Any]
) -> dict[str, Any]:
    """Return tokens per second, peaks and repeats of one configuration; all ranks call it together."""
    cuda = groups.device.type == "cuda"
    mine = [packs[groups.dp_rank :: groups.dp_size] for packs in steps]
    job = build_job(config, groups, c["vocab"])
    bounds = ExpertBounds(job.step, groups, packs_per_step=PACKS, say=lambda line: None)
    if bounds.unknown:
        bounds.observe(mine[0])
    sizes = CaptureSizes.of([CAPACITY], c["T"])
    graphs = build_graphs(config, job, sizes, groups, lambda line: None)
    seconds, held, pool = [], 0, 0.0
    with released(graphs):
        if graphs is not None:
            capture_graphs(graphs, job.step, PACKS, groups, first=True)
            job.step.graphs, pool = graphs, graphs.counters.memory_mib / 1024
        for number, packs in enumerate(mine):
            if cuda and number == min(WARM, len(mine) // 2):
                torch.cuda.reset_peak_memory_stats()
            harness.synchronize()
            begun = time.perf_counter()
            metrics = job.step(packs, config.optim.lr)
            harness.synchronize()
            if number >= min(WARM, len(mine) // 2):
                seconds.append(time.perf_counter() - begun)
            if StepValues.from_list(metrics.tolist()).held:
                held += 1
                job.step.redo(packs, config.optim.lr)
        job.step.graphs = None
    tokens = sum(pack.num_real_tokens for pack in steps[-1])
    plan = usual(estimates(config, groups.world_size, c["vocab"], CAPACITY))
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 + pool if cuda else 0.0,
        "pool_gib": pool,
        "plan_gib": plan.allocated / 2**30,
        "repeats": held,
        "bounds": job.model.expert_room.bounds,
    }


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each dispatcher and kind of graphs."""
    rows: list[dict[str, object]] = []
    for dispatcher, kinds in results.items():
        speeds = {kind: found["tokens_per_second"] for kind, found in kinds.items()}
        for kind, found in kinds.items():
            rows.append(
                {
                    "dispatcher": dispatcher,
                    "captured": kind,
                    "tokens/s": round(speeds[kind]),
                    "of eager": f"{speeds[kind] / speeds[EAGER]:.2f}",
                    "of router": f"{speeds[kind] / speeds[ROUTER]:.2f}",
                    "peak GiB": f"{found['peak_gib']:.2f}",
                    "plan GiB": f"{found['plan_gib']:.2f}",
                    "repeated steps": found["repeats"],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = torch.device(device_from(arguments.device).type)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world != 2:
        parser.error(f"this script needs 2 processes, not {world}; start it with torchrun")
    apply_environment(TrainingConfig(train_iters=STEPS))
    c: dict[str, Any] = {**moe_bench.CONFIG, "experts": 32}
    c = {**quick(c), "experts": 8} if arguments.quick else c
    results: dict[str, Any] = {}
    for dispatcher in ("allgather", "alltoall"):
        results[dispatcher] = {}
        options = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": dispatcher}
        options |= {"use_distributed_optimizer": True, **moe_bench.ROUTER}
        if not arguments.quick:
            options["moe_shared_expert_intermediate_size"] = moe_bench.SHARED_FFN
        for kind, graph_options in GRAPHS.items():
            if device.type == "cuda":
                harness.free_memory()
            config = config_of(c, PACKS, options, device, STEPS)
            config = dataclasses.replace(config, cuda_graph=graph_options)
            layout = ParallelLayout(world_size=world, **config.parallel.layout_sizes)
            groups = ParallelGroups.create(config.parallel, device, layout=layout)
            count = QUICK_STEPS if arguments.quick else STEPS
            steps = steps_of(c, PACKS, count, groups.device)
            results[dispatcher][kind] = run(config, groups, steps, c)
    if rank == 0:
        print(harness.table(rows_of(results)))
        harness.save("expert_graphs", results, folder=arguments.results)


if __name__ == "__main__":
    main()
