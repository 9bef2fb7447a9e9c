"""Compares cuBLAS with and without a workspace: time, kernels and memsets of matrix products.

    python benchmarks/cublas_workspace.py

With a workspace, cuBLAS on Hopper chooses kernels that count tiles in the workspace, and clears the
counter with a memset before many products. This benchmark measures whether the products of a
training step are as fast without a workspace. Each setting of ``CUBLAS_WORKSPACE_CONFIG`` runs in a
separate process, because torch reads the variable once. Each product is captured 20 times in a
graph; the time is that of one replay divided by 20.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch

import harness

SETTINGS = {"torch's default": "", "two buffers of 4 MiB": ":4096:2", "none": ":0:0"}
TOKENS = 4096
SHAPES = {
    "shard8b in_proj": (4096, 2320),
    "shard8b out_proj": (1024, 4096),
    "shard8b fc1": (4096, 2688),
    "shard8b fc2": (2688, 4096),
    "shard8b qkv": (4096, 768),
    "hybrid1b in_proj": (2048, 10304),
    "hybrid1b fc1": (2048, 8192),
    "hybrid1b fc2": (8192, 2048),
    "head": (4096, 16384),
}
"""Input and output features of each linear layer."""
COPIES = 20


def products(inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
    """Return the three matrix products of a linear layer, as ``layers/linear.py`` computes them."""
    x_TI = torch.randn(TOKENS, inputs, device="cuda", dtype=torch.bfloat16)
    weight_OI = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    grad_TO = torch.randn(TOKENS, outputs, device="cuda", dtype=torch.bfloat16)
    total_OI = torch.zeros(outputs, inputs, device="cuda")
    return {
        "forward": lambda: x_TI @ weight_OI.t(),
        "input gradient": lambda: grad_TO @ weight_OI,
        "weight gradient": lambda: torch.ops.aten.addmm.dtype_out(
            total_OI, grad_TO.t(), x_TI, torch.float32, out=total_OI
        ),
    }


def captured(product: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            product()
    return graph


def measure() -> list[dict[str, object]]:
    rows = []
    for name, (inputs, outputs) in SHAPES.items():
        for kind, product in products(inputs, outputs).items():
            graph = captured(product)
            spread = harness.device_time(graph.replay, warm=3, repeats=10)
            busy = harness.gpu_busy(graph.replay, calls=1)
            memsets = any("memset" in kernel.lower() for kernel, _ in busy.kernels)
            rows.append(
                {
                    "layer": name,
                    "product": kind,
                    "us": [round(1e3 * value / COPIES, 2) for value in spread],
                    "memsets": memsets,
                    "kernel": busy.kernels[0][0][:80],
                }
            )
            del graph
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--one", action="store_true", help="measure with the setting of this process and print JSON"
    )
    if parser.parse_args().one:
        print(json.dumps(measure()))
        return
    results = {}
    for label, setting in SETTINGS.items():
        environ = {
            name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"
        }
        if setting:
            environ["CUBLAS_WORKSPACE_CONFIG"] = setting
        run = subprocess.run(
            [sys.executable, __file__, "--one"],
            env=environ,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        results[label] = {
            "CUBLAS_WORKSPACE_CONFIG": setting,
            "rows": json.loads(run.stdout.splitlines()[-1]),
        }
    rows = []
    for number, row in enumerate(results["none"]["rows"]):
        cells = {"layer": row["layer"], "product": row["product"]}
        for label, result in results.items():
            at = result["rows"][number]
            cells[label] = f"{at['us'][0]:.1f} us" + (", memset" if at["memsets"] else "")
        rows.append(cells)
    print(harness.table(rows))
    for label, result in results.items():
        print(f"{label}: {sum(row['us'][0] for row in result['rows']):.0f} us in all")
    print(harness.save("cublas_workspace", results))


if __name__ == "__main__":
    main()
