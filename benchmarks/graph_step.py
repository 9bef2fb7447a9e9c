"""Compares forward and backward with a CUDA graph per layer to eager steps and to megatron-core.

    python benchmarks/graph_step.py [shard8b] [hybrid1b] [--capacities N ...] [--lengths FILE] [--packs N]

Models and weights are those of `model_step.py`. The packing changes with every micro-batch.
Micro-batches come from page-locked memory, as from a loader, and each megatron_packed step includes
the copy to the GPU. All layers are captured; embedding, final norm and loss run eagerly.

The captured document capacities are the largest number of documents in a pack (the exact capacity)
and the given capacities. Each pack is replayed at the smallest capacity that is large enough. Then
all packs are replayed at every capacity that is large enough for all of them. This measures
wall-clock over GPU-busy time at the same clocks, and the cost of a larger capacity.

``--lengths`` reads the lengths of real documents, one number per line. Documents longer than a pack
are cut, and the packer fills the packs. Without the option the packings are those of
`model_step.py`, with 12 documents each.
"""

from __future__ import annotations

import argparse
import hashlib
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import harness
from harness import Spread
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.data.packing.packer import Packer
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from model_step import (
    CONFIGS,
    Theirs,
    begin_alone,
    copy_weights,
    megatron_model,
    our_model,
    packings,
)
from workloads import device_from, pinned, random_documents

CAPACITIES = (16, 64, 512)
LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
"""Prefixes of the CUDA calls with which the host queues work on the device."""
PATHS = {
    "megatron_core": "megatron_core, eager",
    "eager": "megatron_packed, eager",
    "graphs": "megatron_packed, a graph per layer",
}


class Effort(NamedTuple):
    """Numbers of repetitions of each kind of measurement."""

    warm: int
    walls: int
    """Number of calls of each side that are timed one by one with wall-clock."""
    rounds: int
    """Number of rounds in which the sides take turns to run a row of calls and a profile."""
    calls: int
    """Smallest number of calls in a row."""


FULL, QUICK = Effort(2, 12, 3, 8), Effort(1, 2, 1, 2)


def packs_of(c: dict[str, Any], count: int, path: Path | None) -> list[list[int]]:
    """Return the lengths of the documents of each pack.

    Raises:
        SystemExit: the documents of the file fill fewer than ``count`` packs.
    """
    if path is None:
        return packings(c["T"], count)
    lengths = np.clip(np.loadtxt(path, dtype=np.int64, ndmin=1), 1, c["T"])
    packs = Packer(slots=c["T"]).pack(lengths, seed=0)
    if len(packs) < count:
        raise SystemExit(
            f"{path.name} fills only {len(packs)} packs of {c['T']} tokens; use a smaller --packs."
        )
    return [lengths[packs[number]].tolist() for number in range(count)]


def host_batch(
    c: dict[str, Any],
    lengths: list[int],
    number: int,
    capture_size: CaptureSize | None,
    device: torch.device,
) -> MicroBatch:
    """Return pack ``number`` as the loader returns it, padded to a capture size.

    Without a capture size the micro-batch has exactly the size of its documents.
    """
    documents = [(tokens, None) for tokens in random_documents(lengths, c["vocab"], 100 + number)]
    size = (
        {}
        if capture_size is None
        else {"capacity": capture_size.capacity, "max_seqlen": capture_size.max_seqlen}
    )
    targets = max(sum(n - 1 for n in lengths), 1)
    return pinned(MicroBatch.build(documents, c["T"], scales=(1 / targets, 1.0), **size), device)


class Ours:
    """Model of megatron_packed that runs eagerly or with graphs."""

    def __init__(self, c: dict[str, Any], device: torch.device) -> None:
        self.c, self.device = c, device
        self.model = our_model(c, device).train()
        self.buffers = FlatBuffers(self.model)
        self.runner: LayerGraphs | None = None

    def capture(
        self, capture_sizes: CaptureSizes, lengths: list[list[int]], backend: GraphBackend | None
    ) -> LayerGraphs:
        """Capture graphs of all layers.

        Kernels are tuned on the first pack that fits each capture size. If no pack fits, they are
        tuned on documents of equal length.
        """

        def dummy(capture_size: CaptureSize) -> MicroBatch:
            fitting = [row for row in lengths if len(row) <= capture_size.capacity]
            row = (
                fitting[0]
                if fitting
                else [self.c["T"] // capture_size.capacity] * capture_size.capacity
            )
            return host_batch(self.c, row, 0, capture_size, self.device)

        layers = {f"layers.{number}": layer for number, layer in enumerate(self.model.layers)}
        self.runner = LayerGraphs(
            layers,
            self._run,
            total_tokens=self.c["T"],
            capture_sizes=capture_sizes,
            device=self.device,
            tables=self.model.pack_tables.derive,
            check=self.model.pack_tables.check,
            backend=backend,
        )
        self.runner.capture(dummy)
        return self.runner

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
        self.runner = None
        harness.free_memory()

    def eager(self, micro_batch: MicroBatch) -> Tensor:
        if self.runner is not None:
            self.runner.slot.vacate()
        return self._run(micro_batch.to(self.device, non_blocking=True))

    def replay(self, micro_batch: MicroBatch) -> Tensor:
        assert self.runner is not None
        return self._run(self.runner.place(micro_batch))

    def _run(self, micro_batch: MicroBatch) -> Tensor:
        return self.model.forward_backward(micro_batch).loss

    def results(
        self, run: Callable[[MicroBatch], Tensor], micro_batch: MicroBatch
    ) -> tuple[float, Tensor]:
        """Return the loss and a copy of all gradients."""
        self.buffers.zero_grad()
        return run(micro_batch).item(), self.buffers.grads.clone()


def over(run: Callable[[Any], object], items: Sequence[Any]) -> Callable[[], object]:
    """Return a function whose every call runs the next item, in a cycle."""
    following = cycle(items)
    return lambda: run(next(following))


def host_times(functions: dict[str, Callable[[], object]], effort: Effort) -> dict[str, Spread]:
    """Return the milliseconds until each function returns to the host. The functions take turns.

    The device is drained before each call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(effort.walls):
        for name, function in functions.items():
            harness.synchronize()
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    harness.synchronize()
    return {name: Spread.of(values) for name, values in seconds.items()}


def row_seconds(function: Callable[[], object], calls: int) -> float:
    """Return the seconds per call in a row of calls that is drained only at its end.

    The measured row directly follows a row that is not counted.
    """
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        harness.synchronize()
        seconds = (time.perf_counter() - start) / calls
    return seconds


def host_launches(function: Callable[[], object], calls: int) -> float:
    """Return the kernels, graphs, copies and memsets that the host queues in each call."""
    from torch.profiler import ProfilerActivity, profile

    harness.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            function()
        harness.synchronize()
    return sum(event.name.startswith(LAUNCHES) for event in profiler.events()) / calls


def peak(function: Callable[[], object], calls: int) -> dict[str, float]:
    """Return the peak memory of some calls after warm-up, in GiB.

    ``allocated_gib`` counts the memory of tensors, ``reserved_gib`` the memory that the allocator
    took from the device.
    """
    function()
    harness.free_memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(calls):
        function()
    harness.synchronize()
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def comparisons(
    ours: Ours, replayed: list[MicroBatch], exact: list[MicroBatch]
) -> list[dict[str, Any]]:
    """Compare replay and eager for each pack; eager runs use the exact size of the documents.

    Gradients are compared by the relative norm of their difference. Two eager runs of the same pack
    are compared in the same way.
    """
    found = []
    for placed, plain in zip(replayed, exact):
        loss_replay, replay = ours.results(ours.replay, placed)
        loss_eager, eager = ours.results(ours.eager, plain)
        again = ours.results(ours.eager, plain)[1]
        norm = eager.norm().item()
        found.append(
            {
                "documents": plain.packed.num_seqs,
                "capacity": placed.layout.capacity,
                "loss_replay": loss_replay,
                "loss_eager": loss_eager,
                "grad_difference": (replay - eager).norm().item() / norm,
                "eager_against_eager": (again - eager).norm().item() / norm,
                "finite": bool(torch.isfinite(replay).all()),
            }
        )
    return found


def memory_of(
    ours: Ours,
    capture_sizes: CaptureSizes,
    lengths: list[list[int]],
    exact: list[MicroBatch],
    replayed: list[MicroBatch],
    backend: Callable[[], GraphBackend | None],
) -> dict[str, Any]:
    """Return the memory of graphs for the largest capture size only, and for all capture sizes.

    The results also contain the peaks of eager steps before the capture and of replayed steps after
    it.
    """
    on_gpu = ours.device.type == "cuda"
    found: dict[str, Any] = {"capacities": list(capture_sizes.capacities)}
    if on_gpu:
        found["eager"] = peak(over(ours.eager, exact), len(exact))
    alone = ours.capture(CaptureSizes(capture_sizes.sizes[-1:]), lengths, backend())
    found["one_capacity_mib"] = alone.counters.memory_mib
    ours.close()
    counters = ours.capture(capture_sizes, lengths, backend()).counters
    found |= {
        "mib": counters.memory_mib,
        "over_one_capacity": counters.memory_mib / max(found["one_capacity_mib"], 1e-9),
        "captures": counters.captures,
        "capture_seconds": counters.capture_seconds,
    }
    if on_gpu:
        found["graphs"] = peak(over(ours.replay, replayed), len(replayed))
        held = found["graphs"]["allocated_gib"] + counters.memory_mib / 1024
        found["held_over_eager"] = held / found["eager"]["allocated_gib"]
        found["reserved_over_eager"] = (
            found["graphs"]["reserved_gib"] / found["eager"]["reserved_gib"]
        )
    return found


def measured_sides(
    sides: dict[str, Callable[[], object]], packs: int, effort: Effort
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return wall-clock, host and GPU-busy milliseconds of each side, and the busy seconds by
    round.

    Args:
        packs: number of packs that each side cycles through.
    """
    calls = calls_for(packs, effort)
    walls = harness.interleaved(sides, warm=effort.warm, repeats=effort.walls)
    hosts = host_times(sides, effort)
    rows: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(effort.rounds):
        for name, function in sides.items():
            rows[name].append(row_seconds(function, calls))
            busy[name].append(harness.gpu_busy(function, calls=calls).milliseconds / 1e3)
    found = {
        name: {
            "wall_ms": walls[name],
            "row_ms": Spread.of(rows[name]),
            "host_ms": hosts[name],
            "busy_ms": Spread.of(busy[name]),
            "launches": host_launches(function, packs),
        }
        for name, function in sides.items()
    }
    return found, busy


def measured_sizes(
    ours: Ours,
    batches: dict[CaptureSize, list[MicroBatch]],
    effort: Effort,
    their_busy: list[float] | None,
) -> list[dict[str, Any]]:
    """Measure each capture size on all packs. The capture sizes take turns.

    The results contain wall-clock over GPU-busy time at the same clocks, and the GPU-busy time over
    that of the smallest capture size.

    Args:
        their_busy: GPU-busy seconds of megatron-core, by round.
    """
    samples: dict[CaptureSize, list[tuple[float, ...]]] = {
        capture_size: [] for capture_size in batches
    }  # milliseconds
    for _ in range(effort.rounds):
        for capture_size, packs in batches.items():
            calls = calls_for(len(packs), effort)
            step = over(ours.replay, packs)
            row = harness.row(step, calls=calls)
            times = harness.wall_and_busy(step, calls=calls, rounds=1)
            samples[capture_size].append((*row, times.wall.median, times.busy.median))
    smallest = [round_[1] for round_ in samples[next(iter(batches))]]
    found = []
    for capture_size, rounds in samples.items():
        row_wall, row_busy, row_span, wall, busy = map(list, zip(*rounds))
        found.append(
            {
                "capacity": capture_size.capacity,
                "packs": len(batches[capture_size]),
                "wall_ms": spread_of(wall),
                "busy_ms": spread_of(busy),
                "wall_over_busy": Spread.of_ratios(wall, busy),
                "row_ms": spread_of(row_wall),
                "row_busy_ms": spread_of(row_busy),
                "row_over_busy": Spread.of_ratios(row_wall, row_busy),
                "span_over_busy": Spread.of_ratios(row_span, row_busy),
                "busy_over_exact": Spread.of_ratios(row_busy, smallest),
                "wall_over_their_busy": Spread.of_ratios(row_wall, [1e3 * x for x in their_busy])
                if their_busy
                else None,
            }
        )
    return found


def spread_of(milliseconds: Sequence[float]) -> Spread:
    return Spread.of([value / 1e3 for value in milliseconds])


def calls_for(packs: int, effort: Effort) -> int:
    """Return a multiple of the number of packs, so that every row of calls does the same work."""
    return packs * -(-effort.calls // packs)


def run(
    c: dict[str, Any],
    lengths: list[list[int]],
    capacities: Sequence[int],
    device: torch.device,
    effort: Effort,
    *,
    skip_megatron: bool = False,
    backend: Callable[[], GraphBackend | None] = lambda: None,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Return all measurements of one configuration.

    ``save`` receives the results so far after each measurement.
    """
    most = max(map(len, lengths))
    capture_sizes = CaptureSizes.from_capacities({most, *capacities}, c["T"])
    natural = [capture_sizes.smallest_for(len(row), c["T"]) for row in lengths]
    exact = [host_batch(c, row, n, None, device) for n, row in enumerate(lengths)]
    replayed = [
        host_batch(c, row, n, capture_size, device)
        for n, (row, capture_size) in enumerate(zip(lengths, natural))
    ]
    ours = Ours(c, device)
    result: dict[str, Any] = {
        "tokens": c["T"],
        "documents": [len(row) for row in lengths],
        "plan_hash": hashlib.sha256(repr(lengths).encode()).hexdigest()[:12],
        "parameters": sum(p.numel() for p in ours.model.parameters()),
    }

    def done(**more: Any) -> None:
        result.update(more)
        save(result)
        print(f"{', '.join(more)}: {harness.plain(more)}"[:2000], flush=True)

    done(memory=memory_of(ours, capture_sizes, lengths, exact, replayed, backend))
    assert ours.runner is not None
    done(comparisons=comparisons(ours, replayed, exact))
    sides: dict[str, Callable[[], object]] = {}
    if not skip_megatron:
        theirs_model = megatron_model(c)
        copy_weights(ours.model, theirs_model, c["pattern"])
        theirs = Theirs(c, theirs_model, [micro_batch.to(device) for micro_batch in exact])
        losses = {
            "megatron_core": theirs.check(0)[0],
            "megatron_packed": ours.results(ours.eager, exact[0])[0],
        }
        done(losses=losses)
        sides["megatron_core"] = over(theirs.step, range(len(lengths)))
    sides |= {"eager": over(ours.eager, exact), "graphs": over(ours.replay, replayed)}
    found, busy = measured_sides(sides, len(lengths), effort)
    done(sides=found)
    batches = {
        capture_size: [host_batch(c, row, n, capture_size, device) for n, row in enumerate(lengths)]
        for capture_size in capture_sizes.sizes
        if capture_size.capacity >= most
    }
    done(cells=measured_sizes(ours, batches, effort, busy.get("megatron_core")))
    counters = ours.runner.counters
    done(hit_rate=counters.hit_rate, fallbacks=dict(counters.fallbacks + counters.module_fallbacks))
    ours.close()
    return result


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each configuration and each side, with its times."""
    return [
        {
            "config": config,
            "path": PATHS[path],
            "wall ms": harness.shown(found["wall_ms"]),
            "in a row ms": harness.shown(found["row_ms"]),
            "host ms": harness.shown(found["host_ms"]),
            "GPU-busy ms": harness.shown(found["busy_ms"]),
            "queued by the host": f"{found['launches']:.0f}",
            "plan": result["plan_hash"],
        }
        for config, result in results.items()
        for path, found in result.get("sides", {}).items()
    ]


def size_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each configuration and each capacity. All capacities replay the same packs."""
    return [
        {
            "config": config,
            "capacity": found["capacity"],
            "drained: wall ms": harness.shown(found["wall_ms"]),
            "wall / busy": harness.shown(found["wall_over_busy"]),
            "in a row: wall ms": harness.shown(found["row_ms"]),
            "busy ms": harness.shown(found["row_busy_ms"]),
            "wall / busy in a row": harness.shown(found["row_over_busy"]),
            "span / busy": harness.shown(found["span_over_busy"]),
            "busy / at exact capacity": harness.shown(found["busy_over_exact"]),
            "wall / megatron_core's busy": harness.shown(found["wall_over_their_busy"]),
        }
        for config, result in results.items()
        for found in result.get("cells", [])
    ]


def memory_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each configuration: graphs, their memory, and their difference from eager
    steps.
    """
    rows: list[dict[str, object]] = []
    for config, result in results.items():
        if "memory" not in result:
            continue
        memory, compared = result["memory"], result.get("comparisons", [])
        differ = sum(one["loss_replay"] != one["loss_eager"] for one in compared)
        rows.append(
            {
                "config": config,
                "capacities": " ".join(map(str, memory["capacities"])),
                "graphs": memory["captures"],
                "captured in s": f"{memory['capture_seconds']:.1f}",
                "graphs hold MiB": f"{memory['mib']:,.0f}",
                "of one capacity's": f"{memory['over_one_capacity']:.3f}",
                "peak of eager's: held, reserved": percentages(memory),
                "losses that differ": f"{differ} of {len(compared)}",
                "gradients: replay to eager, eager to eager": ", ".join(
                    f"{max((one[key] for one in compared), default=0.0):.1e}"
                    for key in ("grad_difference", "eager_against_eager")
                ),
                "replayed": f"{100 * result['hit_rate']:.1f} %" if "hit_rate" in result else "",
            }
        )
    return rows


def percentages(memory: dict[str, Any]) -> str:
    shares = [memory[key] for key in ("held_over_eager", "reserved_over_eager") if key in memory]
    return ", ".join(f"{100 * share:.1f} %" for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", help=f"from {list(CONFIGS)} (default: all)")
    parser.add_argument(
        "--capacities",
        nargs="*",
        type=int,
        default=CAPACITIES,
        help="document capacities to capture in addition to the exact one",
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        help="file with the lengths of real documents in tokens, one per line",
    )
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--skip-megatron", action="store_true", help="measure only megatron_packed")
    parser.add_argument("--name", default="graph_step", help="name of the result file")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    if device.type != "cuda":
        raise SystemExit("graph_step.py captures CUDA graphs and needs a GPU.")
    begin_alone(port=29512)
    results: dict[str, Any] = {}
    failed: list[str] = []
    for name in arguments.configs or CONFIGS:

        def save(result: dict[str, Any], name: str = name) -> None:
            results[name] = result
            harness.save(arguments.name, results, folder=arguments.results)

        c = CONFIGS[name]
        lengths = packs_of(c, arguments.packs, arguments.lengths)
        try:
            run(
                c,
                lengths,
                arguments.capacities,
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
    for rows in (rows_of(plain), size_rows_of(plain), memory_rows_of(plain)):
        print(harness.table(rows))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
