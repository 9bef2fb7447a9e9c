"""Time and error of every attention backend with heads of 128 and 256, with and without a window.

    python benchmarks/attention_head_256.py [--deterministic]

A pack has 12 documents in 8,192 slots, padded to a capacity of 128 documents, with 16 query heads
and 2 key heads, as in Qwen3-Next. Backends run although their bound of the head dimension refuses
the size (`WIDEST_HEAD`): the table shows whether a bound can be raised. A kernel that cannot run has
its error in the table instead of times.

Errors are relative norms of the difference to the float32 reference on the same bf16 inputs, for the
output and each gradient. They are divided by the errors of plain PyTorch with bf16 matrix products.
A kernel may exceed these by a factor of two.

With ``--deterministic`` all kernels run in their deterministic form. The script then repeats each
kernel on the same inputs, and lists the results whose bits change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import harness
from megatron_packed.ops.backend_dispatch import Backend
from megatron_packed.ops.varlen_attention.backends import OP, AttentionCall, attention_inputs
from megatron_packed.ops.varlen_attention.tables import build_tables
from megatron_packed.packed.params import PackedSeqParams
from workloads import device_from

DOCUMENTS, CAPACITY = 12, 128
ROUNDING = 2.0**-9
"""Unit roundoff of bf16: the smallest error of plain PyTorch that a ratio uses."""
NAMES = ("output", "dq", "dk", "dv")


@dataclass(frozen=True)
class Size:
    """Sizes of a pack and of its heads."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    deterministic: bool = False


def lengths_of(tokens: int) -> list[int]:
    """Return the lengths of the documents: one of 5/8 of the pack, which a window limits, and 11
    unequal ones."""
    longest, parts = 5 * tokens // 8, sum(range(1, DOCUMENTS))
    others = [(tokens - longest) * part // parts for part in range(1, DOCUMENTS)]
    return [*others[:4], longest, *others[4:-1], others[-1] + tokens - longest - sum(others)]


class Case:
    """Inputs of one size on a device, the same for every backend."""

    def __init__(self, size: Size, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size = size
        self.packed = PackedSeqParams.from_lengths(
            lengths_of(size.tokens), size.tokens, capacity=CAPACITY, device=device
        )
        shapes = [
            (size.tokens, heads, size.head_dim) for heads in (size.heads, *[size.kv_heads] * 2)
        ]
        self.inputs = [
            torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes
        ]
        self.upstream = torch.randn(shapes[0], generator=generator).bfloat16().to(device)

    def forward(self, backend: Backend, leaves: list[Tensor]) -> Tensor:
        """Run a backend without the check of its bounds, as a captured graph would call it."""
        call = AttentionCall(
            cu_seqlens=self.packed.cu_seqlens,
            max_seqlen=self.size.tokens,
            softmax_scale=self.size.head_dim**-0.5,
            window_size=self.size.window,
            deterministic=self.size.deterministic,
            tables=build_tables(backend.name, self.packed.seq_idx, self.size.window),
        )
        out_TNH: Tensor = backend.load().run(*leaves, call)
        return out_TNH

    def results(
        self, backend: Backend, dtype: torch.dtype, *, autocast: bool = False
    ) -> dict[str, Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in self.inputs]
        with torch.autocast(leaves[0].device.type, torch.bfloat16, enabled=autocast):
            out_TNH = self.forward(backend, leaves)
        gradients = torch.autograd.grad(out_TNH, leaves, self.upstream.to(out_TNH.dtype))
        return dict(zip(NAMES, (out_TNH.detach(), *gradients)))

    def reasons(self, backend: Backend) -> list[str]:
        """Return the reasons against the backend, by which a run would refuse it."""
        inputs = attention_inputs(
            tokens=self.size.tokens,
            num_heads=self.size.heads,
            num_kv_heads=self.size.kv_heads,
            head_dim=self.size.head_dim,
            dtype=torch.bfloat16,
            device=self.inputs[0].device,
            num_sequences=CAPACITY + 1,
            window_size=self.size.window,
            deterministic=self.size.deterministic,
            automatic=False,
        )
        return backend.reasons(inputs)


def errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((found[name].float() - right.float()).norm() / right.float().norm())
        for name, right in reference.items()
    }


def differing(case: Case, backend: Backend, runs: int = 5) -> list[str]:
    """Return the names of the results whose bits differ between runs on the same inputs."""
    first, *others = (case.results(backend, torch.bfloat16) for _ in range(runs))
    return [name for name in NAMES if any(not torch.equal(first[name], x[name]) for x in others)]


def measure(
    case: Case,
    time: Callable[[Callable[[], object]], harness.Spread],
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return times, errors and reasons of the named backends; by default of every backend."""
    reference = next(backend for backend in OP.backends if backend.name == "reference")
    exact = case.results(reference, torch.float32)
    plain = errors(case.results(reference, torch.float32, autocast=True), exact)
    measured: dict[str, Any] = {}
    for backend in OP.backends:
        if names is not None and backend.name not in names:
            continue
        row: dict[str, Any] = {"refused": case.reasons(backend)}
        try:
            found = errors(case.results(backend, torch.bfloat16), exact)
            leaves = [x.clone().requires_grad_() for x in case.inputs]
            row["errors"] = found
            row["ratios"] = {name: found[name] / max(plain[name], ROUNDING) for name in found}
            if case.size.deterministic:
                row["run_to_run_differ"] = differing(case, backend)
            row["forward_ms"] = time(lambda b=backend: case.forward(b, case.inputs))
            row["forward_backward_ms"] = time(
                lambda b=backend, x=leaves: torch.autograd.grad(
                    case.forward(b, x), x, case.upstream
                )
            )
        except Exception as error:  # The error of a kernel is a result of this benchmark.
            row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        measured[backend.name] = row
        harness.free_memory()
    return measured


def repeats_of(row: dict[str, Any]) -> str:
    """Return `bitwise`, or the results that differ between runs; empty if a kernel has failed."""
    if "run_to_run_differ" not in row:
        return ""
    return ", ".join(row["run_to_run_differ"]) or "bitwise"


def rows_of(results: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    rows = []
    repeated = any("run_to_run_differ" in row for r in results for row in r["backends"].values())
    for result in results:
        for name, row in result["backends"].items():
            ratios = row.get("ratios")
            rows.append(
                {
                    "H": result["head_dim"],
                    "window": result["window"] or "",
                    "backend": name,
                    "forward ms": harness.shown(row.get("forward_ms")),
                    "forward + backward ms": harness.shown(row.get("forward_backward_ms")),
                    "worst error / plain": f"{max(ratios.values()):.2f}" if ratios else "",
                    "admitted": "no" if row["refused"] else "yes",
                    **({"run to run": repeats_of(row)} if repeated else {}),
                    "failed": row.get("failed", ""),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="run the deterministic form of each kernel"
    )
    parser.add_argument("--backends", nargs="+", help="names of backends (default: all)")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    sizes = [
        Size(8192, 16, 2, head_dim, window, arguments.deterministic)
        for head_dim in (128, 256)
        for window in (None, 4096)
    ]
    if device.type == "cpu":
        sizes = [Size(256, 4, 2, 16, window, arguments.deterministic) for window in (None, 8)]
    name = "attention_deterministic" if arguments.deterministic else "attention_head_256"
    repeats = 2 if arguments.quick else 30

    def time(function: Callable[[], object]) -> harness.Spread:
        if device.type == "cpu":
            return harness.wall(function, warm=1, repeats=repeats)
        return harness.device_time(function, warm=5, repeats=repeats)

    results: list[dict[str, Any]] = []
    for size in sizes:
        found = measure(Case(size, device), time, arguments.backends)
        results.append({"head_dim": size.head_dim, "window": size.window, "backends": found})
        path = harness.save(name, results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
