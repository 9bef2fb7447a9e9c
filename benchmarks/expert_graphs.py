"""Compares steps with whole E layers in graphs, with captured routers alone, and without graphs.

    torchrun --nproc_per_node 2 benchmarks/expert_graphs.py [--quick] [--shared-expert-overlap]
        [--tokens N] [--dispatchers alltoall] [--captured eager whole] [--all-to-all-backends NAME ...]
    python benchmarks/expert_graphs.py [--quick]

The share is that of one rank of a model like Nemotron-3-Nano, with 16 experts on each
rank. Both dispatchers run, `alltoall` in graphs once with each backend of `--all-to-all-backends`.
Bounds of expert buffers follow the routing of the first step. The peak is
that of the timed steps plus the graph pool, next to the estimate of `megatron-packed plan`.

`busy` is the share of a step in which a kernel or a copy runs on the first GPU. Kernels of collectives
that wait for the other GPU count. A graph removes the rest at best, if it runs the same kernels.

With one process, the expert-parallel group has one rank: the dispatchers run all their kernels and
copies, and a rank sends rows to itself. No step can overflow there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import harness
from layouts import CAPACITY, QUICK_STEPS, config_of, quick, steps_of
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.collectives import NCCL, SYMMETRIC_MEMORY
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import Axis, ParallelGroups, Unjoined
from megatron_packed.models.estimate.run_estimate import estimates_of, usual
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.models.trace import Imagined
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import build_job
from megatron_packed.training.expert_bounds import ExpertBounds
from workloads import device_from

EAGER, ROUTER, WHOLE = "eager", "router", "whole E layers"
GRAPHS = {
    EAGER: CudaGraphConfig(),
    ROUTER: CudaGraphConfig(
        cuda_graph_impl="local", cuda_graph_modules=("attn", "mamba", "moe_router")
    ),
    WHOLE: CudaGraphConfig(cuda_graph_impl="local"),
}
CAPTURED = {"eager": EAGER, "router": ROUTER, "whole": WHOLE}
"""Names of the kinds of graphs on the command line."""
STEPS, WARM = 16, 6
DISPATCHERS = ("alltoall", "allgather")
PACKS_OF_RANK, EXPERTS_OF_RANK = 2, 16
CONFIG: dict[str, Any] = {
    "T": 8192,
    "pattern": "MEMEM*EMEME",
    "hidden": 2688,
    "heads": 32,
    "groups": 2,
    "ffn": 1856,
    "mamba_heads": 64,
    "mamba_groups": 8,
    "vocab": 32768,
    "expert_ffn": 1856,
}
SHARED_FFN = 3712
ROUTING: dict[str, Any] = {
    "moe_router_topk": 6,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_aux_loss_coeff": 1e-4,
}


class Case(NamedTuple):
    """Kind of graphs, and backend of all-to-alls."""

    kind: str
    backend: str = NCCL

    @classmethod
    def named(cls, name: str) -> Case:
        return cls(*name.split(", "))

    @property
    def name(self) -> str:
        return ", ".join([self.kind] if self.backend == NCCL else self)


def configured(
    c: dict[str, Any],
    world: int,
    dispatcher: str,
    kind: str,
    device: torch.device,
    *,
    backend: str = NCCL,
    dispatch: str = "tokens",
    quick: bool = False,
    shared_expert_overlap: bool = False,
) -> RunConfig:
    """Return the configuration of one dispatcher and one of `GRAPHS`, over ``world`` ranks."""
    options = {"expert_model_parallel_size": world, "moe_token_dispatcher_type": dispatcher}
    options |= {"use_distributed_optimizer": True, **ROUTING}
    options |= {"all_to_all_backend": backend, "moe_dispatch": dispatch}
    if not quick:
        options["moe_shared_expert_intermediate_size"] = SHARED_FFN
        options["moe_shared_expert_overlap"] = shared_expert_overlap
    if kind == WHOLE:  # with two ranks, this is the default of captured experts
        options["moe_expert_rank_capacity_factor"] = "auto"
    config = config_of(c, world * PACKS_OF_RANK, options, device, STEPS)
    return dataclasses.replace(config, cuda_graph=GRAPHS[kind])


def model_of(world: int) -> dict[str, Any]:
    """Return the sizes of the model whose experts are divided over ``world`` ranks."""
    return {**CONFIG, "experts": world * EXPERTS_OF_RANK}


def groups_of(config: RunConfig, device: torch.device) -> ParallelGroups:
    """Return the groups of this process; one process gets an expert-parallel group of itself."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout(world_size=world, **config.parallel.layout_sizes)
    groups = ParallelGroups.create(config.parallel, device, layout=layout)
    if world > 1:
        return groups
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dataclasses.replace(groups, ep=Axis(dist.group.WORLD))


def planned_gib(config: RunConfig, groups: ParallelGroups, vocab: int) -> float:
    """Return the estimate of `megatron-packed plan` for a rank of these groups."""
    like = ParallelGroups.unjoined(config.layout(groups.world_size))
    if groups.world_size == 1:
        like = dataclasses.replace(like, ep=Axis(Unjoined((0,), 0)))
    imagined = Imagined.in_groups(config, like, vocab)
    return usual(estimates_of(config, imagined, CAPACITY)).allocated / 2**30


def run(
    config: RunConfig, groups: ParallelGroups, steps: list[list[MicroBatch]], c: dict[str, Any]
) -> dict[str, Any]:
    """Return tokens per second, peaks and repeats of one configuration; all ranks call it together."""
    cuda = groups.device.type == "cuda"
    mine = [packs[groups.dp.rank :: groups.dp.size] for packs in steps]
    job = build_job(config, groups, c["vocab"])
    packs_per_step = config.packs_per_step()
    bounds = ExpertBounds(job.step, groups, packs_per_step=packs_per_step, say=lambda line: None)
    if bounds.unknown:
        bounds.observe(mine[0])
    sizes = CaptureSizes.from_capacities([CAPACITY], c["T"])
    graphs = build_graphs(config, job, sizes, groups, lambda line: None)
    seconds, held, pool = [], 0, 0.0
    with released(graphs):
        if graphs is not None:
            capture_graphs(graphs, job.step, packs_per_step, groups, first=True)
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
                bounds.make_room()
                job.step.redo(packs, config.optim.lr)
                bounds.raise_for(job.step.layout.counts_of(job.step.numbers.tolist()))
        busy = (
            harness.gpu_busy(lambda: job.step(mine[-1], config.optim.lr)).milliseconds
            if cuda
            else 0.0
        )
        job.step.graphs = None
    job.close()
    tokens = sum(pack.num_real_tokens for pack in steps[-1])
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "step_ms": harness.Spread.of(seconds),
        "busy_share": busy / 1e3 / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 + pool if cuda else 0.0,
        "pool_gib": pool,
        "plan_gib": planned_gib(config, groups, c["vocab"]),
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
                    "of eager": _ratio(speeds, kind, EAGER),
                    "of router": _ratio(speeds, kind, ROUTER),
                    # Older results have no times of steps, or no share.
                    **({"step ms": harness.shown(found["step_ms"])} if "step_ms" in found else {}),
                    **({"busy": f"{found['busy_share']:.2f}"} if "busy_share" in found else {}),
                    "peak GiB": f"{found['peak_gib']:.2f}",
                    "plan GiB": f"{found['plan_gib']:.2f}",
                    "repeated steps": found["repeats"],
                }
            )
    return rows


def _ratio(speeds: dict[str, float], kind: str, to: str) -> str:
    return f"{speeds[kind] / speeds[to]:.2f}" if to in speeds else ""


def cases(dispatcher: str, kinds: Sequence[str], backends: Sequence[str]) -> list[Case]:
    """Return the cases of a dispatcher; only whole E layers exchange parts of equal sizes."""
    found = []
    for kind in kinds:
        exchanges = kind == WHOLE and dispatcher == "alltoall"
        found += [Case(kind, backend) for backend in (backends if exchanges else [NCCL])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.tilings_argument(parser)
    parser.add_argument("--dispatchers", nargs="+", default=DISPATCHERS, choices=DISPATCHERS)
    parser.add_argument("--captured", nargs="+", default=[*CAPTURED], choices=CAPTURED)
    parser.add_argument(
        "--all-to-all-backends", nargs="+", default=[NCCL], choices=(NCCL, SYMMETRIC_MEMORY)
    )
    parser.add_argument(
        "--shared-expert-overlap",
        action="store_true",
        help="run the shared expert beside the dispatch, in all steps; in a result file of its own",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        help=f"tokens of a pack, for a result file of their own (default: {CONFIG['T']:,})",
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.tokens is not None and arguments.tokens < 1:
        parser.error("--tokens must be at least 1.")
    device = torch.device(device_from(arguments.device).type)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 2:
        parser.error(f"this script needs 1 or 2 processes, not {world}")
    apply_environment(TrainingConfig(train_iters=STEPS))
    harness.tune_over(arguments.tilings)
    name = "expert_graphs" if world == 2 else "expert_graphs_one"
    name += "_shared_overlap" if arguments.shared_expert_overlap else ""
    c = model_of(world)
    c = {**quick(c), "experts": 8} if arguments.quick else c
    if arguments.tokens:
        name, c = f"{name}_{arguments.tokens}", {**c, "T": arguments.tokens}
    packs, count = world * PACKS_OF_RANK, QUICK_STEPS if arguments.quick else STEPS
    results: dict[str, Any] = {}
    for dispatcher in arguments.dispatchers:
        results[dispatcher] = {}
        kinds = [CAPTURED[name] for name in arguments.captured]
        for case in cases(dispatcher, kinds, arguments.all_to_all_backends):
            if device.type == "cuda":
                harness.free_memory()
            config = configured(
                c,
                world,
                dispatcher,
                case.kind,
                device,
                backend=case.backend,
                quick=arguments.quick,
                shared_expert_overlap=arguments.shared_expert_overlap,
            )
            groups = groups_of(config, device)
            steps = steps_of(c, packs, count, groups.device)
            results[dispatcher][case.name] = run(config, groups, steps, c)
            if rank == 0:
                harness.save(name, results, folder=arguments.results)
    if rank == 0:
        print(harness.table(rows_of(results)))


if __name__ == "__main__":
    main()
