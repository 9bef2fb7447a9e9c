"""Compares whole optimizer steps over changing packs: CUDA graphs, eager, and megatron-core.

    python benchmarks/full_step.py [shard8b] [hybrid1b] [--micro-batches 1 2 4]

Models and weights are those of `model_step.py`. Each micro-batch of a step is copied to the GPU
from page-locked memory and runs forward and backward. Then the step sums and clips the gradients
and updates the weights with AdamW and float32 master weights. No two consecutive micro-batches
contain the same documents.

megatron_packed runs as in training (`TrainStep`), once eagerly and once with ``--cuda-graph-impl
full_iteration``. A step of k micro-batches then launches k + 1 graphs.

megatron-core's model runs eagerly with bf16 gradients, `torch.nn.utils.clip_grad_norm_` and
`torch.optim.AdamW(fused=True)` on bf16 weights. That moves less memory than float32 master weights
do, so megatron_packed is not expected to have the lower GPU-busy time.
"""

from __future__ import annotations

import argparse
import hashlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

import graph_step
import harness
from graph_step import Effort, host_times, over, row_seconds
from harness import Spread
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import build_job
from model_step import (
    CONFIGS,
    DOCUMENTS,
    Theirs,
    begin_alone,
    copy_weights,
    megatron_model,
    model_config,
    packings,
)
from workloads import device_from, pinned, random_documents

COUNTS = (1, 2, 4)
"""Numbers of micro-batches in a step."""
CAPACITIES = (16, 64)
"""Document capacities of the graphs. The packs have 12 documents and replay the smaller capacity.
"""
PACKS = 8
COUNTED = 2
"""Number of calls in which the launches of the host are counted.

The number is small because reading a profile of all operators takes seconds for each call.
"""
LR, CLIP = 1e-5, 1.0
PATHS = {
    "megatron_core": "megatron_core, eager",
    "eager": "megatron_packed, eager",
    "full_iteration": "megatron_packed, whole steps in graphs",
}
FULL, QUICK = Effort(2, 8, 3, 8), Effort(1, 2, 1, 2)


def config_of(c: dict[str, Any], micro_batches: int, device: torch.device) -> RunConfig:
    return RunConfig(
        model=model_config(c),
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=c["T"], global_batch_size=micro_batches),
        optim=OptimizerConfig(lr=LR, clip_grad=CLIP),
        training=TrainingConfig(train_iters=1, bf16=device.type == "cuda", device=device.type),
        cuda_graph=CudaGraphConfig(cuda_graph_impl="full_iteration"),
    )


def steps_of(
    c: dict[str, Any],
    lengths: Sequence[list[int]],
    count: int,
    capture_sizes: CaptureSizes | None,
    device: torch.device,
) -> list[list[MicroBatch]]:
    """Return the packs grouped into steps of ``count`` micro-batches, as a loader returns them.

    Without capture sizes each micro-batch has exactly the size of its documents.
    """
    steps = []
    for first in range(0, len(lengths), count):
        rows = lengths[first : first + count]
        scales = (1 / sum(n - 1 for row in rows for n in row), 1 / count)
        step = []
        for number, row in enumerate(rows, start=first):
            capture_size = (
                None if capture_sizes is None else capture_sizes.smallest_for(len(row), c["T"])
            )
            size = (
                {}
                if capture_size is None
                else {"capacity": capture_size.capacity, "max_seqlen": capture_size.max_seqlen}
            )
            documents = [
                (tokens, None) for tokens in random_documents(row, c["vocab"], 100 + number)
            ]
            step.append(pinned(MicroBatch.build(documents, c["T"], scales=scales, **size), device))
        steps.append(step)
    return steps


class TheirStep:
    """Optimizer step of megatron-core's model with torch's own optimizer."""

    def __init__(
        self, c: dict[str, Any], model: torch.nn.Module, steps: list[list[MicroBatch]]
    ) -> None:
        self.model, self.steps = model, steps
        self.sides = [Theirs(c, model, [one.to("cuda") for one in step]) for step in steps]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, fused=True)

    def step(self, number: int) -> None:
        side = self.sides[number]
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(len(side.batches)):
            side.accumulate(index)
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()


def compared(
    eager: Callable[[list[MicroBatch]], torch.Tensor],
    replayed: Callable[[list[MicroBatch]], torch.Tensor],
    exact: Sequence[list[MicroBatch]],
    placed: Sequence[list[MicroBatch]],
    restore: Callable[[], None],
) -> list[dict[str, float]]:
    """Run the same steps from the same weights eagerly and by replay, and return loss and norm of
    both.
    """
    found: dict[str, list[StepValues]] = {}
    for name, run, steps in (("eager", eager, exact), ("replay", replayed, placed)):
        restore()
        found[name] = [StepValues.from_list(run(step).tolist()) for step in steps]
    return [
        {
            "loss_eager": a.loss,
            "loss_replay": b.loss,
            "grad_norm_eager": a.grad_norm,
            "grad_norm_replay": b.grad_norm,
        }
        for a, b in zip(found["eager"], found["replay"])
    ]


def measured(
    sides: dict[str, Callable[[], object]], calls: int, effort: Effort, graphs: str
) -> dict[str, Any]:
    """Return wall-clock, host and GPU-busy milliseconds of each side's step. The sides take turns.

    Args:
        graphs: name of the side that is also measured as wall-clock over GPU-busy time at the same
            GPU clocks.
    """
    walls = harness.interleaved(sides, warm=effort.warm, repeats=effort.walls)
    hosts = host_times(sides, effort)
    rows: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(effort.rounds):
        for name, function in sides.items():
            rows[name].append(row_seconds(function, calls))
            busy[name].append(harness.gpu_busy(function, calls=calls).milliseconds / 1e3)
    found: dict[str, Any] = {
        name: {
            "wall_ms": walls[name],
            "row_ms": Spread.of(rows[name]),
            "host_ms": hosts[name],
            "busy_ms": Spread.of(busy[name]),
            "row_over_busy": Spread.of_ratios(rows[name], busy[name]),
            "launches": graph_step.host_launches(function, COUNTED),
        }
        for name, function in sides.items()
    }
    settled = [harness.row(sides[graphs], calls=calls) for _ in range(effort.rounds)]
    drained = harness.wall_and_busy(sides[graphs], calls=calls, rounds=effort.rounds)
    found[graphs] |= {
        "drained_over_busy": drained.ratio,
        "settled_row_over_busy": Spread.of_ratios(
            [one.wall for one in settled], [one.busy for one in settled]
        ),
        "span_over_busy": Spread.of_ratios(
            [one.span for one in settled], [one.busy for one in settled]
        ),
    }
    if "megatron_core" in sides:
        found[graphs]["row_over_their_busy"] = Spread.of_ratios(rows[graphs], busy["megatron_core"])
    return found


def run(
    c: dict[str, Any],
    counts: Sequence[int],
    device: torch.device,
    effort: Effort,
    *,
    skip_megatron: bool = False,
    backend: Callable[[], GraphBackend | None] = lambda: None,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Return all measurements of one configuration.

    ``save`` receives the results so far after each number of micro-batches.
    """
    lengths = packings(c["T"], PACKS)
    capture_sizes = CaptureSizes.from_capacities(CAPACITIES, c["T"])
    groups = ParallelGroups.single(device)
    config = config_of(c, max(counts), device)
    job = build_job(config, groups, c["vocab"])
    step = job.step
    state = {name: shard.clone() for name, shard in job.optimizer.state_shards().items()}
    graphs = build_graphs(
        config, job, capture_sizes, groups, lambda line: print(line, flush=True), backend()
    )
    assert isinstance(graphs, FullIterationGraphs), "graphs need a GPU"
    result: dict[str, Any] = {
        "tokens": c["T"],
        "plan_hash": hashlib.sha256(repr(lengths).encode()).hexdigest()[:12],
        "documents": DOCUMENTS,
        "packs": PACKS,
        "capacities": list(CAPACITIES),
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "micro_batches": {},
    }

    def eagerly(micro_batches: list[MicroBatch]) -> torch.Tensor:
        step.graphs = None
        return step(micro_batches, LR)

    def by_replay(micro_batches: list[MicroBatch]) -> torch.Tensor:
        step.graphs = graphs
        return step(micro_batches, LR)

    with released(graphs):
        if device.type == "cuda":
            result["eager_peak"] = peak_gib(over(eagerly, steps_of(c, lengths, 2, None, device)))
        capture_graphs(graphs, step, max(counts), groups, first=True)
        counters = graphs.counters
        result |= {
            "graphs": counters.captures,
            "graph_mib": counters.memory_mib,
            "capture_seconds": counters.capture_seconds,
        }
        if device.type == "cuda":
            result["graphs_peak"] = peak_gib(
                over(by_replay, steps_of(c, lengths, 2, capture_sizes, device))
            )
        theirs_model = None
        if not skip_megatron:
            job.optimizer.load_state(state)
            try:
                theirs_model = megatron_model(c)
            except ImportError as error:
                result["megatron_core"] = f"not measured: {error}"
                print(f"skip megatron-core, its import failed: {error}", flush=True)
            else:
                copy_weights(job.model, theirs_model, c["pattern"])
        for count in counts:
            exact = steps_of(c, lengths, count, None, device)
            placed = steps_of(c, lengths, count, capture_sizes, device)
            found: dict[str, Any] = {
                "comparisons": compared(
                    eagerly, by_replay, exact, placed, lambda: job.optimizer.load_state(state)
                )
            }
            sides: dict[str, Callable[[], object]] = {}
            if theirs_model is not None:
                theirs = TheirStep(c, theirs_model, exact)
                sides["megatron_core"] = over(theirs.step, range(len(exact)))
            sides |= {"eager": over(eagerly, exact), "full_iteration": over(by_replay, placed)}
            calls = (
                len(exact) * -(-effort.calls // (len(exact) * count))
            )  # For every count, a measured row of calls processes about effort.calls micro-batches.
            before = counters.replays
            found["sides"] = measured(sides, calls, effort, "full_iteration")
            assert counters.replays > before and not counters.fallbacks, counters.fallbacks
            result["micro_batches"][str(count)] = found
            save(result)
            print(f"{count} micro-batches: {harness.plain(found)}"[:3000], flush=True)
            if theirs_model is not None:
                del theirs, sides
                harness.free_memory()
    return result


def peak_gib(function: Callable[[], object]) -> dict[str, float]:
    """Return the peak memory of some calls after warm-up, in GiB.

    ``allocated`` counts the memory of tensors, ``reserved`` the memory that the allocator took from
    the device.
    """
    for _ in range(2):
        function()
    harness.free_memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        function()
    harness.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
    }


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each number of micro-batches and each side."""
    return [
        {
            "config": config,
            "micro-batches": count,
            "path": PATHS[path],
            "in a row ms": harness.shown(side["row_ms"]),
            "GPU-busy ms": harness.shown(side["busy_ms"]),
            "wall / busy": harness.shown(side.get("settled_row_over_busy", side["row_over_busy"])),
            "span / busy": harness.shown(side.get("span_over_busy")),
            "host ms": harness.shown(side["host_ms"]),
            "queued by the host": f"{side['launches']:.0f}",
            "plan": result["plan_hash"],
        }
        for config, result in results.items()
        for count, found in sorted(result.get("micro_batches", {}).items())
        for path, side in found["sides"].items()
    ]


def memory_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each configuration: graphs, and peak memory of steps of two micro-batches.

    The peaks are those of megatron_packed, eager and with graphs.
    """
    rows: list[dict[str, object]] = []
    for config, result in results.items():
        row: dict[str, object] = {
            "config": config,
            "capacities": " ".join(map(str, result["capacities"])),
            "graphs": result["graphs"],
            "captured in s": f"{result['capture_seconds']:.1f}",
            "graphs hold MiB": f"{result['graph_mib']:,.0f}",
        }
        for key, name in (("eager_peak", "eager"), ("graphs_peak", "whole steps")):
            row[f"{name}: GiB reserved at the peak"] = (
                f"{result[key]['reserved']:.2f}" if key in result else ""
            )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "configs", nargs="*", default=["shard8b"], help=f"from {list(CONFIGS)} (default: shard8b)"
    )
    parser.add_argument("--micro-batches", nargs="+", type=int, default=COUNTS, choices=COUNTS)
    parser.add_argument("--skip-megatron", action="store_true", help="measure only megatron_packed")
    harness.tilings_argument(parser)
    parser.add_argument("--name", default="full_step", help="name of the result file")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    if device.type != "cuda":
        raise SystemExit("full_step.py captures CUDA graphs and needs a GPU.")
    begin_alone(port=29513)
    harness.tune_over(arguments.tilings)
    results: dict[str, Any] = {}
    failed: list[str] = []
    for name in arguments.configs:

        def save(result: dict[str, Any], name: str = name) -> None:
            results[name] = result
            harness.save(arguments.name, results, folder=arguments.results)

        try:
            run(
                CONFIGS[name],
                arguments.micro_batches,
                device,
                QUICK if arguments.quick else FULL,
                skip_megatron=arguments.skip_megatron,
                save=save,
            )
        except Exception:  # finished measurements are saved; the next configuration can still run
            traceback.print_exc()
            failed.append(name)
        harness.free_memory()
    plain = harness.plain(results)
    for rows in (rows_of(plain), memory_rows_of(plain)):
        if rows:
            print(harness.table(rows))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
