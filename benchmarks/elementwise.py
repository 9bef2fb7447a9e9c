"""Times the element-wise kernels of a layer against the copy bandwidth of the device.

    python benchmarks/elementwise.py [kernel ...]

The sizes are those of `hybrid1b`: 8,192 tokens, hidden size 2048, FFN 8192, 4096 inner channels of
Mamba in 8 groups, and 6144 channels of the convolution. Norms, activations, gates, the residual
addition, the convolution, RoPE and the softmax of the loss do little arithmetic, so memory limits
them. Each kernel has a number of bytes that it must read and write once. The share of the copy
bandwidth divides these bytes by the time, and by the bandwidth of a large copy of the same run.

Times come from a CUDA graph. Every call of the graph uses other tensors, which together are larger
than any cache. The time of backward includes the sum of the weight's gradient, which the kernels add
to a float32 ``main_grad``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

import harness
from megatron_packed.ops.activation.api import activation, sigmoid_gate
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.rms_norm.api import rms_norm, rms_norm_with_residual
from megatron_packed.ops.rope.api import apply_rope, rope_tables
from megatron_packed.packed.params import PackedSeqParams
from workloads import device_from

COLD_BYTES = 512 * 2**20
"""Least bytes that the calls of one graph read and write: ten times the H200's level-2 cache."""
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model's layers."""

    tokens: int = 8192
    hidden: int = 2048
    ffn: int = 8192
    inner: int = 4096
    groups: int = 8
    convolved: int = 6144
    projected: int = 10304
    """Columns of a Mamba layer's input projection, of which z and the convolution are slices."""
    heads: int = 16
    kv_heads: int = 4
    vocab: int = 32768

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TINY = Sizes(
    tokens=32,
    hidden=64,
    ffn=64,
    inner=64,
    groups=2,
    convolved=96,
    projected=164,
    heads=4,
    kv_heads=2,
    vocab=128,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Calls of one kernel.

    ``rows`` are the shapes of inputs with one row per token. ``weights`` are the shapes of inputs
    that all tokens share.
    """

    rows: dict[str, tuple[int, ...]]
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    """Function of the rows and the weights, in their order."""
    forward: int
    """Elements per token that forward must read and write."""
    backward: int
    """Elements per token that backward must read and write; 0 if it needs no kernel."""
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    slices: dict[str, int] = field(default_factory=dict)
    """Columns of the wider projection of which some rows are a slice."""


class Softmax:
    """Loss and gradient of a chunk of logits, which overwrite the logits."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        backend = "triton_kernel" if device.type == "cuda" else "reference"
        self.step = import_module(f"megatron_packed.ops.cross_entropy.{backend}").softmax_step
        self.labels_C = torch.arange(sizes.tokens // 4, device=device) % sizes.vocab
        self.mask_C = torch.ones(sizes.tokens // 4, device=device)
        self.loss_C = torch.empty(sizes.tokens // 4, device=device)
        self.scale = torch.ones((), device=device)
        self.shape = (sizes.tokens // 4, sizes.vocab)

    def __call__(self, logits: Tensor) -> Tensor:
        with torch.no_grad():
            logits_CV = logits.view(self.shape)
            self.step(
                logits_CV, self.labels_C, self.mask_C, self.scale, self.shape[1], self.loss_C, True
            )
        return self.loss_C


def cases(s: Sizes, device: torch.device) -> dict[str, Case]:
    """Return all kernels by name."""
    lengths = [s.tokens // 4, s.tokens // 8, s.tokens // 2, s.tokens // 8]
    packed = PackedSeqParams.from_lengths(lengths, s.tokens, device=device)
    cos, sin = rope_tables(s.tokens, s.head_dim, 10000.0, device)
    query_group = (s.kv_heads, s.hidden // s.kv_heads)
    rotated = {"q": (s.heads, s.head_dim), "k": (s.kv_heads, s.head_dim)}
    conv = {"w": (s.convolved, 4), "b": (s.convolved,)}
    group = s.inner // s.groups
    return {
        "rms_norm": Case(
            rows={"x": (s.hidden,)},
            weights={"w": (s.hidden,)},
            call=lambda x, w: rms_norm(x, w, EPS),
            forward=2 * s.hidden,
            backward=3 * s.hidden,
        ),
        "rms_norm, residual": Case(
            rows={"x": (s.hidden,)},
            weights={"w": (s.hidden,)},
            call=lambda x, w: rms_norm_with_residual(x, w, EPS),
            forward=2 * s.hidden,
            backward=4 * s.hidden,
        ),
        "residual addition": Case(
            rows={"x": (s.hidden,), "y": (s.hidden,)},
            call=lambda x, y: x + y,
            forward=3 * s.hidden,
            backward=0,
        ),
        "squared_relu": Case(
            rows={"x": (s.ffn,)},
            call=lambda x: activation(x, "squared_relu"),
            forward=2 * s.ffn,
            backward=3 * s.ffn,
        ),
        "gelu": Case(
            rows={"x": (s.ffn,)},
            call=lambda x: activation(x, "gelu"),
            forward=2 * s.ffn,
            backward=3 * s.ffn,
        ),
        "swiglu": Case(
            rows={"x": (2 * s.ffn,)},
            call=lambda x: activation(x, "swiglu"),
            forward=3 * s.ffn,
            backward=5 * s.ffn,
        ),
        "sigmoid_gate": Case(
            rows={"x": query_group, "gate": query_group},
            call=sigmoid_gate,
            forward=3 * s.hidden,
            backward=5 * s.hidden,
            # Each group of the fused projection has queries, gates, a key and a value.
            slices={"gate": 2 * (query_group[1] + s.head_dim)},
        ),
        "sigmoid_gate, heads": Case(
            rows={"x": (s.heads, s.head_dim), "gate": (s.heads, s.head_dim)},
            call=sigmoid_gate,
            forward=3 * s.hidden,
            backward=5 * s.hidden,
        ),
        "gated_rms_norm, Mamba": Case(
            rows={"x": (s.inner,), "z": (s.inner,)},
            weights={"w": (s.inner,)},
            call=lambda x, z, w: gated_rms_norm(x, z, w, EPS, group_size=group),
            forward=3 * s.inner,
            backward=5 * s.inner,
            slices={"z": s.projected},
        ),
        "gated_rms_norm, delta net": Case(
            rows={"x": (s.inner,), "z": (s.inner,)},
            weights={"w": (s.head_dim,)},
            call=lambda x, z, w: gated_rms_norm(
                x, z, w, EPS, group_size=s.head_dim, norm_before_gate=True
            ),
            forward=3 * s.inner,
            backward=5 * s.inner,
            slices={"z": s.projected},
        ),
        "causal_conv1d": Case(
            rows={"x": (s.convolved,)},
            weights=conv,
            call=lambda x, w, b: causal_conv1d(x, w, b, packed.seq_idx),
            forward=2 * s.convolved,
            backward=3 * s.convolved,
            slices={"x": s.projected},
        ),
        "causal_conv1d, library": Case(
            rows={"x": (s.convolved,)},
            weights=conv,
            call=lambda x, w, b: causal_conv1d(x, w, b, packed.seq_idx, backend="causal_conv1d"),
            forward=2 * s.convolved,
            backward=3 * s.convolved,
            slices={"x": s.projected},
        ),
        "rope": Case(
            rows=rotated,
            call=lambda q, k: apply_rope(q, k, packed.position_ids, cos, sin),
            forward=2 * (s.heads + s.kv_heads) * s.head_dim,
            backward=2 * (s.heads + s.kv_heads) * s.head_dim,
        ),
        "softmax of the loss": Case(
            rows={"logits": (s.vocab // 4,)},
            call=Softmax(s, device),
            forward=s.vocab // 2,
            backward=0,
        ),
    }


class Inputs(NamedTuple):
    """Tensors of one call."""

    leaves: list[Tensor]
    upstream: list[Tensor]
    outputs: tuple[Tensor, ...]
    """Outputs of an earlier forward, for calls of backward."""


class Call:
    """Calls of one case, each with its own tensors."""

    def __init__(self, case: Case, sizes: Sizes, device: torch.device) -> None:
        self.case = case
        self.sizes = sizes
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def inputs(self, seed: int) -> Inputs:
        generator = torch.Generator(self.device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

        leaves = []
        for name, shape in self.case.rows.items():
            columns = self.case.slices.get(name, shape[-1])
            x = random(self.sizes.tokens, *shape[:-1], columns)[..., : shape[-1]]
            leaves.append(x.requires_grad_())
        for shape in self.case.weights.values():
            weight = random(*shape).requires_grad_()
            # Backward adds the weight's gradient here, as in training.
            weight.main_grad = torch.zeros(shape, device=self.device)  # type: ignore[attr-defined]
            leaves.append(weight)
        outputs = self.forward(leaves)
        upstream = [random(*y.shape) for y in outputs] if self.case.backward else []
        return Inputs(leaves, upstream, outputs)

    def forward(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        result = self.case.call(*leaves)
        return result if isinstance(result, tuple) else (result,)

    def backward(self, inputs: Inputs) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            inputs.outputs, inputs.leaves, inputs.upstream, retain_graph=True, allow_unused=True
        )

    def run(self, phase: str, inputs: Inputs) -> object:
        return self.backward(inputs) if phase == "backward" else self.forward(inputs.leaves)

    def bytes_moved(self, phase: str) -> int:
        elements = self.case.backward if phase == "backward" else self.case.forward
        return elements * self.sizes.tokens * self.dtype.itemsize


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Capture the calls in one graph, on the current stream."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for call in calls:
            call()
    return graph


def copies(device: torch.device, count: int) -> tuple[list[Callable[[], object]], int]:
    """Return copies between large tensors, and the bytes that each reads and writes."""
    elements = COLD_BYTES // 8 if device.type == "cuda" else 1024
    pairs = [torch.zeros(2, elements, dtype=torch.bfloat16, device=device) for _ in range(count)]
    return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs], 4 * elements


def time_of(
    calls: Sequence[Callable[[], object]], device: torch.device, repeats: int
) -> tuple[harness.Spread, list[tuple[str, float]]]:
    """Return milliseconds per call, and the milliseconds of each kernel."""
    if device.type == "cpu":
        return harness.wall(calls[0], warm=1, repeats=repeats), []
    graph = graph_of(calls)
    whole = harness.device_time(graph.replay, warm=3, repeats=repeats)
    kernels = harness.gpu_busy(graph.replay, calls=2).kernels
    return harness.Spread(*(round(value / len(calls), 5) for value in whole)), [
        (name[:80], round(milliseconds / len(calls), 5)) for name, milliseconds in kernels
    ]


def measure(
    case: Case, sizes: Sizes, device: torch.device, copy_rate: float, repeats: int
) -> dict[str, Any]:
    """Return time, bytes, share of the copy bandwidth and kernels of forward and backward.

    Args:
        copy_rate: bytes per millisecond of a copy.
    """
    call = Call(case, sizes, device)
    found: dict[str, Any] = {}
    for phase in ("forward", "backward"):
        moved = call.bytes_moved(phase)
        if not moved:
            continue
        count = max(2, min(16, -(-COLD_BYTES // moved))) if device.type == "cuda" else 1
        inputs = [call.inputs(seed) for seed in range(count)]
        # Each call has its own inputs, which stay alive as long as the graph.
        functions = [partial(call.run, phase, one) for one in inputs]
        spread, kernels = time_of(functions, device, repeats)
        found[phase] = {
            "ms": spread,
            "bytes": moved,
            "share": round(moved / spread.median / copy_rate, 3),
            "kernels": kernels,
        }
        del inputs, functions
        harness.free_memory()
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    rows = []
    for name, found in results["kernels"].items():
        row: dict[str, object] = {"kernel": name}
        for phase in ("forward", "backward"):
            one = found.get(phase)
            row |= {
                f"{phase} MB": f"{one['bytes'] / 1e6:.0f}" if one else "",
                f"{phase} ms": harness.shown(one["ms"]) if one else "",
                f"{phase} share": f"{100 * one['share']:.0f} %" if one else "",
            }
        rows.append({**row, "failed": found.get("failed", "").partition("\n")[0]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", nargs="*", help="beginning of a kernel's name (default: all)")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    if device.type == "cuda":
        # Autograd runs backward on the stream of forward. The default stream cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
    sizes = TINY if device.type == "cpu" else Sizes()
    repeats = 2 if arguments.quick else 20
    functions, moved = copies(device, 4)
    spread, _ = time_of(functions, device, repeats)
    del functions
    rate = moved / spread.median
    results: dict[str, Any] = {"copy_GB_per_s": round(rate / 1e6, 1), "kernels": {}}
    for name, case in cases(sizes, device).items():
        if arguments.kernel and not name.startswith(tuple(arguments.kernel)):
            continue
        try:
            results["kernels"][name] = measure(case, sizes, device, rate, repeats)
        except Exception as error:  # A missing library is a result of this benchmark.
            line = str(error).partition("\n")[0]
            results["kernels"][name] = {"failed": f"{type(error).__name__}: {line}"[:120]}
        path = harness.save("elementwise", results, folder=arguments.results)
    print(f"copy: {results['copy_GB_per_s']} GB/s")
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
