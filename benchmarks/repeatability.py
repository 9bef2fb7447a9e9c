"""Checks whether the same steps from the same weights give the same results, eagerly and by replay.

    python benchmarks/repeatability.py [shard8b] [hybrid1b] [--repeats 50] [--kernels fastest deterministic ...]

Models, packs and steps are those of `full_step.py`, without gradient clipping. Each repeat starts
from the initial weights and runs the same steps three times: eagerly at exact sizes, eagerly padded
to the capacity of a graph, and by `--cuda-graph-impl full_iteration`. An outcome consists of loss
and norm of every step, a checksum of every parameter's gradient in the first step, and a checksum
of the final weights.

Kernels that add in a changing order give several outcomes on every path. In the first step they
change the gradients of their own layers and of the layers below. A replay that reads a buffer too
early or too late has outcomes that eager steps with the same kernels do not have.

Each choice of kernels runs in a separate process, because libraries read the environment once. All
processes run at the same time, so that other work on the GPU varies the timing of the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import harness
from full_step import CAPACITIES, LR, PACKS, config_of, steps_of
from megatron_packed.config.environment_variables import DETERMINISTIC, FASTEST
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from model_step import CONFIGS, begin_alone, packings
from workloads import device_from

EXACT, PADDED, REPLAY = "eager, exact sizes", "eager, room for 16 documents", "replay"


class Kernels(NamedTuple):
    environment: Mapping[str, str]
    attention: bool
    """True if attention must use deterministic kernels."""


_MAMBA = ("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC")
KERNELS = {
    "fastest": Kernels(FASTEST, False),
    "fastest, but deterministic attention": Kernels(FASTEST, True),
    "fastest, but deterministic scan and convolution": Kernels(
        {**FASTEST, **{name: DETERMINISTIC[name] for name in _MAMBA}}, False
    ),
    "deterministic": Kernels(DETERMINISTIC, True),
}
"""Choices of kernels.

They are the fastest kernels, the fastest with deterministic attention, the fastest with
deterministic scan and convolution, and all kernels of ``--deterministic-mode``.
"""


class Outcome(NamedTuple):
    """Results of one repeat on one path."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[int, ...]
    """Checksum of each parameter's gradient in the first step."""
    weights: int
    """Checksum of the weights after the last step."""


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a checksum of each tensor's bits, weighted by position: ``(len(tensors),)`` int64."""
    sums = []
    for tensor in tensors:
        bits = (
            tensor.reshape(-1)
            .view(torch.int32 if tensor.element_size() == 4 else torch.int16)
            .long()
        )
        places = torch.arange(1, len(bits) + 1, device=tensor.device)
        sums.append((bits * places).sum())
    return torch.stack(sums)


def outcome(
    job: Job, run: Callable[[list[MicroBatch]], torch.Tensor], steps: Sequence[list[MicroBatch]]
) -> Outcome:
    parameters = list(job.model.parameters())
    values, gradients = [], torch.empty(0)
    for number, step in enumerate(steps):
        values.append(StepValues.from_list(run(step).tolist()))
        if number == 0:
            gradients = checksums([parameter.main_grad for parameter in parameters])
    weights = checksums([parameter.detach() for parameter in parameters]).sum().item()
    losses, norms = (tuple(getattr(one, name) for one in values) for name in ("loss", "grad_norm"))
    return Outcome(losses, norms, tuple(gradients.tolist()), int(weights))


def judged(found: Mapping[str, Sequence[Outcome]], names: Sequence[str]) -> dict[str, Any]:
    """Count the outcomes of each path, and compare them with the most frequent eager outcome.

    Args:
        found: outcomes of each path. The most frequent outcome of the path `PADDED` is the reference.
        names: names of the parameters, from the input to the output.
    """
    usual = Counter(found[PADDED]).most_common(1)[0][0]
    eager = set(found[PADDED])

    def apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
        return [abs(x - y) / abs(y) for x, y in zip(one, other, strict=True)]

    result = {}
    for path, outcomes in found.items():
        different = {
            at
            for one in outcomes
            for at, sum_ in enumerate(one.gradients)
            if sum_ != usual.gradients[at]
        }
        result[path] = {
            "repeats": len(outcomes),
            "outcomes": sorted(Counter(outcomes).values(), reverse=True),
            "first_gradients": sorted(
                Counter(one.gradients for one in outcomes).values(), reverse=True
            ),
            "as_eager_usually": sum(one == usual for one in outcomes),
            "as_eager_ever": sum(one in eager for one in outcomes),
            "loss_apart": [
                max(of) for of in zip(*(apart(one.losses, usual.losses) for one in outcomes))
            ],
            "norm_apart": [
                max(of) for of in zip(*(apart(one.norms, usual.norms) for one in outcomes))
            ],
            "different_gradients": [names[at] for at in sorted(different)],
        }
    return result


def run(
    c: dict[str, Any],
    kernels: str,
    micro_batches: int,
    repeats: int,
    device: torch.device,
    backend: Callable[[], GraphBackend | None] = lambda: None,
) -> dict[str, Any]:
    """Measure one choice of kernels. The caller must have set the environment of that choice."""
    lengths = packings(c["T"], PACKS)
    capture_sizes, groups = (
        CaptureSizes.from_capacities(CAPACITIES, c["T"]),
        ParallelGroups.single(device),
    )
    config = config_of(c, micro_batches, device)
    # Clipping would divide all gradients in place by a norm that varies between repeats, before
    # their checksums are taken.
    config = replace(
        config,
        optim=replace(config.optim, clip_grad=0.0),
        training=replace(config.training, deterministic_mode=KERNELS[kernels].attention),
        cuda_graph=replace(config.cuda_graph, cuda_graph_max_packed_seqs=CAPACITIES),
    )
    if kernels == "deterministic":
        configure_determinism()
    job = build_job(config, groups, c["vocab"])
    state = {name: shard.clone() for name, shard in job.optimizer.state_shards().items()}
    graphs = build_graphs(
        config, job, capture_sizes, groups, lambda line: print(line, flush=True), backend()
    )
    assert isinstance(graphs, FullIterationGraphs), "graphs need a GPU"

    def by(graphs: FullIterationGraphs | None) -> Callable[[list[MicroBatch]], torch.Tensor]:
        def step(batches: list[MicroBatch]) -> torch.Tensor:
            job.step.graphs = graphs
            return job.step(batches, LR)

        return step

    exact, placed = (
        steps_of(c, lengths, micro_batches, room, device) for room in (None, capture_sizes)
    )
    with released(graphs):
        capture_graphs(graphs, job.step, micro_batches, groups, first=True)
        paths = {EXACT: (by(None), exact), PADDED: (by(None), placed), REPLAY: (by(graphs), placed)}
        found: dict[str, list[Outcome]] = {path: [] for path in paths}
        for _ in range(repeats):
            for path, (function, steps) in paths.items():
                job.optimizer.load_state(state)
                found[path].append(outcome(job, function, steps))
        assert (
            graphs.counters.replays == repeats * len(placed) * micro_batches
            and not graphs.counters.fallbacks
        )
    return {
        "steps": len(exact),
        "micro_batches": micro_batches,
        "tokens": c["T"],
        "backends": {
            op.name: op.select(inputs).name for op, _, inputs in op_requests(config, device)
        },
        "paths": judged(found, [name for name, _ in job.model.named_parameters()]),
    }


def last_of(parameters: Sequence[str]) -> list[str]:
    """Return the names of the last three parameters, after the number of all others.

    The backward pass reaches the last parameters of the model first.
    """
    more = len(parameters) - 3
    return [f"{more} others"] * (more > 0) + list(parameters[-3:])


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each choice of kernels and each path."""
    return [
        {
            "config": config,
            "kernels": kernels,
            "path": path,
            "repeats": one["repeats"],
            "different outcomes": len(one["outcomes"]),
            "most frequent": one["outcomes"][0],
            "in eager steps, too": one["as_eager_ever"],
            "norms apart: first step, last": f"{one['norm_apart'][0]:.0e}, {one['norm_apart'][-1]:.0e}",
            "losses apart: first step, last": f"{one['loss_apart'][0]:.0e}, {one['loss_apart'][-1]:.0e}",
            "first gradients that vary": ", ".join(last_of(one["different_gradients"])),
        }
        for config, choices in results.items()
        for kernels, found in choices.items()
        for path, one in found["paths"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "configs", nargs="*", default=["shard8b"], help=f"from {list(CONFIGS)} (default: shard8b)"
    )
    parser.add_argument("--micro-batches", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=list(KERNELS),
        choices=KERNELS,
        metavar="KERNELS",
        help=f"from {list(KERNELS)} (default: all)",
    )
    # Result file of a child process, which measures one choice of kernels.
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    harness.tilings_argument(parser)
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    if device.type != "cuda":
        raise SystemExit("repeatability.py captures CUDA graphs and needs a GPU.")
    if arguments.into is not None:
        begin_alone(port=29514)
        harness.tune_over(arguments.tilings)
        (config,), (kernels,) = arguments.configs, arguments.kernels
        found = run(CONFIGS[config], kernels, arguments.micro_batches, arguments.repeats, device)
        arguments.into.write_text(json.dumps(found))
        return
    results: dict[str, Any] = {}
    more = [] if arguments.tilings is None else ["--tilings", str(arguments.tilings)]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for config in arguments.configs:
            started = {}
            for number, kernels in enumerate(arguments.kernels):
                into = Path(folder) / f"{number}.json"
                words = [
                    config,
                    "--kernels",
                    kernels,
                    "--into",
                    into,
                    "--repeats",
                    arguments.repeats,
                    "--micro-batches",
                    arguments.micro_batches,
                    *more,
                ]
                started[kernels] = (
                    into,
                    subprocess.Popen(
                        [sys.executable, __file__, *map(str, words)],
                        env={**os.environ, **KERNELS[kernels].environment},
                    ),
                )
            results[config] = {}
            for kernels, (into, process) in started.items():
                if process.wait() == 0:
                    results[config][kernels] = json.loads(into.read_text())
                    harness.save("repeatability", results, folder=arguments.results)
                else:
                    failed.append(f"{config}, {kernels}")
    print(harness.table(rows_of(results)))
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
