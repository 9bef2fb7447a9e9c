"""Times quack's grouped product that adds the gradients of experts' weights, in float32 and in bf16.

    python benchmarks/expert_gradients.py

The sums have one matrix for each expert. ``apart`` is a product in bf16 that writes, and torch's addition
of its result. Each size has equally many rows for each expert, and is timed with random values.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

import harness
from workloads import device_from


class Size(NamedTuple):
    """Rows of all experts, number of experts, and sizes of a gradient."""

    rows: int
    experts: int
    outputs: int
    inputs: int


SIZES = {
    "Nano, one GPU": Size(49152, 128, 1856, 2688),
    "Nano, one GPU, second weight": Size(49152, 128, 2688, 1856),
    "Nano, EP4": Size(49152, 32, 1856, 2688),
    "Nano, EP8": Size(49152, 16, 1856, 2688),
}
QUICK = {"quick": Size(64, 4, 16, 24)}
SUMS = ("fp32", "bf16", "bf16, apart")


def measure(size: Size, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return times, rates, and the ratio of bf16 to float32 sums."""
    from megatron_packed.ops.grouped_mlp.quack import PRODUCTS

    generator = torch.Generator(device=device).manual_seed(0)
    dy, x = (
        torch.randn(size.rows, width, generator=generator, device=device).bfloat16()
        for width in (size.outputs, size.inputs)
    )
    step = size.rows // size.experts
    offsets = torch.arange(step, size.rows + 1, step, dtype=torch.int32, device=device)
    shape = (size.experts, size.outputs, size.inputs)
    sums = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, dtype in zip(SUMS, (torch.float32, torch.bfloat16, torch.bfloat16), strict=True)
    }
    for name in SUMS[:2]:
        assert PRODUCTS.can_add(sums[name], dy, x), name

    def add(name: str) -> None:
        PRODUCTS.add_weight_gradient(sums[name], dy, x, offsets)

    def add_apart() -> None:
        sums["bf16, apart"].add_(PRODUCTS.weight_gradient(dy, x, offsets))

    calls = {"fp32": lambda: add("fp32"), "bf16": lambda: add("bf16"), "bf16, apart": add_apart}
    seconds = harness.interleaved_seconds(calls, repeats=repeats)
    flops = 2 * size.rows * size.outputs * size.inputs
    spreads = {name: harness.Spread.of(of_name) for name, of_name in seconds.items()}
    return {
        **spreads,
        "tflops": {name: round(flops / spread.median / 1e9) for name, spread in spreads.items()},
        "ratio": harness.Spread.of_ratios(seconds["fp32"], seconds["bf16"]),
    }


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    return [
        {
            "size": name,
            **{f"{kind}, ms": harness.shown(found[kind]) for kind in SUMS},
            "TFLOP/s": ", ".join(str(found["tflops"][kind]) for kind in SUMS),
            "fp32 / bf16": harness.shown(found["ratio"]),
        }
        for name, found in results["times"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    sizes, repeats = (QUICK, 1) if arguments.quick else (SIZES, 30)
    times = {name: measure(size, device, repeats) for name, size in sizes.items()}
    results = {"times": times}
    path = harness.save("expert_gradients", results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
