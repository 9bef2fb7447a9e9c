"""Compares training steps that keep activations, recompute layers, or offload the layers' inputs.

    python benchmarks/offload.py [hybrid1b] [hybrid1b_deep] [--graphs hybrid1b]

One optimizer step is one pack of 32,768 tokens in 12 documents, AdamW included. The learning rate
is 0, so that every step uses the same weights. All sides share weights, gradients and optimizer
state, so their peaks differ only by activations. The sides take turns, step by step.

Copies are measured in a profile of the device. The longest copies are those of layers' inputs. A
copy is hidden while a kernel runs. ``--graphs`` captures recomputation with and without offload,
layer by layer and as whole steps, and measures both again in turns.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

import harness
from harness import Spread
from layouts import quick
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import FULL_ITERATION, LOCAL, CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models import hybrid_model
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.models.run_model import build_model
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.train_step import TrainStep
from model_step import CONFIGS, DOCUMENTS, model_config, packings
from workloads import device_from, filled_on_device, hash_of, pinned, random_documents

TOKENS, PACKS, CAPACITY = 32768, 4, 16
_HYBRID = {**CONFIGS["hybrid1b"], "T": TOKENS}
MODELS = {"hybrid1b": _HYBRID, "hybrid1b_deep": {**_HYBRID, "pattern": 2 * _HYBRID["pattern"]}}
WHOLE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
NONE, RECOMPUTE, ONE, TWO = "nothing", "recompute", "offload, 1 buffer", "offload, 2 buffers"
SIDES: dict[str, dict[str, Any]] = {
    NONE: {},
    RECOMPUTE: WHOLE,
    ONE: {**WHOLE, "offload_layer_inputs": True, "offload_buffers": 1},
    TWO: {**WHOLE, "offload_layer_inputs": True, "offload_buffers": 2},
}
IMPLS = (LOCAL, FULL_ITERATION)
"""CUDA-graph implementations that support offload."""
WARM, PROFILED = 3, 2
ROUNDS, QUICK_ROUNDS = 6, 1
LEAST_MOVED, LEAST_HIDDEN, MOST_OF_ONE_BUFFER, MOST_OF_GRAPHS = 0.8, 0.8, 1.01, 1.03
NORM_BOUND = 1e-3
"""Largest relative difference of gradient norms. Kernels do not add in a fixed order."""


def config_of(
    c: dict[str, Any], memory: dict[str, Any], device: torch.device, impl: str = "none"
) -> RunConfig:
    small = (
        {"min_offloaded_tensor_size": 1}
        if device.type == "cpu" and "offload_layer_inputs" in memory
        else {}
    )
    return RunConfig(
        model=model_config(c),
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=c["T"], global_batch_size=1),
        optim=OptimizerConfig(lr=0.0, clip_grad=1.0),
        training=TrainingConfig(train_iters=1, bf16=device.type == "cuda", device=device.type),
        memory=MemoryConfig(**memory, **small),
        cuda_graph=CudaGraphConfig(cuda_graph_impl=impl),
    )


def steps_of(c: dict[str, Any], device: torch.device) -> list[MicroBatch]:
    """Return the packs as a loader returns them, padded to the document capacity of the graphs."""
    made = []
    for number, lengths in enumerate(packings(c["T"], PACKS)):
        documents = [(tokens, None) for tokens in random_documents(lengths, c["vocab"], number)]
        scales = (1 / (c["T"] - len(lengths)), 1.0)
        made.append(pinned(MicroBatch.build(documents, c["T"], CAPACITY, scales, c["T"]), device))
    return made


def first_job(config: RunConfig, groups: ParallelGroups, vocab: int) -> Job:
    with filled_on_device(groups.device):
        return build_job(config, groups, vocab)


def sharing(job: Job, config: RunConfig, groups: ParallelGroups) -> Job:
    """Build another job that uses the weights, gradients and optimizer state of ``job``."""
    with mock.patch.object(hybrid_model, "initialize"):
        model = build_model(config, job.model.vocab_size, groups.device, groups).train()
    for own, shared in zip(model.modules(), job.model.modules(), strict=True):
        own._parameters.update(shared._parameters)
        own._buffers.update(shared._buffers)
    step = TrainStep(model, job.buffers, job.optimizer, groups)
    return Job(model=model, buffers=job.buffers, optimizer=job.optimizer, step=step)


def runner(job: Job, packs: Sequence[MicroBatch]) -> Callable[[], StepValues]:
    """Return a function that runs one step on the next pack.

    The host waits for each step, because it reads the step's metrics.
    """
    done = 0

    def run() -> StepValues:
        nonlocal done
        done += 1
        found = StepValues.from_list(job.step([packs[done % len(packs)]], 0.0).tolist())
        if job.model.offload is not None:
            job.model.offload.end_step()
        return found

    return run


def in_turns(runs: dict[str, Callable[[], StepValues]], rounds: int) -> dict[str, dict[str, Any]]:
    """Return milliseconds, losses and gradient norms of each side's steps. The sides take turns.

    The n-th steps of all sides use the same pack.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    values: dict[str, list[StepValues]] = {name: [] for name in runs}
    # gives the allocator the memory of all sides before the first timed step
    for once in runs.values():
        once()
    for number in range(rounds):
        for name in list(runs) if number % 2 == 0 else reversed(runs):
            harness.synchronize()
            start = time.perf_counter()
            found = runs[name]()
            seconds[name].append(time.perf_counter() - start)
            values[name].append(found)
    return {
        name: {
            "step_ms": Spread.of(seconds[name]),
            "losses": [one.loss for one in values[name]],
            "grad_norms": [one.grad_norm for one in values[name]],
            "of": {
                other: Spread.of_ratios(seconds[name], seconds[other])
                for other in runs
                if other != name
            },
        }
        for name in runs
    }


def peak_of(run: Callable[[], object]) -> dict[str, float]:
    """Return the peak memory of two steps after warm-up, in GiB.

    The peak includes the shared weights and the optimizer state.
    """
    harness.free_memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        run()
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def copies(run: Callable[[], object], num_bytes: int) -> dict[str, Any]:
    """Measure the copies of layers' inputs in a profile of some steps, by direction.

    Args:
        num_bytes: size of one layer's input.
    """
    from torch.profiler import ProfilerActivity, profile

    harness.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            run()
        harness.synchronize()
    events = harness.device_events(profiler)
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    found: dict[str, Any] = {}
    for kind in ("DtoH", "HtoD"):
        timed = [event for event in events if event.name.startswith(f"Memcpy {kind}")]
        longest = max((event.time_range.elapsed_us() for event in timed), default=0.0)
        large = [event for event in timed if event.time_range.elapsed_us() > longest / 4]
        seconds = [event.time_range.elapsed_us() / 1e6 for event in large]
        both = sorted([*kernels, *large], key=lambda event: event.time_range.start)
        exposed = harness.union_ms(both) - harness.union_ms(kernels)
        found[kind] = {
            "per_step": len(large) / PROFILED,
            "copy_ms": Spread.of(seconds or [0.0]),
            "gb_per_s": Spread.of_ratios([num_bytes / 1e9] * len(seconds), seconds)
            if seconds
            else None,
            "hidden": 1 - exposed / max(harness.union_ms(large), 1e-9) if large else 1.0,
        }
    return found


def of_graphs(
    c: dict[str, Any],
    jobs: dict[str, Job],
    impl: str,
    packs: Sequence[MicroBatch],
    groups: ParallelGroups,
    rounds: int,
    backend: Callable[[], GraphBackend | None],
) -> dict[str, Any]:
    """Return the measurements of replayed steps that recompute, with and without offload."""
    made, runs, found = [], {}, {}
    capture_sizes = CaptureSizes.from_capacities([CAPACITY], c["T"])
    try:
        for name in (RECOMPUTE, TWO):
            job, config = jobs[name], config_of(c, SIDES[name], groups.device, impl)
            graphs = build_graphs(config, job, capture_sizes, groups, lambda line: None, backend())
            assert graphs is not None, "graphs need a GPU"
            made.append(graphs)
            capture_graphs(graphs, job.step, 1, groups, first=True)
            job.step.graphs = graphs
            runs[name] = runner(job, packs)
            for _ in range(WARM):
                runs[name]()
        times = in_turns({name: runner(jobs[name], packs) for name in runs}, rounds)
        for name, graphs in zip(runs, made):
            counters = graphs.counters
            found[name] = times[name] | {
                "graph_mib": counters.memory_mib,
                "capture_seconds": counters.capture_seconds,
                "fallbacks": counters.fallbacks.total() + counters.module_fallbacks.total(),
            }
            if groups.device.type == "cuda":
                found[name] |= peak_of(runs[name])
                if name == TWO:
                    found[name]["copies"] = copies(runs[name], input_bytes(c))
    finally:
        for name in (RECOMPUTE, TWO):
            jobs[name].step.graphs = None
        for graphs in made:
            graphs.close()
        harness.free_memory()
    return found


def input_bytes(c: dict[str, Any], element: int = 2) -> int:
    """Return the bytes of one layer's input."""
    return int(c["T"] * c["hidden"] * element)


def run(
    c: dict[str, Any],
    device: torch.device,
    *,
    rounds: int,
    impls: Sequence[str] = (),
    backend: Callable[[], GraphBackend | None] = lambda: None,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Return all measurements of one model.

    ``save`` receives the results so far after each group of measurements.
    """
    groups = ParallelGroups.single(device)
    packs = steps_of(c, device)
    jobs = {NONE: first_job(config_of(c, SIDES[NONE], device), groups, c["vocab"])}
    jobs |= {
        name: sharing(jobs[NONE], config_of(c, memory, device), groups)
        for name, memory in SIDES.items()
        if name != NONE
    }
    result: dict[str, Any] = {
        "tokens": c["T"],
        "layers": len(c["pattern"]),
        "documents": DOCUMENTS,
        "input_mib": input_bytes(c) / 2**20,
        "parameters": jobs[NONE].model.num_parameters,
        "plan_hash": hash_of([pack.packed.cu_seqlens_cpu.tolist() for pack in packs]),
        "peaks": {},
        "copies": {},
        "figures": {},
        "graphs": {},
    }
    for name, job in jobs.items():
        once = runner(job, packs)
        for _ in range(WARM):
            once()
        if device.type == "cuda":
            result["peaks"][name] = peak_of(once)
            if "offload_layer_inputs" in SIDES[name]:
                result["copies"][name] = copies(once, input_bytes(c))
        if job.model.offload is not None:
            figures = job.model.offload.figures
            result["figures"][name] = {
                "buffers": job.model.offload.buffer_count.now,
                "off": job.model.offload.off_reason,
                **({} if figures is None else asdict(figures)),
            }
        harness.free_memory()
    result["sides"] = in_turns({name: runner(job, packs) for name, job in jobs.items()}, rounds)
    save(result)
    for impl in impls:
        try:
            result["graphs"][impl] = of_graphs(c, jobs, impl, packs, groups, rounds, backend)
        except Exception as error:  # finished measurements are saved
            traceback.print_exc()
            result["graphs"][impl] = {"failed": f"{type(error).__name__}: {error}"}
        save(result)
    return result


def moved(result: dict[str, Any], name: str) -> float | None:
    """Return the share of the layers' inputs that was copied to the host."""
    return (
        result["copies"][name]["DtoH"]["per_step"] / result["layers"]
        if name in result["copies"]
        else None
    )


def freed(result: dict[str, Any], name: str) -> float | None:
    """Return the reduction of the peak, as a share of the size of all layers' inputs.

    The reference is the peak with recomputation and without offload.
    """
    peaks = result["peaks"]
    if name not in peaks:
        return None
    return (
        (peaks[RECOMPUTE]["peak_gib"] - peaks[name]["peak_gib"])
        * 1024
        / result["layers"]
        / result["input_mib"]
    )


def problems_of(results: dict[str, Any]) -> list[str]:
    """Return a sentence for each error, for example a fallback or a loss that differs between sides.

    `misses_of` returns the targets that depend on the machine.
    """
    problems = []
    for model, result in results.items():
        groups = {"": result["sides"]} | {
            f"{impl}, ": found for impl, found in result["graphs"].items()
        }
        for where, sides in groups.items():
            if "failed" in sides:
                problems.append(f"{model}, {where}{sides['failed']}")
                continue
            wanted = sides[RECOMPUTE]
            for name, side in sides.items():
                pairs = zip(side["grad_norms"], wanted["grad_norms"], strict=True)
                if side["losses"] != wanted["losses"] or any(
                    abs(a - b) > NORM_BOUND * b for a, b in pairs
                ):
                    problems.append(
                        f"{model}, {where}{name}: loss or gradient norm differs from {RECOMPUTE}"
                    )
                if result["figures"].get(name, {}).get("off"):
                    problems.append(
                        f"{model}, {name}: offload is off: {result['figures'][name]['off']}"
                    )
                if side.get("fallbacks"):
                    problems.append(f"{model}, {where}{name}: {side['fallbacks']} fallbacks")
    return problems


def misses_of(results: dict[str, Any]) -> list[str]:
    """Return the performance targets that this run missed, with the measured values."""
    found = []
    for model, result in results.items():
        for name in result["copies"]:
            share, hidden = moved(result, name) or 0.0, result["copies"][name]["HtoD"]["hidden"]
            if share < LEAST_MOVED:
                found.append(
                    f"{model}, {name}: only {100 * share:.0f} % of the layers' inputs were offloaded"
                )
            if name == TWO and hidden < LEAST_HIDDEN:
                found.append(
                    f"{model}, {name}: kernels hide only {100 * hidden:.0f} % of the time of "
                    "copies back to the GPU"
                )
        if (buffers := result["figures"].get(TWO, {}).get("buffers", 2)) != 2:
            found.append(f"{model}, {TWO}: {buffers} buffers were used instead of 2")
        if (of_one := result["sides"][TWO]["of"][ONE][0]) > MOST_OF_ONE_BUFFER:
            found.append(f"{model}: two buffers take {of_one:.3f} times as long as one buffer")
        for impl, sides in result["graphs"].items():
            if (
                "failed" not in sides
                and (of_graphs := sides[TWO]["of"][RECOMPUTE][0]) > MOST_OF_GRAPHS
            ):
                found.append(
                    f"{model}, {impl}: steps with offload take {of_graphs:.3f} times as long as "
                    "steps without"
                )
    return found


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each model and side, from results in the form of a result file."""
    return [
        {
            "model": model,
            "tokens": result["tokens"],
            "kept": name,
            "step ms": harness.shown(side["step_ms"]),
            "of recompute's": harness.shown(side["of"].get(RECOMPUTE)),
            "of one buffer's": harness.shown(side["of"].get(ONE)) if name == TWO else "",
            "peak GiB": f"{result['peaks'][name]['peak_gib']:.2f}"
            if name in result["peaks"]
            else "",
            "inputs moved, freed": ", ".join(
                filter(None, (percent(moved(result, name)), percent(freed(result, name))))
            )
            if name in (ONE, TWO)
            else "",
            "plan": result["plan_hash"],
        }
        for model, result in results.items()
        for name, side in result["sides"].items()
    ]


def copy_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each model, side and copy direction, of eager steps and of graph replays."""
    rows: list[dict[str, object]] = []
    for model, result in results.items():
        measured = {f"eager, {name}": found for name, found in result["copies"].items()}
        measured |= {
            f"{impl}, {TWO}": sides[TWO]["copies"]
            for impl, sides in result["graphs"].items()
            if "copies" in sides.get(TWO, {})
        }
        rows += [
            {
                "model": model,
                "side": side,
                "copy": kind,
                "of a step": f"{found['per_step']:.0f}",
                "MiB": f"{result['input_mib']:.0f}",
                "ms": harness.shown(found["copy_ms"]),
                "GB/s": harness.shown(found["gb_per_s"]),
                "hidden": percent(max(found["hidden"], 0)),
            }
            for side, directions in measured.items()
            for kind, found in directions.items()
        ]
    return rows


def graph_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each model, kind of graphs and side."""
    rows: list[dict[str, object]] = []
    for model, result in results.items():
        for impl, sides in result["graphs"].items():
            for name, side in sides.items():
                failed = name == "failed"
                rows.append(
                    {
                        "model": model,
                        "graphs": impl,
                        "kept": side[:80] if failed else name,
                        "step ms": "" if failed else harness.shown(side["step_ms"]),
                        "of recompute's": ""
                        if failed
                        else harness.shown(side["of"].get(RECOMPUTE)),
                        "graphs hold MiB": "" if failed else f"{side['graph_mib']:,.0f}",
                        "fallbacks": "" if failed else side["fallbacks"],
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=list(MODELS), help=f"from {list(MODELS)} (default: all)"
    )
    parser.add_argument(
        "--graphs",
        nargs="*",
        default=["hybrid1b"],
        help="models that are also measured with graphs (default: hybrid1b)",
    )
    harness.tilings_argument(parser)
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    apply_environment(TrainingConfig(train_iters=1))
    harness.tune_over(arguments.tilings)
    results: dict[str, Any] = {}
    for name in arguments.models:

        def save(result: dict[str, Any], name: str = name) -> None:
            results[name] = result
            harness.save("offload", results, folder=arguments.results)

        c = quick(MODELS[name]) if device.type == "cpu" else MODELS[name]
        impls = IMPLS if name in arguments.graphs and device.type == "cuda" else ()
        run(c, device, rounds=QUICK_ROUNDS if arguments.quick else ROUNDS, impls=impls, save=save)
        harness.free_memory()
        print(f"{name} is measured", flush=True)
    plain = harness.plain(results)
    for rows in (rows_of(plain), copy_rows_of(plain), graph_rows_of(plain)):
        if rows:
            print(harness.table(rows))
    for line in misses_of(plain):
        print(f"target missed: {line}")
    if problems := problems_of(plain):
        raise SystemExit("failed: " + "; ".join(problems))


if __name__ == "__main__":
    main()
