"""Compares training in parallel layouts to training in one process on the same packs.

    torchrun --nproc_per_node 2 benchmarks/layouts.py [--models hybrid1b hybrid1b_moe] [--layouts NAME ...]

The layouts depend on the number of processes. All layouts start from the same weights and train for
20 steps on the same packs. Every step has new packs: a model memorizes repeated packs, and rounding
then decides which pack it learns first. Loss and gradient norm of each step are compared with those
of one process.

Only the steps after the first ones are timed. On GPUs the same job then captures CUDA graphs, and
series of eager and of replayed steps take turns. A profile of replayed steps on rank 0 has the
milliseconds in which ranks exchange data, and those in which no product or other kernel runs meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import harness
from harness import Spread
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import FULL_ITERATION, CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from model_step import CONFIGS, model_config, packings
from workloads import device_from, hash_of, pinned, random_documents

CAPACITY = 16
"""Document capacity of the packs, eagerly and by replay."""
ROUNDS, ROW = 4, 2
"""Number of series of steps, and number of steps in a series.

Series of eager and of replayed steps take turns. The host does not wait inside a series.
"""
ALIGNMENT = 8
"""Documents are cut to multiples of this number of tokens, so that no layout needs padding."""
STEPS, WARM, PROFILED = 20, 8, 2
QUICK_STEPS, QUICK_WARM = 4, 2
LEARNING_RATE = 4e-6
"""Learning rate of the last step; the rate rises linearly from almost zero.

A first step at the full rate would make the loss jump, and small rounding differences would then
grow from step to step.
"""
LOSS_BOUND, NORM_BOUND = 1e-2, 2e-2
"""Largest allowed relative difference of a step's loss and gradient norm from one process."""
LOCAL = "local"
GRAPHS = (LOCAL, FULL_ITERATION)
EXPOSED = 5
"""Number of exchanges in the results, those with the longest exposed time."""
BARRIER = "barrier_kernel"
"""Part of the name of the barriers of symmetric memory."""
COPIES = ("memcpy dtod", "memcpy ptop")
"""Beginnings of the names of copies by copy engines; fused products receive rows by these copies."""
WITHOUT_EXPERTS = ("attn", "mamba", "mlp", "moe_router")
MODELS = {
    "hybrid1b": CONFIGS["hybrid1b"],
    "hybrid1b_moe": {
        **CONFIGS["hybrid1b"],
        "pattern": "MEM-M*-MEM-M*-MEM-M*-",
        "experts": 8,
        "expert_ffn": 4096,
    },
    "hybrid1b_delta": {
        **CONFIGS["hybrid1b"],
        "pattern": "G-G-G*-G-G-G*-G-G-G*-G-",
        "delta_heads": (16, 32),
    },
}
IN_ALL_LAYOUTS = ("hybrid1b", "hybrid1b_moe")
"""Models that were measured in all layouts of two and of four GPUs."""
ONE = "one process"

TP2, CP2, CP4, EP2 = (
    {f"{axis}_size": size}
    for axis, size in (
        ("tensor_model_parallel", 2),
        ("context_parallel", 2),
        ("context_parallel", 4),
        ("expert_model_parallel", 2),
    )
)
HEADS = {"mamba_cp_comm_type": "heads"}
STATE = {"mamba_cp_comm_type": "state"}
SP = {"sequence_parallel": True, "tp_comm_overlap": False}
TP_OVERLAP = {"tp_comm_overlap": True}
COPIED = {"all_to_all_backend": "symmetric_memory"}
ZERO = {"use_distributed_optimizer": True}
GRADIENTS = {"overlap_grad_reduce": True}
OVERLAP = {**GRADIENTS, "overlap_param_gather": True}
ZIGZAG = {"cp_partition_mode": "zigzag"}
IN_ORDER = {"cp_comm_type": "all_gather", "cp_partition_mode": "contiguous"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp2 zero": ZERO,
        "dp2 zero grad-reduce param-gather": {**ZERO, **OVERLAP},
        "tp2": TP2,
        "tp2 sp": {**TP2, **SP},
        "tp2 sp overlap": {**TP2, **SP, **TP_OVERLAP},
        "cp2 a2a": {**CP2, **HEADS, "cp_comm_type": "a2a"},
        "cp2 all_gather": {**CP2, **HEADS, **ZIGZAG, "cp_comm_type": "all_gather"},
        "cp2 p2p": {**CP2, **HEADS, **ZIGZAG, "cp_comm_type": "p2p"},
        "cp2 a2a parts": {**CP2, **HEADS, "cp_comm_type": "a2a", "cp_comm_overlap_parts": 4},
        "cp2 a2a copies": {**CP2, **HEADS, "cp_comm_type": "a2a", **COPIED},
        "cp2 a2a parts copies": {
            **CP2,
            **HEADS,
            "cp_comm_type": "a2a",
            "cp_comm_overlap_parts": 4,
            **COPIED,
        },
        "cp2 a2a zero grad-reduce": {**CP2, **HEADS, "cp_comm_type": "a2a", **ZERO, **GRADIENTS},
        "cp2 a2a parts zero grad-reduce": {
            **CP2,
            **HEADS,
            "cp_comm_type": "a2a",
            "cp_comm_overlap_parts": 4,
            **ZERO,
            **GRADIENTS,
        },
        "cp2 state": {**CP2, **STATE},
        "cp2 state zero grad-reduce": {**CP2, **STATE, **ZERO, **GRADIENTS},
        "cp2 contiguous": {**CP2, **HEADS, **IN_ORDER},
        "cp2 contiguous state": {**CP2, **IN_ORDER, **STATE},
        "cp2 contiguous state zero grad-reduce param-gather": {
            **CP2,
            **IN_ORDER,
            **STATE,
            **ZERO,
            **OVERLAP,
        },
        "cp2 contiguous state zero grad-reduce": {**CP2, **IN_ORDER, **STATE, **ZERO, **GRADIENTS},
        "cp2 p2p state": {**CP2, **ZIGZAG, "cp_comm_type": "p2p", **STATE},
        "cp2 headwise": {**CP2, "linear_cp_mode": "headwise"},
        "cp2 chunkwise": {**CP2, "linear_cp_mode": "chunkwise"},
        "cp2 contiguous chunkwise": {**CP2, **IN_ORDER, "linear_cp_mode": "chunkwise"},
        "ep2 allgather": {**EP2, "moe_token_dispatcher_type": "allgather"},
        "ep2 alltoall": {**EP2, "moe_token_dispatcher_type": "alltoall"},
    },
    4: {
        "tp2 sp cp2": {**TP2, **SP, **CP2, **HEADS, "cp_comm_type": "a2a"},
        "cp2 dp2": {**CP2, **HEADS, "cp_comm_type": "a2a"},
        "tp2 sp ep2": {**TP2, **SP, **EP2, "moe_token_dispatcher_type": "allgather"},
        "dp4 zero": ZERO,
        "tp4 sp": {"tensor_model_parallel_size": 4, **SP},
        "tp4 sp overlap": {"tensor_model_parallel_size": 4, **SP, **TP_OVERLAP},
        "cp4 a2a": {**CP4, **HEADS, "cp_comm_type": "a2a"},
        "cp4 a2a parts": {**CP4, **HEADS, "cp_comm_overlap_parts": 2},
        "cp4 state": {**CP4, **STATE},
        "cp4 contiguous state": {
            **CP4,
            **IN_ORDER,
            **STATE,
        },
        "cp4 headwise": {**CP4, "linear_cp_mode": "headwise"},
        "cp4 chunkwise": {**CP4, "linear_cp_mode": "chunkwise"},
        "ep4 allgather": {
            "expert_model_parallel_size": 4,
            "moe_token_dispatcher_type": "allgather",
        },
    },
}
"""Number of processes -> name of the layout -> options of `ParallelConfig` and `ModelConfig`.

Beside ZeRO-1, names list what runs under other work: ``grad-reduce`` and ``param-gather`` are
``--overlap-grad-reduce`` and ``--overlap-param-gather``.
"""
EARLIER_NAMES = {
    "dp2 zero overlap": "dp2 zero grad-reduce param-gather",
    "cp2 a2a zero overlap": "cp2 a2a zero grad-reduce",
    "cp2 a2a parts zero overlap": "cp2 a2a parts zero grad-reduce",
    "cp2 state zero overlap": "cp2 state zero grad-reduce",
    "cp2 contiguous state zero overlap": "cp2 contiguous state zero grad-reduce param-gather",
}
"""Names in results until 2026-11-30 -> names of today. One word meant two different overlaps."""
SCALED = {
    "DP": ("hybrid1b", "dp2 zero", "dp4 zero"),
    "TP": ("hybrid1b", "tp2 sp", "tp4 sp"),
    "CP": ("hybrid1b", "cp2 a2a", "cp4 a2a"),
    "EP": ("hybrid1b_moe", "ep2 allgather", "ep4 allgather"),
}
"""Parallel axis -> model, and its layouts that use only this axis."""


def recorded_layouts(world: int) -> dict[str, dict[str, Any]]:
    """Return the options of all layouts of ``world`` processes by the names in results, old and new."""
    earlier = {new: old for old, new in EARLIER_NAMES.items()}
    return {
        recorded: options
        for name, options in LAYOUTS[world].items()
        for recorded in (name, earlier.get(name, name))
    }


def config_of(
    c: dict[str, Any], packs: int, options: dict[str, Any], device: torch.device, steps: int = STEPS
) -> RunConfig:
    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    model: ModelConfig = dataclasses.replace(
        model_config(c), **{name: value for name, value in options.items() if name not in fields}
    )
    return RunConfig(
        model=model,
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=c["T"], global_batch_size=packs),
        optim=OptimizerConfig(lr=LEARNING_RATE, clip_grad=1.0),
        parallel=ParallelConfig(
            **{name: value for name, value in options.items() if name in fields}
        ),
        training=TrainingConfig(train_iters=steps, bf16=device.type == "cuda", device=device.type),
    )


def steps_of(
    c: dict[str, Any], packs: int, steps: int, device: torch.device
) -> list[list[MicroBatch]]:
    """Return the packs of each step, as a loader returns them.

    A few tokens of the vocabulary are frequent, as in real text.
    """
    rows = []
    for row in packings(c["T"], packs * steps):
        lengths = [max(length // ALIGNMENT, 1) * ALIGNMENT for length in row[:-1]]
        rows.append([*lengths, c["T"] - sum(lengths)])
    made = []
    for step in range(steps):
        of_step = rows[step * packs : (step + 1) * packs]
        scales = (1 / sum(length - 1 for row in of_step for length in row), 1 / packs)
        made.append(
            [
                pinned(
                    MicroBatch.build(
                        [
                            (frequent(tokens, c["vocab"]), None)
                            for tokens in random_documents(row, c["vocab"], step * packs + number)
                        ],
                        c["T"],
                        CAPACITY,
                        scales,
                        c["T"],
                        ALIGNMENT,
                    ),
                    device,
                )
                for number, row in enumerate(of_step)
            ]
        )
    return made


def frequent(tokens: NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Map uniformly drawn tokens to tokens whose frequency falls as their number rises."""
    return (vocab * (tokens / vocab) ** 4).astype(np.int64)


def train(
    config: RunConfig,
    groups: ParallelGroups,
    steps: list[list[MicroBatch]],
    vocab: int,
    kinds: Sequence[str],
) -> dict[str, Any]:
    """Return losses, gradient norms and times of the steps on this rank's share of the packs.

    Args:
        kinds: kinds of CUDA graphs, which are measured on GPUs.
    """
    warm = WARM if len(steps) == STEPS else QUICK_WARM
    job = build_job(config, groups, vocab)
    losses, norms, seconds = [], [], []
    for number, packs in enumerate(steps):
        mine = packs[groups.dp.rank :: groups.dp.size]
        harness.synchronize()
        start = time.perf_counter()
        metrics = job.step(mine, config.optim.lr * (number + 1) / len(steps))
        harness.synchronize()
        if number >= warm:
            seconds.append(time.perf_counter() - start)
        values = StepValues.from_list(metrics.tolist())
        losses.append(values.loss)
        norms.append(values.grad_norm)
    tokens = sum(pack.num_real_tokens for pack in packs)
    found: dict[str, Any] = {
        "loss": losses,
        "grad_norm": norms,
        "step_ms": Spread.of(seconds),
        "tokens_per_second_per_gpu": tokens / statistics.median(seconds) / groups.world_size,
        "parameters": sum(p.numel() for p in job.model.parameters()),
    }
    if groups.device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        whole = asks_nothing(config) and not config.parallel.overlap_param_gather
        found["graphs"] = {
            impl: replayed(config, job, groups, mine, impl, tokens)
            for impl in kinds
            if whole or impl == LOCAL
        }
        job.buffers.wait_params()  # otherwise the process group keeps the gathered weights alive
    job.close()
    return found


def replayed(
    config: RunConfig,
    job: Job,
    groups: ParallelGroups,
    mine: Sequence[MicroBatch],
    impl: str,
    tokens: int,
) -> dict[str, Any]:
    """Measure series of eager and of replayed steps of the same job, which take turns."""
    modules = () if asks_nothing(config) else WITHOUT_EXPERTS
    graph_options = CudaGraphConfig(cuda_graph_impl=impl, cuda_graph_modules=modules)
    config = dataclasses.replace(config, cuda_graph=graph_options)
    job.buffers.wait_params()
    graphs = build_graphs(
        config,
        job,
        CaptureSizes.from_capacities([CAPACITY], config.packing.tokens_per_pack),
        groups,
        lambda line: None,
    )
    assert graphs is not None
    with released(graphs):
        capture_graphs(graphs, job.step, config.packs_per_step(), groups, first=True)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(ROUNDS + 1):
            for by_replay, times in seconds.items():
                job.step.graphs = graphs if by_replay else None
                harness.synchronize()
                start = time.perf_counter()
                for _ in range(ROW):
                    job.step(mine, config.optim.lr)
                harness.synchronize()
                if number:
                    times.append((time.perf_counter() - start) / ROW)
        job.step.graphs = graphs
        exchanges = exchange_of(lambda: job.step(mine, config.optim.lr))
        job.step.graphs = None
        counters = graphs.counters
        return exchanges | {
            "eager_ms": Spread.of(seconds[False]),
            "step_ms": Spread.of(seconds[True]),
            "of_eager": Spread.of_ratios(seconds[True], seconds[False]),
            "tokens_per_second_per_gpu": tokens
            / statistics.median(seconds[True])
            / groups.world_size,
            "modules": " ".join(modules) or "full",
            "graph_mib": counters.memory_mib,
            "capture_seconds": counters.capture_seconds,
            "fallbacks": counters.fallbacks.total() + counters.module_fallbacks.total(),
        }


def asks_nothing(config: RunConfig) -> bool:
    """Return whether experts are dispatched without the host reading a value from the device."""
    model = config.model
    static = model.moe_token_dispatcher_type != "alltoall" or model.moe_pad_expert_input_to_capacity  # noqa: S105
    return static or config.parallel.expert_model_parallel_size == 1


def exchange_of(step: Callable[[], object]) -> dict[str, Any]:
    """Profile steps, and return `exchange_ms` and `exposed_by_name` of one step."""
    from torch.profiler import ProfilerActivity, profile

    harness.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events = harness.device_events(profiler)
    return exchange_ms(events, PROFILED) | {"exposed": exposed_by_name(events, PROFILED)}


def exchange_ms(events: Sequence[Any], steps: int) -> dict[str, float]:
    """Return three times of a step in ms, and its barriers.

    In ``exchange_ms`` an exchange with other ranks runs. In ``exposed_ms`` nothing but exchanges runs,
    and in ``idle_ms`` nothing runs, between the first and the last event. ``barriers`` is the number of
    barriers of symmetric memory.

    Copies inside the device count as exchanges, because a copy from symmetric memory of another rank
    may have their name. Other copies of a step are small.

    Args:
        events: kernels, copies and memsets of ``steps`` steps, sorted by their start.
        steps: number of steps.
    """
    sending = [event for event in events if is_exchange(event.name)]
    computing = [event for event in events if not is_exchange(event.name)]
    span = (max(event.time_range.end for event in events) - events[0].time_range.start) / 1e3
    busy, compute = harness.union_ms(events), harness.union_ms(computing)
    return {
        "exchange_ms": harness.union_ms(sending) / steps,
        "exposed_ms": (busy - compute) / steps,
        "idle_ms": (span - busy) / steps,
        "barriers": sum(BARRIER in event.name.lower() for event in sending) / steps,
    }


def exposed_by_name(events: Sequence[Any], steps: int) -> dict[str, float]:
    """Return the exposed ms of one step for each kind of exchange, longest first.

    Exchanges that run at the same time both count.

    Args:
        events: as for `exchange_ms`.
        steps: as for `exchange_ms`.
    """
    computing = iter([event.time_range for event in events if not is_exchange(event.name)])
    found: Counter[str] = Counter()
    ahead: deque[Any] = deque()
    for event in events:
        if is_exchange(event.name):
            begin, end = event.time_range.start, event.time_range.end
            while not ahead or ahead[-1].start < end:
                if (after := next(computing, None)) is None:
                    break
                ahead.append(after)
            while ahead and ahead[0].end <= begin:
                ahead.popleft()
            for computed in ahead:
                found[event.name[:60]] += max(min(computed.start, end) - begin, 0)
                begin = max(begin, computed.end)
            found[event.name[:60]] += max(end - begin, 0)
    return {name: round(us / 1e3 / steps, 3) for name, us in found.most_common(EXPOSED)}


def is_exchange(name: str) -> bool:
    """Return whether a kernel or copy exchanges data with other ranks, or waits for them."""
    name = name.lower()
    return "nccl" in name or BARRIER in name or name.startswith(COPIES)


def difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def compared(found: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """Add the comparison of a layout with one process to the layout's results.

    The comparison contains relative differences of loss and gradient norm, and throughput per GPU.
    """
    return found | {
        "loss_difference": difference(found["loss"], one["loss"]),
        "grad_norm_difference": difference(found["grad_norm"], one["grad_norm"]),
        "scaling": found["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"],
        "graphs": {
            impl: by_graphs
            | {
                "scaling": by_graphs["tokens_per_second_per_gpu"]
                / one["graphs"][impl]["tokens_per_second_per_gpu"],
            }
            for impl, by_graphs in found.get("graphs", {}).items()
        },
    }


def problems_of(results: dict[str, Any]) -> list[str]:
    problems = []
    for model, result in results.items():
        for name, found in result["layouts"].items():
            if "failed" in found:
                problems.append(f"{model}, {name}: {found['failed']}")
            elif not (
                found["loss_difference"] <= LOSS_BOUND
                and found["grad_norm_difference"] <= NORM_BOUND
            ):
                problems.append(
                    f"{model}, {name}: loss {found['loss_difference']:.1e}, "
                    f"gradient norm {found['grad_norm_difference']:.1e} relative difference from "
                    "one process, which is too much"
                )
    return problems


def suits(options: dict[str, Any], c: dict[str, Any]) -> bool:
    """Return whether the model has the layers that the options of the layout are for."""
    needed = {
        "expert_model_parallel_size": "E",
        "mamba_cp_comm_type": "M",
        "linear_cp_mode": "G",
    }
    return all(kind in c["pattern"] for option, kind in needed.items() if option in options)


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each layout, from results in the form of a result file."""
    rows: list[dict[str, object]] = []
    for model, result in results.items():
        for name, found in result["layouts"].items():
            if "failed" in found:
                rows.append({"model": model, "layout": name, "step ms": found["failed"][:80]})
                continue
            eager = {}
            if "communication" in found:  # in results until 2026-11-22
                shares = (found[key] for key in ("communication", "exposed_communication", "idle"))
                eager["NCCL runs, alone; idle"] = ", ".join(f"{100 * s:.0f} %" for s in shares)
            rows.append(
                {
                    "model": model,
                    "layout": name,
                    "step ms": harness.shown(found["step_ms"]),
                    "tokens/s per GPU": round(found["tokens_per_second_per_gpu"]),
                    "of one GPU's": f"{found['scaling']:.3f}",
                    **eager,
                    "peak GiB": round(found.get("peak_gib", 0.0), 1),
                    "loss, norm from one process's": f"{found['loss_difference']:.1e}, "
                    f"{found['grad_norm_difference']:.1e}",
                    "plan": result["plan_hash"],
                }
            )
    return rows


def graph_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each layout and kind of graphs."""
    rows: list[dict[str, object]] = []
    for model, result in results.items():
        for name, found in result["layouts"].items():
            for impl, graphs in found.get("graphs", {}).items():
                exchanges = {}
                if "exposed_ms" in graphs:  # absent from results until 2026-11-22
                    times = (graphs[key] for key in ("exchange_ms", "exposed_ms", "idle_ms"))
                    exchanges["exchange, exposed, idle ms"] = ", ".join(
                        f"{one:.2f}" for one in times
                    )
                if "barriers" in graphs:  # absent from results until 2026-11-29
                    exchanges["barriers"] = f"{graphs['barriers']:,.0f}"
                rows.append(
                    {
                        "model": model,
                        "layout": name,
                        "graphs": f"{impl} ({graphs['modules']})",
                        "eager ms": harness.shown(graphs["eager_ms"]),
                        "replayed ms": harness.shown(graphs["step_ms"]),
                        "of eager": harness.shown(graphs["of_eager"]),
                        "tokens/s per GPU": round(graphs["tokens_per_second_per_gpu"]),
                        "of one GPU's": f"{graphs['scaling']:.3f}",
                        **exchanges,
                        "graphs hold": f"{graphs['graph_mib']:,.0f} MiB",
                        "plan": result["plan_hash"],
                    }
                )
    return rows


def exposed_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each layout and each of its longest exposed exchanges in replayed steps."""
    return [
        {
            "layout": name,
            "graphs": impl,
            "exchange": exchange.split("(")[0],
            "exposed ms": f"{milliseconds:.2f}",
        }
        for result in results.values()
        for name, found in result["layouts"].items()
        for impl, graphs in found.get("graphs", {}).items()
        for exchange, milliseconds in graphs["exposed"].items()
    ]


def scaling_rows_of(*of_processes: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each parallel axis and number of GPUs: tokens/s per GPU, and the ratio to
    one GPU.

    The rate of one GPU comes from the same run.

    Args:
        of_processes: contents of result files; each file holds the results of one number of processes.
    """
    rows: list[dict[str, object]] = []
    for axis, (model, *names) in SCALED.items():
        for result in (results[model] for results in of_processes if model in results):
            for name in (name for name in names if "step_ms" in result["layouts"].get(name, {})):
                found, one = result["layouts"][name], result["layouts"][ONE]
                kinds = {"eager": (found, one)}
                kinds |= {
                    impl: (graphs, one["graphs"][impl])
                    for impl, graphs in found.get("graphs", {}).items()
                }
                rates = {
                    kind: f"{many['tokens_per_second_per_gpu']:,.0f} ({many['scaling']:.3f} of "
                    f"{single['tokens_per_second_per_gpu']:,.0f})"
                    for kind, (many, single) in kinds.items()
                }
                rows.append(
                    {
                        "axis": axis,
                        "GPUs": result["processes"],
                        "model": model,
                        "layout": name,
                        **rates,
                        "plan": result["plan_hash"],
                    }
                )
    return rows


def quick(c: dict[str, Any]) -> dict[str, Any]:
    """Return the same layers with sizes for a CPU."""
    small = {
        **c,
        "T": 128,
        "pattern": "M*E-" if "experts" in c else "M*-",
        "hidden": 64,
        "heads": 4,
        "groups": 2,
        "ffn": 64,
        "mamba_heads": 4,
        "mamba_groups": 2,
        "vocab": 256,
    }
    return small | ({"expert_ffn": 32} if "experts" in c else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--layouts", nargs="+", help="names (default: all for the number of processes)"
    )
    parser.add_argument(
        "--graphs", nargs="+", choices=GRAPHS, default=GRAPHS, help="kinds of graphs (default: all)"
    )
    parser.add_argument("--suffix", default="", help="end of the name of each result file")
    parser.add_argument("--packs", type=int, default=4, help="packs in a step, over all processes")
    harness.tilings_argument(parser)
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = torch.device(
        device_from(arguments.device).type
    )  # `ParallelGroups` gives each process the GPU of its local rank.
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world not in LAYOUTS:
        parser.error(
            f"layouts exist for {' and '.join(map(str, LAYOUTS))} processes, not for {world}; "
            "start this script with torchrun --nproc_per_node N"
        )
    wanted = arguments.layouts or list(LAYOUTS[world])
    if unknown := set(wanted) - LAYOUTS[world].keys():
        parser.error(
            f"no layout {', '.join(sorted(unknown))} for {world} processes; "
            f"choose from {', '.join(LAYOUTS[world])}"
        )
    apply_environment(TrainingConfig(train_iters=STEPS))
    harness.tune_over(arguments.tilings)
    everyone = ParallelGroups.create(
        ParallelConfig(), device, layout=ParallelLayout(world_size=world)
    )
    results: dict[str, Any] = {}
    for model in arguments.models:
        c = quick(MODELS[model]) if arguments.quick else MODELS[model]
        steps = steps_of(
            c, arguments.packs, QUICK_STEPS if arguments.quick else STEPS, everyone.device
        )
        layouts = {ONE: {}} | {
            name: LAYOUTS[world][name] for name in wanted if suits(LAYOUTS[world][name], c)
        }
        result: dict[str, Any] = {"tokens": c["T"], "processes": world, "layouts": {}}
        result["plan_hash"] = hash_of(
            [pack.packed.cu_seqlens_cpu.tolist() for packs in steps for pack in packs]
        )
        results[model] = result
        for name, options in layouts.items():
            if device.type == "cuda":
                harness.free_memory()
                torch.cuda.reset_peak_memory_stats()
            config = config_of(c, arguments.packs, options, device, len(steps))
            found: dict[str, Any] | None = None
            try:
                if name != ONE:
                    layout = ParallelLayout(world_size=world, **config.parallel.layout_sizes)
                    groups = ParallelGroups.create(config.parallel, device, layout=layout)
                    found = train(config, groups, steps, c["vocab"], arguments.graphs)
                elif rank == 0:
                    alone = ParallelGroups.single(everyone.device)
                    found = train(config, alone, steps, c["vocab"], arguments.graphs)
            # All ranks raise the same error before the first collective, so no rank waits for
            # another.
            except ValueError as error:
                found = {"failed": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            dist.barrier()
            if rank == 0 and found is not None:
                one = result["layouts"].get(ONE, found)
                result["layouts"][name] = found if "failed" in found else compared(found, one)
                file = f"layouts_{world}_{model}{arguments.suffix}"
                harness.save(file, {model: result}, folder=arguments.results)
                print(
                    f"{model}, {name}: {harness.shown(harness.plain(found).get('step_ms'))} ms",
                    flush=True,
                )
    problems = problems_of(results) if rank == 0 else []
    if rank == 0:
        print(harness.table(rows_of(harness.plain(results))))
        if by_graphs := graph_rows_of(harness.plain(results)):
            print(harness.table(by_graphs))
    dist.barrier()  # no rank closes its connections while another rank still prints
    everyone.shutdown()
    if problems:
        raise SystemExit("failed: " + "; ".join(problems))


if __name__ == "__main__":
    main()
