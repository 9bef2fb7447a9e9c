"""Measures the gated delta rule with a doubled beta: errors for one repeated key, and times.

    python benchmarks/doubled_beta.py [--before CHECKOUT | --errors]

- Errors are norms of the difference to the reference in float64, relative to its norm. All tokens have
  one key, beta is near 2 and nothing decays. ``reference`` is plain PyTorch with bf16 inputs, ``fla`` are
  the kernels of fla-core, also where the op refuses them because Triton compiles their backward wrongly.
- Times are of forward and backward on the GPU, for ordinary inputs in bf16.
- ``--errors`` measures errors alone, into a file of its own.
- ``--before`` times the kernels of eight sizes without a doubled beta, also with the package of another
  checkout, in turns. A ratio above 1 means that this checkout takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import harness
from gated_delta_rule import NAMES, Size, call_of, leaves, lengths_of, without_refusal
from harness import Spread
from workloads import device_from

FULL = Size(8192, 16, 32, 128, 128, 12)
QUICK = Size(96, 1, 2, 16, 16, 3)
SIZES = (
    FULL,
    FULL._replace(documents=1),
    FULL._replace(documents=200),
    FULL._replace(tokens=4096),
    FULL._replace(tokens=16384),
    Size(8192, 8, 16, 96, 192, 12),
    Size(8192, 32, 32, 64, 64, 12),
    Size(2048, 16, 64, 128, 128, 5),
)
CASES = {"448 tokens": [1, 130, 2, 255, 60], "8192 tokens": [8192]}
ROUNDS = 5


def repeated_keys(lengths: list[int], size: Size, device: torch.device) -> list[torch.Tensor]:
    """Return inputs of one key, with beta near 2 and without decay."""
    size = size._replace(tokens=sum(lengths))
    q, k, v, a, b, A_log, dt_bias = (x.detach() for x in leaves(size, torch.bfloat16, device))
    k = k[:1].expand_as(k).contiguous()
    tensors = (q, k, v, a, b + 12, torch.full_like(A_log, -20), torch.full_like(dt_bias, -20))
    return [x.requires_grad_() for x in tensors]


def gradients(tensors: list[torch.Tensor], lengths: list[int], backend: str) -> list[torch.Tensor]:
    """Return the output and all gradients with a doubled beta."""
    o = call_of(tensors, lengths, len(lengths), backend, doubled=True)()
    return [o, *torch.autograd.grad(o, tensors, torch.cos(o.detach().double()).to(o))]


def errors(size: Size, device: torch.device, backends: tuple[str, ...]) -> dict[str, Any]:
    """Return the errors of each backend by the name of the case, and the name of the result."""
    found = {}
    for case, lengths in CASES.items():
        low = repeated_keys(lengths, size, device)
        wide = [x.detach().double().requires_grad_() for x in low]
        want = gradients(wide, lengths, "reference")
        for backend in backends:
            got = gradients(low, lengths, backend)
            found[f"{case}, {backend}"] = {
                name: ((x.double() - y).norm() / y.norm()).item()
                for name, x, y in zip(NAMES, got, want, strict=True)
            }
    return found


def error_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the largest errors, from results in the form of a result file."""
    return [
        {
            "one key repeated, kernels": name,
            "output": f"{found['o']:.1e}",
            "worst gradient": f"{max(value for key, value in found.items() if key != 'o'):.1e}",
        }
        for name, found in results["errors"].items()
    ]


def pass_of(
    size: Size, device: torch.device, *, doubled: bool, backend: str
) -> Callable[[], object]:
    """Return a function that runs forward and backward."""
    lengths, tensors = lengths_of(size), leaves(size, torch.bfloat16, device)
    call = call_of(tensors, lengths, size.documents, backend, doubled=doubled)
    upstream = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), tensors, upstream)


def busy_seconds(size: Size, device: torch.device) -> float:
    """Return the GPU time of forward and backward without a doubled beta, after a warm-up."""
    run = pass_of(size, device, doubled=False, backend="triton")
    for _ in range(10):
        run()
    return harness.gpu_busy(run, calls=20).milliseconds / 1e3


def eight_sizes(package: Path) -> list[float]:
    """Return the seconds of each size, measured in a process that imports ``package``."""
    path = os.pathsep.join((str(package), str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, __file__, "--times"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and save the results after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.common_arguments(parser)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--times", action="store_true", help="print the times of eight sizes only")
    parser.add_argument("--errors", action="store_true", help="measure errors only")
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    if arguments.times:
        print(json.dumps([busy_seconds(size, device) for size in SIZES]))
        return
    size = QUICK if arguments.quick else FULL
    backend = "reference" if device.type == "cpu" else "triton"
    results: dict[str, Any] = {"size": size._asdict()}

    def save() -> None:
        name = "doubled_beta_errors" if arguments.errors else "doubled_beta"
        harness.save(name, results, folder=arguments.results)

    for doubled in () if arguments.errors else (False, True):
        timed = harness.wall if device.type == "cpu" else harness.device_time
        results[f"times, doubled {doubled}"] = timed(
            pass_of(size, device, doubled=doubled, backend=backend)
        )
        print(doubled, results[f"times, doubled {doubled}"], flush=True)
    save()
    if arguments.before is not None:
        here = Path(__file__).resolve().parents[1]
        rounds = [(eight_sizes(here), eight_sizes(arguments.before)) for _ in range(ROUNDS)]
        results["sizes"] = [
            {
                "size": each._asdict(),
                "now": Spread.of([now[at] for now, _ in rounds]),
                "before": Spread.of([before[at] for _, before in rounds]),
                "ratio": Spread.of_ratios(
                    [now[at] for now, _ in rounds], [before[at] for _, before in rounds]
                ),
            }
            for at, each in enumerate(SIZES)
        ]
        save()
        print(harness.table([{k: str(v) for k, v in row.items()} for row in results["sizes"]]))
    backends: tuple[str, ...] = ("triton", "reference") if backend == "triton" else ("reference",)
    if device.type == "cuda":
        try:
            without_refusal()
            backends += ("fla",)
        except ImportError as missing:
            results["fla"] = f"not measured: {missing}"
    results["errors"] = errors(
        size._replace(key_heads=2, value_heads=4) if not arguments.quick else size, device, backends
    )
    print(json.dumps(results["errors"], indent=1), flush=True)
    save()


if __name__ == "__main__":
    main()
