"""Compares the memory that `megatron-packed plan` estimates with the peak of steps on a GPU.

    python benchmarks/plan_peaks.py [NAME ...]

Five configurations of one model with 8,192 tokens are measured: eager, CUDA graphs per layer,
recomputation of complete layers, offload of their inputs, and experts. Each configuration is a
separate job with its optimizer. The peak is that of two steps after warm-up. With graphs the peak
is the largest memory of tensors outside the graph pool, plus the pool.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import harness
import offload
from layouts import MODELS, quick
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.estimate.run_estimate import estimates, usual
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.training.build_graphs import build_graphs, capture_graphs
from workloads import device_from

CASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"impl": "local"},
    "recompute": {"memory": offload.SIDES[offload.RECOMPUTE]},
    "offload": {"memory": offload.SIDES[offload.TWO]},
    "experts": {"model": "hybrid1b_moe"},
}
WITHIN = 0.10


def estimated(config: RunConfig, vocab: int) -> dict[str, Any]:
    """Return the estimate for a single process and the document capacity of `offload.py`."""
    one = usual(estimates(config, 1, vocab, offload.CAPACITY))
    return {
        "gib": one.allocated / 2**30,
        "where": one.peak.where,
        "pinned_mib": one.host_bytes / 2**20,
    }


def measured(
    c: dict[str, Any],
    config: RunConfig,
    device: torch.device,
    backend: Callable[[], GraphBackend | None] = lambda: None,
) -> dict[str, float]:
    """Return the measured memory in GiB.

    On a CPU the steps only check that the benchmark works, and the result is 0.
    """
    groups = ParallelGroups.single(device)
    job = offload.first_job(config, groups, c["vocab"])
    step = offload.runner(job, offload.steps_of(c, device))
    capture_sizes = CaptureSizes.of([offload.CAPACITY], c["T"])
    graphs = build_graphs(config, job, capture_sizes, groups, lambda line: None, backend())
    try:
        pool = 0.0
        if graphs is not None:
            capture_graphs(graphs, job.step, 1, groups, first=True)
            job.step.graphs, pool = graphs, graphs.counters.memory_mib / 1024
        for _ in range(offload.WARM):
            step()
        if device.type != "cuda":
            return {"gib": 0.0, "pool_gib": pool}
        peak = offload.peak_of(step)
        return {
            "gib": peak["peak_gib"] + pool,
            "pool_gib": pool,
            "reserved_gib": peak["reserved_gib"],
        }
    finally:
        if graphs is not None:
            graphs.close()


def sizes_and_config(name: str, device: torch.device) -> tuple[dict[str, Any], RunConfig]:
    """Return the model sizes and the run configuration of a case. On a CPU the sizes are small."""
    case = CASES[name]
    c = MODELS[case.get("model", "hybrid1b")]
    c = c if device.type == "cuda" else quick(c)
    return c, offload.config_of(c, case.get("memory", {}), device, case.get("impl", "none"))


def run(
    name: str, device: torch.device, backend: Callable[[], GraphBackend | None] = lambda: None
) -> dict[str, Any]:
    """Estimate and measure one configuration."""
    c, config = sizes_and_config(name, device)
    found = {
        "estimated": estimated(config, c["vocab"]),
        "measured": measured(c, config, device, backend),
    }
    if found["measured"]["gib"]:
        found["error"] = found["estimated"]["gib"] / found["measured"]["gib"] - 1
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each configuration."""
    return [
        {
            "configuration": name,
            "measured GiB": f"{found['measured']['gib']:.2f}",
            "estimated GiB": f"{found['estimated']['gib']:.2f}",
            "": f"{100 * found['error']:+.1f} %" if "error" in found else "",
            "pinned on the host MiB": f"{found['estimated']['pinned_mib']:,.0f}",
            "worst moment": found["estimated"]["where"],
        }
        for name, found in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(CASES), help=f"from {list(CASES)} (default: all)"
    )
    harness.tilings_argument(parser)
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    apply_environment(TrainingConfig(train_iters=1))
    harness.tune_over(arguments.tilings)
    results: dict[str, Any] = {}
    for name in arguments.names:
        results[name] = run(name, device)
        harness.save("plan_peaks", results, folder=arguments.results)
        harness.free_memory()
    print(harness.table(rows_of(harness.plain(results))))
    far = [name for name, found in results.items() if abs(found.get("error", 0.0)) > WITHIN]
    if far:
        raise SystemExit(
            f"failed: estimates differ by more than {100 * WITHIN:.0f} % from the measured memory: "
            f"{', '.join(far)}"
        )


if __name__ == "__main__":
    main()
