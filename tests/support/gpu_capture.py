"""Functions and steps in CUDA graphs, and the memory of graphs, for GPU tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def capture(
    call: Callable[[], Any],
    warm_up: Callable[[], Any] | None = None,
    times: int = 3,
    **options: Any,
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of a function's call, and the results that each replay overwrites.

    The function, or ``warm_up``, runs ``times`` times before, because kernels are tuned at their
    first use. ``options`` are those of ``torch.cuda.graph``.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            (warm_up or call)()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = call()
    return graph, results


class _Bytes:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def poison_pool(pool: tuple[int, int]) -> int:
    """Set every bit of a graph pool, and return its bytes: floats become NaN, integers -1."""
    torch.cuda.synchronize()
    found = 0
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) == tuple(pool):
            values = _Bytes(segment["address"], segment["total_size"])
            torch.as_tensor(values, device=torch.device("cuda", 0)).fill_(255)
            found += segment["total_size"]
    assert found > 0, "no memory of the graphs was found"
    return found


def assert_ends(script: str, tmp_path: Path) -> None:
    """Run a script in a process of its own; it must print "the end" and exit."""
    command = [sys.executable, "-c", script, str(tmp_path / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("the end\n"), (
        done.stdout + done.stderr[-3000:]
    )
