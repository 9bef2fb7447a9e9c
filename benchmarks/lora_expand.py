"""Times the second product of adapters: our kernel and PyTorch's product, against the copy bandwidth.

    python benchmarks/lora_expand.py

The product writes ``(T, O)`` from few columns, so it cannot be faster than these bytes. The share of the
bandwidth is that of a large copy in the same run, which reads and writes.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

import harness
from harness import Spread
from megatron_packed.ops.lora_expand import linear, triton_kernel
from workloads import device_from


class Size(NamedTuple):
    """Rows, columns and outputs of a product."""

    tokens: int
    columns: int
    outputs: int


SIZES = [
    *(Size(8192, 16, outputs) for outputs in (2048, 4096, 8192, 8512, 21504)),
    Size(8192, 32, 12352),
    Size(8192, 48, 3072),
]
QUICK = [Size(64, 16, 128)]
COPIED = 2**30
"""Bytes of the copy."""
ROUNDS, CALLS = 10, 20


def times_of(size: Size, device: torch.device, rounds: int) -> dict[str, Spread]:
    """Return the milliseconds of one call of each backend, in turns: GPU-busy, or on a CPU by the clock."""
    low_TP = torch.randn(size.tokens, size.columns, dtype=torch.bfloat16, device=device)
    weight_OP = torch.randn(size.outputs, size.columns, dtype=torch.bfloat16, device=device)
    runs = {"torch": lambda: linear.run(low_TP, weight_OP, None)}
    if device.type == "cpu":
        return {"torch": harness.wall(runs["torch"], repeats=rounds)}
    runs["triton"] = lambda: triton_kernel.expanded(low_TP, weight_OP, None)
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            found[name].append(harness.gpu_busy(runs[name], calls=CALLS).milliseconds / 1e3)
    return {name: Spread.of(seconds) for name, seconds in found.items()}


def copy_rate(device: torch.device, size: int) -> float:
    """Return the bytes that a large copy reads and writes in a millisecond."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = harness.wall if device.type == "cpu" else harness.device_time
    return 2 * size / timed(lambda: target.copy_(source)).median


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    rows: list[dict[str, object]] = []
    for found in results["products"]:
        ours, theirs = (found["times"].get(name) for name in ("triton", "torch"))
        least = 2 * found["tokens"] * found["outputs"] / results["rate"]
        rows.append(
            {
                "P": found["columns"],
                "O": found["outputs"],
                "triton": harness.shown(ours),
                "torch": harness.shown(theirs),
                "torch / triton": f"{theirs[0] / ours[0]:.3g}" if ours else "",
                "share of bandwidth": f"{100 * least / ours[0]:.0f} %" if ours else "",
            }
        )
    return rows


def main() -> None:
    """Measure all sizes, and save the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    sizes, copied, rounds = (QUICK, 2**16, 2) if arguments.quick else (SIZES, COPIED, ROUNDS)
    results: dict[str, Any] = {"rate": copy_rate(device, copied), "products": []}
    for size in sizes:
        times = times_of(size, device, rounds)
        results["products"].append({**size._asdict(), "times": times})
        print(
            f"{size}: { {name: harness.shown(time) for name, time in times.items()} }", flush=True
        )
        harness.save("lora_expand", results, folder=arguments.results)


if __name__ == "__main__":
    main()
