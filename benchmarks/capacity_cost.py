"""Measures the cost of a larger document capacity in one CUDA graph of attention or of a Mamba
layer.

    python benchmarks/capacity_cost.py [SIZE ...] [--backends NAME ...] [--capacities N ...]

The grid of a captured kernel is fixed: the kernel always runs for the captured number of documents
and the captured longest row, even if a pack has fewer. This benchmark runs one pack of 12 documents
of long-tailed lengths, forward and backward. It captures the pack at capacities from 12 (the exact
number) to 512 documents. The bound on the longest row is either the pack's longest row or the
number of tokens T. Attention runs with every backend.

Each case is a graph of a few calls. The graphs of one size take turns, and each ratio compares
calls of the same round. All attention times are divided by the time of the fastest backend at exact
capacity and exact bound, which is the time that an eager step would need.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import harness
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.varlen_attention.api import prepare_tables, varlen_attention
from megatron_packed.packed.params import PackedSeqParams
from model_step import CONFIGS, our_model
from workloads import device_from, hash_of

BACKENDS = ("flash_attn_4", "flash_attn_2", "transformer_engine", "flex", "torch_varlen")
CAPACITIES = (16, 32, 64, 128, 256, 512)
DOCUMENTS = 12
CALLS = 4
"""Number of calls in one graph. Several calls make the launch time of the graph negligible."""
EXACT = "exact"
BOUNDS = {"longest": "longest row", "T": "T"}
"""Value that is passed as max_seqlen, and its name in the table."""


@dataclass(frozen=True)
class Size:
    """Attention and Mamba layer of a configuration of `model_step.py`, for a number of tokens."""

    config: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.config}_{self.tokens}"

    def shrunk(self) -> Size:
        return Size(self.config, self.tokens // 32)


SIZES = {
    size.name: size
    for size in (
        Size("shard8b", 4096),
        Size("hybrid1b", 8192),
        Size("shard8b", 8192),
        Size("hybrid1b", 4096),
    )
}
"""Sizes to measure. The two sizes that `model_step.py` uses come first."""


def long_tailed(tokens: int, documents: int = DOCUMENTS, seed: int = 0) -> list[int]:
    """Return lengths of documents that together fill a pack.

    Lengths are lognormal with a standard deviation of 1.2 of the logarithm. Each length is at least
    1.
    """
    weights = np.exp(1.2 * np.random.default_rng(seed).standard_normal(documents))
    lengths = 1 + np.floor(weights / weights.sum() * (tokens - documents)).astype(int)
    lengths[int(lengths.argmax())] += tokens - int(lengths.sum())
    return [int(length) for length in lengths]


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture a graph of `CALLS` calls and return its replay. On a CPU, return the function itself.

    Raises:
        RuntimeError: the function waits for the device, so it cannot be captured.
    """
    if device.type != "cuda":
        return function
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        function()
        torch.cuda.set_sync_debug_mode(
            "error"
        )  # A host wait would invalidate the capture. So this mode raises an error for it before the capture.
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()

    def replay(reads: Callable[[], object] = function) -> None:
        """Replay the graph. ``reads`` keeps the tensors alive that the graph reads, such as
        metadata.
        """
        graph.replay()

    return replay


def in_turns(
    functions: dict[Any, Callable[[], object]], device: torch.device, rounds: int
) -> dict[Any, list[float]]:
    """Return the seconds of each function's calls, by round.

    The functions take turns without a pause, so that the device stays busy. Every second round runs
    them in reverse order.
    """
    if device.type != "cuda":
        return harness.interleaved_seconds(functions, warm=1, repeats=rounds)
    for function in functions.values():
        function()
    marks: dict[Any, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in functions
    }
    torch.cuda.synchronize()
    for number in range(rounds):
        for name in list(functions) if number % 2 == 0 else reversed(functions):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            functions[name]()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: [a.elapsed_time(b) / 1e3 / CALLS for a, b in pairs] for name, pairs in marks.items()
    }


def attempt(
    build: Callable[[], Callable[[], object]], device: torch.device
) -> Callable[[], object] | str:
    """Build and capture a function. Return its replay, or the reason why it cannot run."""
    try:
        return captured(build(), device)
    except NoBackendError as error:
        return f"refused: {error}"
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return f"failed: {type(error).__name__}: {str(error)[:300]}"


def attention(
    backend: str, leaves: list[Tensor], upstream: Tensor, packed: PackedSeqParams
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward of the op.

    The op's tables are built before the measured calls, because all layers of a step share them.
    """
    q_TNH, k_TKH, v_TKH = leaves
    tables = prepare_tables(
        backend,
        packed.seq_idx,
        packed.cu_seqlens,
        num_heads=q_TNH.shape[1],
        num_kv_heads=k_TKH.shape[1],
        head_dim=q_TNH.shape[2],
        dtype=q_TNH.dtype,
    )

    def step() -> tuple[Tensor, ...]:
        output = varlen_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            packed.cu_seqlens,
            packed.max_seqlen,
            seq_idx_1T=packed.seq_idx,
            tables=tables,
            backend=backend,
        )
        return torch.autograd.grad(output, leaves, upstream)

    return step


def attention_cost(
    size: Size,
    lengths: list[int],
    backends: list[str],
    capacities: list[int],
    device: torch.device,
    rounds: int,
) -> dict[str, Any]:
    """Return ``found[backend][bound][capacity]``: milliseconds, and the ratio to the fastest
    backend.

    The fastest backend at exact capacity and exact bound is the reference. A case that cannot run
    has the reason instead.
    """
    c = CONFIGS[size.config]
    dtype, head_dim = (torch.bfloat16, 128) if device.type == "cuda" else (torch.float32, 16)
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(size.tokens, heads, head_dim, generator=generator).to(device, dtype)

    leaves = [normal(heads).requires_grad_() for heads in (c["heads"], c["groups"], c["groups"])]
    upstream = normal(c["heads"])
    functions: dict[tuple[str, str, str], Callable[[], object]] = {}
    found: dict[str, Any] = {}
    for backend in backends:
        started = time.perf_counter()
        found[backend] = {bound: {} for bound in BOUNDS}
        for bound in BOUNDS:
            for capacity in (None, *capacities):
                packed = PackedSeqParams.from_lengths(
                    lengths, size.tokens, capacity, size.tokens if bound == "T" else None, device
                )
                outcome = attempt(
                    lambda b=backend, p=packed: attention(b, leaves, upstream, p), device
                )
                label = EXACT if capacity is None else str(capacity)
                if isinstance(outcome, str):
                    found[backend][bound][label] = outcome
                else:
                    functions[backend, bound, label] = outcome
        captures = sum(key[0] == backend for key in functions)
        print(
            f"{size.name} {backend}: captured {captures} cases in {time.perf_counter() - started:.1f} s",
            flush=True,
        )
    seconds = in_turns(functions, device, rounds)
    exact = {key: values for key, values in seconds.items() if key[1:] == ("longest", EXACT)}
    fastest = min(exact.values(), key=np.median) if exact else None
    for (backend, bound, label), values in seconds.items():
        found[backend][bound][label] = entry(values, fastest)
    return found


def entry(seconds: list[float], reference: list[float] | None) -> dict[str, Any]:
    over = None if reference is None else harness.Spread.of_ratios(seconds, reference)
    return {"ms": harness.Spread.of(seconds), "over": over}


def mamba_cost(
    size: Size, lengths: list[int], capacities: list[int], device: torch.device, rounds: int
) -> dict[str, Any]:
    """Return ``found[capacity]`` of one Mamba layer: milliseconds, and the ratio to exact capacity.

    A capacity that cannot run has the reason instead.
    """
    c = {**CONFIGS[size.config], "T": size.tokens, "vocab": 128, "pattern": "M"}
    if device.type != "cuda":
        c |= {"hidden": 64, "mamba_heads": 2, "mamba_groups": 1}
    layer = our_model(c, device).train().layers[0]
    FlatBuffers(layer)
    generator = torch.Generator().manual_seed(0)
    hidden, upstream = (
        torch.randn(size.tokens, c["hidden"], generator=generator).to(
            device, next(layer.parameters()).dtype
        )
        for _ in range(2)
    )
    hidden.requires_grad_()
    functions: dict[str, Callable[[], object]] = {}
    found: dict[str, Any] = {}
    for capacity in (None, *capacities):
        packed = PackedSeqParams.from_lengths(lengths, size.tokens, capacity, size.tokens, device)

        def step(packed: PackedSeqParams = packed) -> object:
            leaves = [hidden, *layer.parameters()]
            return torch.autograd.grad(layer(hidden, packed), leaves, upstream, allow_unused=True)

        outcome = attempt(lambda step=step: step, device)
        label = EXACT if capacity is None else str(capacity)
        if isinstance(outcome, str):
            found[label] = outcome
        else:
            functions[label] = outcome
    seconds = in_turns(functions, device, rounds)
    for label, values in seconds.items():
        found[label] = entry(values, seconds.get(EXACT))
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the attention table, one for each size, backend and bound.

    Ratios compare with the fastest backend of the size at exact capacity and exact bound.
    """
    rows = []
    for size, result in results.items():
        for backend, bounds in result["attention"].items():
            for bound, entries in bounds.items():
                rows.append(
                    {
                        "size": size,
                        "backend": backend,
                        "max_seqlen": BOUNDS[bound],
                        **_cells(entries),
                    }
                )
    return rows


def mamba_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the Mamba table. Ratios compare with the layer's time at exact capacity."""
    return [
        {"size": size, **_cells(result["mamba"])}
        for size, result in results.items()
        if "mamba" in result
    ]


def _cells(entries: dict[str, Any]) -> dict[str, object]:
    """Return the cells of one row: milliseconds at exact capacity, then a ratio for each capacity.

    A case that could not run shows the reason. If the next case has the same reason, only the kind
    (refused or failed) is repeated.
    """
    exact = entries.get(EXACT)
    cells: dict[str, object] = {
        "exact ms": harness.shown(exact["ms"]) if isinstance(exact, dict) else ""
    }
    said = None
    for label, found in entries.items():
        if isinstance(found, dict):
            cells[label] = harness.shown(found["over"])
            continue
        reason = found.rsplit("): ", 1)[-1][:100].replace("|", "/").replace("\n", " ")
        kind = found.partition(":")[0]
        cells[label] = kind if reason == said else f"{kind}: {reason.removeprefix(f'{kind}: ')}"
        said = reason
    return cells


def ordered(entries: dict[str, Any], capacities: list[int]) -> dict[str, Any]:
    """Return the entries sorted from exact to the largest capacity."""
    return {label: entries[label] for label in (EXACT, *map(str, capacities)) if label in entries}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", help=f"from {list(SIZES)} (default: all)")
    parser.add_argument(
        "--backends", nargs="+", help=f"backends of attention (default: {' '.join(BACKENDS)})"
    )
    parser.add_argument("--capacities", nargs="+", type=int, default=CAPACITIES)
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    if min(arguments.capacities) < DOCUMENTS:
        parser.error(f"--capacities must be at least {DOCUMENTS}, the documents of the pack")
    backends = arguments.backends or list(BACKENDS if device.type == "cuda" else ("reference",))
    capacities, rounds = sorted(arguments.capacities), 3 if arguments.quick else 30
    results: dict[str, Any] = {}
    path = None
    for name in arguments.sizes or SIZES:
        size = SIZES[name] if device.type == "cuda" else SIZES[name].shrunk()
        lengths = long_tailed(size.tokens)
        found = attention_cost(size, lengths, backends, capacities, device, rounds)
        results[name] = {
            "tokens": size.tokens,
            "lengths": lengths,
            "plan_hash": hash_of(lengths),
            "attention": {
                backend: {bound: ordered(entries, capacities) for bound, entries in bounds.items()}
                for backend, bounds in found.items()
            },
        }
        harness.save("capacity_cost", results, folder=arguments.results)
        results[name]["mamba"] = ordered(
            mamba_cost(size, lengths, capacities, device, rounds), capacities
        )
        path = harness.save("capacity_cost", results, folder=arguments.results)
        harness.free_memory()
        print(harness.table(rows_of(harness.plain({name: results[name]}))))
        print(harness.table(mamba_rows_of(harness.plain({name: results[name]}))), flush=True)
    print(path)


if __name__ == "__main__":
    main()
