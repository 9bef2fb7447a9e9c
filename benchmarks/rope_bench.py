"""Measures rotary embeddings of queries and keys against plain torch and other libraries' kernels.

    python benchmarks/rope_bench.py

- ``fused`` is megatron_packed's Triton kernel: one launch for both tensors, a position per token,
  fp32 arithmetic.
- ``torch index`` is the usual torch code. It gathers rows of cos and sin by position and computes
  ``x cos + rotate_half(x) sin`` in the dtype of x.
- ``reference`` is megatron_packed's reference in plain torch, with fp32 arithmetic.
- ``dense ...`` are kernels for one document that starts at position 0, with two launches. Positions
  per token should cost no more than these kernels.
- ``varlen ...`` are kernels that take cu_seqlens, with two launches.

Kernel times come from a CUDA graph. Every call of the graph uses other tensors, which together are
larger than any cache. 'eager' times include the work of the host, which decides the time of short
packs. GB/s counts one read and one write of each element of q and k. Errors are measured against
float64 on the same tables.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import harness
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.rope.api import OP, RopeInputs, apply_rope, rope_tables
from megatron_packed.packed.params import PackedSeqParams
from workloads import device_from, lognormal_lengths

BASE = 500000.0
COLD_BYTES = 256 * 2**20
"""Bytes that the calls of one graph read and write in all: five times the H200's level-2 cache."""


class Size(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    def bytes_moved(self, dtype: torch.dtype) -> int:
        return 2 * self.tokens * (self.heads + self.kv_heads) * self.head_dim * dtype.itemsize


Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that maps (q, k) to the rotated (q, k). All tensors are token-first."""


def packed_of(tokens: int, device: torch.device, seed: int = 0) -> PackedSeqParams:
    """Return a full pack of documents whose lengths resemble the Alpaca data set."""
    lengths = lognormal_lengths(
        tokens, mean=min(180, tokens / 4), sigma=0.55, longest=tokens, seed=seed
    )
    ends = np.minimum(np.cumsum(lengths), tokens)
    return PackedSeqParams.from_lengths(np.diff(np.unique(ends), prepend=0), tokens, device=device)


def torch_index(
    packed: PackedSeqParams, cos_PR: Tensor, sin_PR: Tensor, dtype: torch.dtype
) -> Rotate:
    cos_PH, sin_PH = (torch.cat([table, table], dim=-1).to(dtype) for table in (cos_PR, sin_PR))
    position_T = packed.position_ids.long()  # int64, so that indexing needs no conversion

    def rotate_half(x_TNH: Tensor) -> Tensor:
        first, second = x_TNH.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)

    def rotate(q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        cos_T1H, sin_T1H = cos_PH[position_T][:, None], sin_PH[position_T][:, None]
        return (
            q_TNH * cos_T1H + rotate_half(q_TNH) * sin_T1H,
            k_TKH * cos_T1H + rotate_half(k_TKH) * sin_T1H,
        )

    return rotate


def ours(backend: str, packed: PackedSeqParams, cos_PR: Tensor, sin_PR: Tensor) -> Rotate:
    return lambda q_TNH, k_TKH: apply_rope(
        q_TNH, k_TKH, packed.position_ids, cos_PR, sin_PR, backend=backend
    )


def transformer_engine_paths(packed: PackedSeqParams, size: Size) -> dict[str, Rotate]:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    frequency_R = BASE ** (-torch.arange(0, size.head_dim, 2, dtype=torch.float64) / size.head_dim)
    angle_PR = torch.outer(torch.arange(size.tokens, dtype=torch.float64), frequency_R)
    angle_P11H = torch.cat([angle_PR, angle_PR], dim=-1).to(
        packed.cu_seqlens.device, torch.float32
    )[:, None, None]

    def dense(q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        q_1TNH, k_1TKH = (
            apply_rotary_pos_emb(x[None], angle_P11H, tensor_format="bshd", fused=True)
            for x in (q_TNH, k_TKH)
        )
        return q_1TNH.squeeze(0), k_1TKH.squeeze(0)

    def varlen(q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        options = {"tensor_format": "thd", "fused": True, "cu_seqlens": packed.cu_seqlens}
        return apply_rotary_pos_emb(q_TNH, angle_P11H, **options), apply_rotary_pos_emb(
            k_TKH, angle_P11H, **options
        )

    return {"dense TransformerEngine": dense, "varlen TransformerEngine": varlen}


def flash_attn_paths(
    packed: PackedSeqParams, cos_PR: Tensor, sin_PR: Tensor, dtype: torch.dtype
) -> dict[str, Rotate]:
    from flash_attn.layers.rotary import apply_rotary_emb

    cos_PR, sin_PR = cos_PR.to(dtype), sin_PR.to(dtype)

    def dense(q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        q_1TNH, k_1TKH = (apply_rotary_emb(x[None], cos_PR, sin_PR) for x in (q_TNH, k_TKH))
        return q_1TNH.squeeze(0), k_1TKH.squeeze(0)

    def varlen(q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        options = {"cu_seqlens": packed.cu_seqlens, "max_seqlen": packed.max_seqlen}
        return apply_rotary_emb(q_TNH, cos_PR, sin_PR, **options), apply_rotary_emb(
            k_TKH, cos_PR, sin_PR, **options
        )

    return {"dense flash-attn": dense, "varlen flash-attn": varlen}


def all_paths(size: Size, dtype: torch.dtype, device: torch.device) -> dict[str, Rotate]:
    """Return all paths that run on this machine. The other libraries are optional."""
    packed = packed_of(size.tokens, device)
    cos_PR, sin_PR = rope_tables(size.tokens, size.head_dim, BASE, device)
    paths = {
        "torch index": torch_index(packed, cos_PR, sin_PR, dtype),
        "reference": ours("reference", packed, cos_PR, sin_PR),
    }
    if has_fused(size, dtype, device):
        paths["fused"] = ours("triton", packed, cos_PR, sin_PR)
    if device.type == "cuda":
        for make in (
            lambda: transformer_engine_paths(packed, size),
            lambda: flash_attn_paths(packed, cos_PR, sin_PR, dtype),
        ):
            try:
                found = make()
                for rotate in found.values():
                    q_TNH, k_TKH = leaves(size, dtype, device)
                    backward(rotate(q_TNH, k_TKH), (q_TNH, k_TKH), (q_TNH, k_TKH))
                paths |= found
            except Exception as error:
                print(f"skip a library's kernels: {type(error).__name__}: {error}")
    return paths


def has_fused(size: Size, dtype: torch.dtype, device: torch.device) -> bool:
    inputs = RopeInputs(
        dtype=dtype, device_type=device.type, head_dim=size.head_dim, rotary_dim=size.head_dim
    )
    try:
        OP.select(inputs, "triton")
    except NoBackendError as error:
        print(f"skip the fused kernel: {error}")
        return False
    return True


def leaves(
    size: Size, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    q_TNH, k_TKH = (
        torch.randn(size.tokens, heads, size.head_dim, generator=generator, device=device)
        .to(dtype)
        .requires_grad_()
        for heads in (size.heads, size.kv_heads)
    )
    return q_TNH, k_TKH


def backward(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


def graph_of_cold_calls(
    rotate: Rotate, size: Size, dtype: torch.dtype, phase: str
) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture a graph of forward or backward calls. Return the graph and its number of calls.

    Every call uses other tensors, which together are larger than any cache.
    """
    device = torch.device("cuda")
    calls = max(2, min(64, -(-COLD_BYTES // size.bytes_moved(dtype))))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        inputs = [leaves(size, dtype, device, seed) for seed in range(calls)]
        upstream = [tuple(x.detach().clone() for x in pair) for pair in inputs]
        outputs = [rotate(*pair) for pair in inputs[: calls if phase == "backward" else 2]]
        backward(outputs[0], inputs[0], upstream[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(calls):
            if phase == "forward":
                rotate(*inputs[number])
            else:
                backward(outputs[number], inputs[number], upstream[number])
    graph.keep = (inputs, upstream, outputs)  # keeps the tensors alive that the graph reads
    return graph, calls


def kernel_microseconds(
    paths: dict[str, Rotate], size: Size, dtype: torch.dtype, phase: str, rounds: int
) -> dict[str, list[float]]:
    """Return the microseconds per call of each path, one value per round. The paths take turns."""
    graphs = {
        name: graph_of_cold_calls(rotate, size, dtype, phase) for name, rotate in paths.items()
    }
    microseconds: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(rounds + 1):
        for name, (graph, calls) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number:  # the first round warms up
                microseconds[name].append(1e3 * start.elapsed_time(end) / calls)
    return microseconds


def eager_seconds(
    paths: dict[str, Rotate], size: Size, dtype: torch.dtype, device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of forward and backward of each path, launched eagerly as in a model.

    A sample is the mean of 10 calls. The paths take turns.
    """
    q_TNH, k_TKH = leaves(size, dtype, device)
    upstream = (torch.ones_like(q_TNH), torch.ones_like(k_TKH))

    def call(rotate: Rotate) -> None:
        for _ in range(10):
            torch.autograd.grad(rotate(q_TNH, k_TKH), (q_TNH, k_TKH), upstream)

    functions = {name: (lambda rotate=rotate: call(rotate)) for name, rotate in paths.items()}
    samples = harness.interleaved_seconds(functions, warm=1, repeats=rounds)
    return {name: [value / 10 for value in seconds] for name, seconds in samples.items()}


def measure(size: Size, dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, Any]:
    paths = all_paths(size, dtype, device)
    found: dict[str, Any] = {name: {} for name in paths}
    for name, seconds in eager_seconds(paths, size, dtype, device, rounds).items():
        found[name]["eager_forward_backward_ms"] = harness.Spread.of(seconds)
    if device.type == "cuda":
        for phase in ("forward", "backward"):
            microseconds = kernel_microseconds(paths, size, dtype, phase, rounds)
            for name, values in microseconds.items():
                found[name][f"{phase}_us"] = harness.Spread.of([value / 1e3 for value in values])
                found[name][f"{phase}_GB_per_s"] = round(
                    size.bytes_moved(dtype) / statistics.median(values) / 1e3, 1
                )
                if "fused" in paths:
                    ratios = harness.Spread.of_ratios(values, microseconds["fused"])
                    found[name][f"{phase}_over_fused"] = ratios
            harness.free_memory()
    return {
        **size._asdict(),
        "dtype": str(dtype),
        "bytes_moved": size.bytes_moved(dtype),
        "paths": found,
    }


def errors(size: Size, device: torch.device) -> dict[str, Any]:
    """Return the largest and mean absolute error against float64, for forward and backward.

    The result also reports whether the bits depend on strides or on capture, which they must not.
    """
    packed = packed_of(size.tokens, device)
    cos_PR, sin_PR = rope_tables(size.tokens, size.head_dim, BASE, device)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = leaves(size, dtype, device)
        upstream = tuple(x.detach().flip(0) for x in inputs)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        exact = apply_rope(*wide, packed.position_ids, cos_PR, sin_PR, backend="reference")
        exact = (*exact, *backward(exact, wide, [x.double() for x in upstream]))
        results: dict[str, tuple[Tensor, ...]] = {}
        for name, rotate in all_paths(size, dtype, device).items():
            if name.startswith("dense"):
                continue  # These kernels do not restart positions at documents.
            outputs = rotate(*inputs)
            results[name] = (*outputs, *backward(outputs, inputs, upstream))
        for name, values in results.items():
            gaps = [(value.double() - right).abs() for value, right in zip(values, exact)]
            found[f"{name}, {dtype}"] = {
                "forward": {
                    "max": max(g.max().item() for g in gaps[:2]),
                    "mean": gaps[0].mean().item(),
                },
                "backward": {
                    "max": max(g.max().item() for g in gaps[2:]),
                    "mean": gaps[2].mean().item(),
                },
                "bits_of_reference": all(map(torch.equal, values, results["reference"])),
            }
    if has_fused(size, torch.float32, device):
        found["fused, layouts"] = layouts_agree(size, packed, cos_PR, sin_PR, device)
    return found


def layouts_agree(
    size: Size, packed: PackedSeqParams, cos_PR: Tensor, sin_PR: Tensor, device: torch.device
) -> dict[str, bool]:
    """Check that the fused kernel gives equal bits for views, expanded gradients and a replay."""
    rotate = ours("triton", packed, cos_PR, sin_PR)
    q_TNH, k_TKH = leaves(size, torch.float32, device)
    plain = rotate(q_TNH, k_TKH)
    ones = [torch.ones_like(x) for x in plain]
    expanded = [torch.ones((), device=device).expand_as(x) for x in plain]
    views = rotate(
        torch.cat([q_TNH, k_TKH], 1)[:, : size.heads],
        k_TKH.transpose(0, 1).contiguous().transpose(0, 1),
    )
    agree = {
        "views_of_a_fused_projection": all(map(torch.equal, plain, views)),
        "zero_stride_gradients": all(
            map(
                torch.equal,
                backward(plain, (q_TNH, k_TKH), ones),
                backward(plain, (q_TNH, k_TKH), expanded),
            )
        ),
    }
    if device.type == "cuda":
        stream, other = torch.cuda.Stream(), packed_of(size.tokens, device, seed=1)
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            replayed = rotate(q_TNH, k_TKH)
        packed.position_ids.copy_(other.position_ids)
        graph.replay()
        torch.cuda.synchronize()
        agree["replay_over_other_positions"] = all(map(torch.equal, replayed, rotate(q_TNH, k_TKH)))
    return agree


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table of times, from results in the form of a result file."""
    rows = []
    for result in results["sizes"]:
        for name, path in result["paths"].items():
            rows.append(
                {
                    "T": result["tokens"],
                    "path": name,
                    "forward us": harness.shown(path.get("forward_us")),
                    "GB/s": path.get("forward_GB_per_s", ""),
                    "backward us": harness.shown(path.get("backward_us")),
                    "backward GB/s": path.get("backward_GB_per_s", ""),
                    "forward / fused": harness.shown(path.get("forward_over_fused")),
                    "backward / fused": harness.shown(path.get("backward_over_fused")),
                    "eager forward + backward ms": harness.shown(path["eager_forward_backward_ms"]),
                }
            )
    return rows


def error_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    rows = []
    for name, found in results["errors"].items():
        if "forward" in found:
            rows.append(
                {
                    "path": name.replace("torch.", ""),
                    **{
                        f"{phase} {kind}": f"{found[phase][kind]:.1e}"
                        for phase in ("forward", "backward")
                        for kind in ("max", "mean")
                    },
                    "bits of the reference": found["bits_of_reference"],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    sizes = [
        Size(T, arguments.heads, arguments.kv_heads, arguments.head_dim) for T in arguments.tokens
    ]
    if device.type == "cpu":
        sizes = [Size(tokens, 4, 2, 16) for tokens in (32, 64)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rounds = 2 if arguments.quick else 20
    results = {
        "errors": errors(sizes[-2], device),
        "sizes": [measure(size, dtype, device, rounds) for size in sizes],
    }
    path = harness.save("rope", results, folder=arguments.results)
    print(harness.table(error_rows_of(results)))
    print(results["errors"].get("fused, layouts", "fused, layouts: not supported on this device"))
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
