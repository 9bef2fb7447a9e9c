"""Measures the gated delta rule against flash-linear-attention's kernels, and its cost of capacity.

    python benchmarks/gated_delta_rule.py [--sweep]

- ``triton`` are megatron_packed's kernels. Their backward pass includes the recomputed forward
  kernels.
- ``fla`` are the kernels of fla-core, with its gates, norms and recomputation. On Hopper with Triton
  3.4 to 3.7.0 fla-core refuses its backward pass, because the results are wrong. Here the refusal is
  switched off and the results are thrown away: only the times count.
- The capacity rows run the same pack with more, empty documents.
- The rows of long documents compare walks through segments with one walk for each document.
- ``--sweep`` tries other sizes of the programs of each kernel, and prints the time of each kernel.

Times are of the GPU between events, medians of calls. The ratios compare GPU-busy times of both, round
by round in turns, since fla's launches take longer than its kernels. ``kernels`` counts only Triton
kernels, without the copies and sums of PyTorch. Errors are norms relative to the reference in float64,
beside those of plain PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import harness
from harness import Spread
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.gated_delta_rule.api import OP, gated_delta_rule, inputs_of
from megatron_packed.ops.gated_delta_rule.tables import build_tables, segment_tokens
from workloads import device_from, lognormal_lengths

NAMES = ("o", "dq", "dk", "dv", "da", "db", "dA_log", "ddt_bias")
CAPACITIES = (12, 64, 512)
LONG = ((16, 32, 1), (16, 32, 2), (16, 32, 4), (8, 16, 1), (2, 4, 1))
"""Key heads, value heads, and documents of equal lengths in a pack."""
ROUNDS = 5
SWEPT = {"values": (64, 128), "warps": (4, 8), "stages": (1, 2, 3)}


class Size(NamedTuple):
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    documents: int


FULL = Size(8192, 16, 32, 128, 128, 12)
QUICK = Size(96, 1, 2, 16, 16, 3)


def lengths_of(size: Size) -> list[int]:
    """Return the lengths of ``size.documents`` documents with a long tail, which fill the pack."""
    mean = size.tokens / size.documents
    lengths = lognormal_lengths(4 * size.tokens, mean=mean, sigma=0.8, longest=size.tokens, seed=0)
    lengths = sorted(map(int, lengths[: size.documents - 1]))
    while sum(lengths) >= size.tokens:
        lengths[-1] //= 2
    return [*lengths, size.tokens - sum(lengths)]


def leaves(size: Size, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return q, k, v, a, b, A_log and dt_bias with gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    t, g, n, k, v, _ = size
    per_token = (normal(t, g, k), normal(t, g, k), normal(t, n, v), normal(t, n) - 2, normal(t, n))
    parameters = (torch.linspace(0, 2.7, n), torch.ones(n))
    tensors = [*(x.to(device, dtype) for x in per_token), *(x.to(device) for x in parameters)]
    return [x.requires_grad_() for x in tensors]


def call_of(
    tensors: list[Tensor],
    lengths: list[int],
    capacity: int,
    backend: str,
    doubled: bool = False,
    in_segments: bool = True,
) -> Callable[[], Tensor]:
    """Return a function that runs the op; the tables are made once, as a model does."""
    device, tokens = tensors[0].device, sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    offsets = pad(offsets, (0, max(capacity - len(lengths), 0)), value=tokens).to(device)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seq_idx_1T = documents.int()[None].to(device)
    segment = segment_tokens(tensors[2].shape[1]) if in_segments else None
    tables = build_tables(offsets, tokens, segment=segment)
    options = {"tables": tables, "backend": backend, "allow_neg_eigval": doubled}
    return lambda: gated_delta_rule(*tensors, seq_idx_1T, offsets, **options)


def times(call: Callable[[], Tensor], tensors: list[Tensor], quick: bool) -> dict[str, Any]:
    """Return the milliseconds of forward, and of backward alone."""
    o = call()
    upstream = torch.ones_like(o)
    with_no_grad = torch.no_grad()(call)
    timed = harness.wall if o.device.type == "cpu" else harness.device_time
    repeats = {"warm": 1, "repeats": 2} if quick else {}
    forward = timed(with_no_grad, **repeats)
    backward = timed(
        lambda: torch.autograd.grad(o, tensors, upstream, retain_graph=True), **repeats
    )
    return {"forward_ms": list(forward), "backward_ms": list(backward)}


def busy_times(call: Callable[[], Tensor], tensors: list[Tensor]) -> dict[str, float]:
    """Return the GPU-busy milliseconds of forward and backward, of all and of Triton kernels."""
    o = call()
    upstream = torch.ones_like(o)
    passes = {
        "forward": call,
        "backward": lambda: torch.autograd.grad(o, tensors, upstream, retain_graph=True),
    }
    found = {}
    for name, function in passes.items():
        busy = harness.gpu_busy(function)
        own = sum(ms for kernel, ms in busy.kernels if "at::" not in kernel and "Mem" not in kernel)
        found |= {name: busy.milliseconds, f"{name} kernels": own}
    return found


def ratios_to_fla(tensors: list[Tensor], lengths: list[int]) -> dict[str, Any]:
    """Return the milliseconds of both and the ratios over rounds in which they take turns."""
    rounds = [
        {
            backend: busy_times(call_of(tensors, lengths, CAPACITIES[0], backend), tensors)
            for backend in ("triton", "fla")
        }
        for _ in range(ROUNDS)
    ]
    series = {
        (backend, name): [one[backend][name] for one in rounds]
        for backend, names in rounds[0].items()
        for name in names
    }
    return {
        name: {
            "triton": Spread.of([ms / 1e3 for ms in series["triton", name]]),
            "fla": Spread.of([ms / 1e3 for ms in series["fla", name]]),
            "ratio": Spread.of_ratios(series["triton", name], series["fla", name]),
        }
        for name in rounds[0]["fla"]
    }


def both_passes(busy: dict[str, float]) -> float:
    """Return the milliseconds of both passes."""
    return busy["forward"] + busy["backward"]


def long_documents(size: Size, device: torch.device) -> dict[str, Any]:
    """Return the GPU-busy milliseconds of forward and backward with and without segments, in turns."""
    found = {}
    for key_heads, heads, documents in LONG:
        case = size._replace(key_heads=key_heads, value_heads=heads)
        tensors = leaves(case, torch.bfloat16, device)
        lengths = [size.tokens // documents] * documents
        calls = {
            name: call_of(tensors, lengths, CAPACITIES[0], "triton", in_segments=in_segments)
            for name, in_segments in (("segments", True), ("one walk", False))
        }
        rounds = [
            {name: both_passes(busy_times(call, tensors)) for name, call in calls.items()}
            for _ in range(ROUNDS)
        ]
        series = {name: [one[name] for one in rounds] for name in calls}
        found[f"{documents}, {key_heads} / {heads}"] = {
            **{name: Spread.of([ms / 1e3 for ms in values]) for name, values in series.items()},
            "ratio": Spread.of_ratios(series["segments"], series["one walk"]),
        }
    return found


def long_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of long documents, from results in the form of a result file."""
    return [
        {
            "documents, heads": name,
            **{column: harness.shown(value) for column, value in found.items()},
        }
        for name, found in results.get("long documents", {}).items()
    ]


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of times, from results in the form of a result file."""
    return [
        {
            "backend, capacity": name,
            "forward ms": harness.shown(found["forward_ms"]),
            "backward ms": harness.shown(found["backward_ms"]),
            "worst error": f"{max(results['errors'][name.split(',')[0]].values()):.1e}",
        }
        for name, found in results["times"].items()
        if isinstance(found, dict)
    ]


def ratio_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the ratios, from results in the form of a result file."""
    return [
        {"pass": name, **{column: harness.shown(value) for column, value in found.items()}}
        for name, found in results.get("ratios", {}).items()
    ]


def errors(size: Size, device: torch.device, backend: str) -> dict[str, float]:
    """Return the relative error of the output and each gradient."""
    lengths = lengths_of(size)
    low = leaves(size, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    wide = [x.detach().double().requires_grad_() for x in low]
    results = []
    for tensors, name in ((low, backend), (wide, "reference")):
        o = call_of(tensors, lengths, len(lengths), name)()
        results.append((o, *torch.autograd.grad(o, tensors, torch.cos(o.detach().double()).to(o))))
    return {
        name: ((got.double() - want).norm() / want.norm()).item()
        for name, got, want in zip(NAMES, *results)
    }


def without_refusal() -> None:
    """Let fla-core run where its results are wrong: backward on Hopper, and with a doubled beta."""
    from fla.ops.common import chunk_o

    from megatron_packed.ops.gated_delta_rule import fla

    chunk_o.TRITON_ABOVE_3_7_1 = True
    fla.not_supported_reasons = lambda inputs: []


def sweep(call: Callable[[], Tensor], tensors: list[Tensor]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each kernel for other sizes of the programs; GPU only."""
    from megatron_packed.ops.gated_delta_rule.triton_tiles import TILES, Tiles

    tiles, found = TILES[tensors[0].dtype, tensors[0].dtype], {}
    for name, usual in [item for item in tiles.items() if item[0] != "scores"]:
        for values, warps, stages in product(*SWEPT.values()):
            tiles[name] = Tiles(values, warps, stages, usual.precision)
            try:
                busy = harness.gpu_busy(lambda: torch.autograd.grad(call().sum(), tensors))
            except Exception as failure:  # Some sizes need more memory than a program has.
                found[f"{name} {values} {warps} {stages}"] = {type(failure).__name__: 0.0}
                continue
            kernels = {kernel: ms for kernel, ms in busy.kernels if "kernel" in kernel}
            found[f"{name} {values} {warps} {stages}"] = kernels
            print(name, tiles[name], kernels, flush=True)
        tiles[name] = usual
    return found


def main() -> None:
    """Measure all backends that support the inputs, and save the results after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.common_arguments(parser)
    parser.add_argument("--sweep", action="store_true", help="try other sizes of the programs")
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    size = QUICK if arguments.quick else FULL
    lengths = lengths_of(size)
    tensors = leaves(size, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    results: dict[str, Any] = {"size": size._asdict(), "lengths": lengths, "times": {}}

    def save() -> None:
        harness.save("gated_delta_rule", results, folder=arguments.results)

    try:
        without_refusal()
    except ImportError as missing:
        results["fla"] = f"not measured: {missing}"
    for backend in ("triton", "fla", "reference"):
        for capacity in CAPACITIES if backend == "triton" else CAPACITIES[:1]:
            inputs = inputs_of(tensors[1], tensors[2])
            try:
                OP.select(inputs, backend)
            except NoBackendError as refusal:
                results["times"][backend] = str(refusal)
                continue
            call = call_of(tensors, lengths, capacity, backend)
            name = f"{backend}, capacity {capacity}"
            results["times"][name] = times(call, tensors, arguments.quick)
            if device.type == "cuda":
                busy = harness.gpu_busy(lambda: torch.autograd.grad(call().sum(), tensors))  # noqa: B023
                results["times"][name]["kernels"] = busy.kernels
            print(name, results["times"][name], flush=True)
            save()
    for backend in ("triton", "fla", "reference"):
        if any(name.startswith(f"{backend},") for name in results["times"]):
            results.setdefault("errors", {})[backend] = errors(size, device, backend)
            print("errors", backend, results["errors"][backend], flush=True)
            save()
    if "fla, capacity 12" in results["times"]:
        results["ratios"] = ratios_to_fla(tensors, lengths)
        save()
        print(harness.table(ratio_rows_of(harness.plain(results))))
    if device.type == "cuda":
        results["long documents"] = long_documents(size, device)
        save()
        print(harness.table(long_rows_of(harness.plain(results))))
    if arguments.sweep and device.type == "cuda":
        results["sweep"] = sweep(call_of(tensors, lengths, CAPACITIES[0], "triton"), tensors)
        save()


if __name__ == "__main__":
    main()
