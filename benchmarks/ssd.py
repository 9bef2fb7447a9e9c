"""Measures the two kernels of the Mamba-2 scan at 12 sizes, and their errors against float64.

    python benchmarks/ssd.py [--sizes NAME ...]

- ``triton`` are megatron_packed's kernels, which have one fixed size of programs for each dtype.
- ``mamba_ssm`` are the kernels of mamba-ssm at a chunk size of 128, with tuned tiles.

Times are the GPU-busy times of one layer, median [10th, 90th percentile] over rounds in which both take
turns. The ratio pairs the times of each round. Errors are norms relative to the reference in float64, for
the same bf16 inputs and gradient of y.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import harness
from harness import Spread
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.ssd.api import OP, inputs_of, ssd
from workloads import device_from, lognormal_lengths

NAMES = ("y", "dx", "ddt", "dA_log", "dB", "dC", "dD", "ddt_bias")
BACKENDS = ("triton", "mamba_ssm")
CHUNK_SIZE = 128
TOKENS_PER_DOCUMENT = 683
LARGEST_REFERENCE = 8192
"""Tokens of the largest pack whose errors are measured; the reference in float64 needs much memory."""


class Size(NamedTuple):
    tokens: int
    heads: int = 64
    groups: int = 8
    state_dim: int = 128
    head_dim: int = 64


SIZES = {
    "8,192 tokens": Size(8192),
    "1,024 tokens": Size(1024),
    "2,048 tokens": Size(2048),
    "4,096 tokens": Size(4096),
    "16,384 tokens": Size(16384),
    "32,768 tokens": Size(32768),
    "65,536 tokens": Size(65536),
    "TP8 share": Size(8192, heads=8, groups=1),
    "TP8 share of 8 B": Size(4096, heads=16, groups=1),
    "16 groups": Size(8192, groups=16),
    "state 64": Size(8192, state_dim=64),
    "state 256": Size(8192, state_dim=256),
}
QUICK = {"quick": Size(96, heads=2, groups=1, state_dim=16, head_dim=16)}


def lengths_of(tokens: int) -> list[int]:
    """Return the lengths of documents with a long tail, which fill the pack."""
    documents = max(tokens // TOKENS_PER_DOCUMENT, 2)
    mean = tokens / documents
    drawn = lognormal_lengths(4 * tokens, mean=mean, sigma=0.8, longest=tokens, seed=0)
    drawn = drawn[:documents]
    # Scaled lengths are rounded down to at least one token, and the last document gets the rest.
    lengths = [max(int(length * tokens / drawn.sum()), 1) for length in drawn[:-1]]
    return [*lengths, tokens - sum(lengths)]


def leaves(size: Size, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return x, dt, A_log, B, C, D and dt_bias with gradients, as a model has them at its start."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    t, n, g, s, p = size
    steps = torch.linspace(0.001, 0.1, n)
    tensors = {
        "x": normal(t, n, p).to(dtype),
        "dt": normal(t, n).to(dtype),
        "A_log": torch.linspace(1, 16, n).log(),
        "B": normal(t, g, s).to(dtype),
        "C": normal(t, g, s).to(dtype),
        "D": normal(n),
        "dt_bias": steps + torch.log(-torch.expm1(-steps)),
    }
    return [x.to(device).requires_grad_() for x in tensors.values()]


def call_of(tensors: list[Tensor], backend: str) -> Callable[[], Tensor]:
    """Return a function that runs the op on a pack of documents."""
    device, tokens = tensors[0].device, tensors[0].shape[0]
    lengths = torch.tensor(lengths_of(tokens))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().to(device)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    seq_idx_1T = documents.int()[None].to(device)
    options = {"chunk_size": CHUNK_SIZE, "backend": backend}
    return lambda: ssd(*tensors, seq_idx_1T, offsets, **options)


def passes_of(tensors: list[Tensor], backend: str) -> dict[str, Callable[[], object]]:
    """Return functions that run forward alone, and forward and backward."""
    call = call_of(tensors, backend)
    upstream = torch.randn_like(tensors[0])
    return {
        "forward": torch.no_grad()(call),
        "forward + backward": lambda: torch.autograd.grad(call(), tensors, upstream),
    }


def times(size: Size, device: torch.device, *, rounds: int = 5) -> dict[str, Any]:
    """Return the spreads of the times in ms, the ratios, and the kernels of one call."""
    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = leaves(size, low, device)
    inputs = inputs_of(tensors[0], tensors[3], tensors[4], CHUNK_SIZE)
    found: dict[str, Any] = {}
    passes = {}
    for backend in BACKENDS:
        try:
            OP.select(inputs, backend)
        except NoBackendError as refusal:
            found[backend] = str(refusal)
            continue
        passes[backend] = passes_of(tensors, backend)
    for name in ("forward", "forward + backward"):
        series: dict[str, list[float]] = {backend: [] for backend in passes}
        for backend in passes:
            for _ in range(3):
                passes[backend][name]()
        for _ in range(rounds):
            for backend, functions in passes.items():
                busy = harness.gpu_busy(functions[name])
                series[backend].append(busy.milliseconds)
                found.setdefault(f"kernels of {backend}", {})[name] = busy.kernels
        spreads = {
            backend: list(Spread.of([ms / 1e3 for ms in values]))
            for backend, values in series.items()
        }
        if len(series) == len(BACKENDS):
            spreads["ratio"] = list(Spread.of_ratios(*(series[backend] for backend in BACKENDS)))
        found[name] = spreads
    return found


def errors(size: Size, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the relative errors of the output and each gradient, by backend."""
    low = leaves(size, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    wide = [x.detach().double().requires_grad_() for x in low]
    exact = call_of(wide, "reference")()
    upstream = torch.cos(exact.detach()).to(low[0].dtype)
    want = (exact, *torch.autograd.grad(exact, wide, upstream.to(exact)))
    found = {}
    for backend in BACKENDS:
        try:
            y = call_of(low, backend)()
        except NoBackendError:
            continue
        got = (y, *torch.autograd.grad(y, low, upstream.to(y)))
        found[backend] = {
            name: ((one.double() - other).norm() / other.norm()).item()
            for name, one, other in zip(NAMES, got, want)
        }
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of times and ratios, from results in the form of a result file."""
    return [
        {
            "size": name,
            **{
                f"{which}, {column}": harness.shown(found[which].get(column))
                for which in ("forward", "forward + backward")
                for column in (*BACKENDS, "ratio")
            },
        }
        for name, found in results["times"].items()
    ]


def error_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of errors, from results in the form of a result file."""
    return [
        {
            "size": size,
            "backend": backend,
            **{name: f"{value:.2e}" for name, value in found.items()},
        }
        for size, backends in results["errors"].items()
        for backend, found in backends.items()
    ]


def main() -> None:
    """Measure all sizes and save the results after each of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.common_arguments(parser)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, help="sizes to measure (default: all)")
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    chosen = QUICK if arguments.quick else {name: SIZES[name] for name in arguments.sizes or SIZES}
    results: dict[str, Any] = {
        "sizes": {name: size._asdict() for name, size in chosen.items()},
        "times": {},
        "errors": {},
    }
    for name, size in chosen.items():
        if device.type == "cuda":
            results["times"][name] = times(size, device)
            print(harness.table(rows_of(harness.plain(results))[-1:]), flush=True)
        if size.tokens <= LARGEST_REFERENCE:
            results["errors"][name] = errors(size, device)
        harness.save("ssd", results, folder=arguments.results)
        harness.free_memory()
    if rows := error_rows_of(harness.plain(results)):
        print(harness.table(rows))


if __name__ == "__main__":
    main()
