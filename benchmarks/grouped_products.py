"""Measures the grouped products of experts: those of quack against those of PyTorch.

    python benchmarks/grouped_products.py [--sizes NAME ...]

- ``quack`` are the products of the package quack-kernels, with tiles that the widths choose.
- ``grouped_mm`` is PyTorch's product, beside the kernel of megatron_packed that adds the gradients of
  weights to fp32.
- ``dense`` is one product of cuBLAS with all rows and a single weight: the same arithmetic.

Times are the GPU-busy times of one product, median [10th, 90th percentile] over rounds in which all take
turns. The ratio pairs the times of each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

import harness
from harness import Spread
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.grouped_mlp.api import OP, GroupedMLPInputs
from workloads import device_from

BACKENDS = ("quack", "grouped_mm")
DENSE = "dense"
ROUNDS, QUICK_ROUNDS = 7, 2
SKEW = 20.0
"""Concentration of the experts' shares of the rows; smaller values are less even."""


class Size(NamedTuple):
    rows: int
    experts: int
    channels: int
    hidden: int


SIZES = {
    "Nano, EP8": Size(49152, 16, 2688, 1856),
    "Nano, one GPU": Size(49152, 128, 2688, 1856),
    "2,048 x 768, 128 experts": Size(65536, 128, 2048, 768),
    "2,048 x 1,024": Size(49152, 16, 2048, 1024),
    "latent, 1,024 x 2,688": Size(49152, 16, 1024, 2688),
}


def offsets_of(size: Size) -> Tensor:
    """Return the row after the last one of each expert, for uneven shares that use all rows."""
    torch.manual_seed(0)
    shares = torch.distributions.Dirichlet(torch.full((size.experts,), SKEW)).sample()
    offsets_E = (shares.cumsum(0) * size.rows).round().int()
    offsets_E[-1] = size.rows
    return offsets_E.cuda()


def products_of(backend: str, size: Size) -> Any:
    """Return the `Products` of a backend; `NoBackendError` if it cannot run here."""
    inputs = GroupedMLPInputs(
        channels=size.channels,
        experts=size.experts,
        hidden_in=size.hidden,
        hidden_out=size.hidden,
        activation="squared_relu",
        dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        device_type="cuda",
    )
    return import_module(OP.select(inputs, backend).module).PRODUCTS


def calls_of(size: Size) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the functions of each product and each backend."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()

    rows, experts, channels, hidden = size
    offsets_E = offsets_of(size)
    x_RD, h_RF = normal(rows, channels), normal(rows, hidden)
    w_EFD = normal(experts, hidden, channels, scale=channels**-0.5)
    sums_EFD = torch.zeros(experts, hidden, channels, device="cuda")
    dense_FD = w_EFD[0]
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {DENSE: lambda: x_RD @ dense_FD.t()},
        "input gradient": {DENSE: lambda: h_RF @ dense_FD},
        "weight gradient": {DENSE: lambda: h_RF.t() @ x_RD},
    }
    for backend in BACKENDS:
        try:
            one = products_of(backend, size)
        except NoBackendError as error:
            print(error)
            continue
        calls["forward"][backend] = lambda one=one: one.rows(x_RD, w_EFD.transpose(1, 2), offsets_E)
        calls["input gradient"][backend] = lambda one=one: one.rows(h_RF, w_EFD, offsets_E)
        calls["weight gradient"][backend] = lambda one=one: one.add_weight_gradient(
            sums_EFD, h_RF, x_RD, offsets_E
        )
    return calls


def times(size: Size, rounds_each: int) -> dict[str, dict[str, Any]]:
    """Return milliseconds, ratios and TFLOP/s of each product."""
    work = 2 * size.rows * size.channels * size.hidden
    found: dict[str, dict[str, Any]] = {}
    for product, calls in calls_of(size).items():
        rounds = [
            {name: harness.gpu_busy(call).milliseconds / 1e3 for name, call in calls.items()}
            for _ in range(rounds_each)
        ]
        seconds = {name: [one[name] for one in rounds] for name in calls}
        found[product] = {name: Spread.of(of) for name, of in seconds.items()}
        found[product] |= {
            f"{name} TFLOP/s": round(work / Spread.of(of).median / 1e9)
            for name, of in seconds.items()
        }
        if all(name in seconds for name in BACKENDS):
            found[product]["ratio"] = Spread.of_ratios(*(seconds[name] for name in BACKENDS))
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    return [
        {
            "size": size,
            "product": product,
            **{name: harness.shown(found.get(name)) for name in (*BACKENDS, DENSE, "ratio")},
            **{f"{name} TFLOP/s": found.get(f"{name} TFLOP/s") for name in (*BACKENDS, DENSE)},
        }
        for size, products in results["times"].items()
        for product, found in products.items()
    ]


def main() -> None:
    """Measure all sizes and save the results after each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.common_arguments(parser)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, help="sizes to measure (default: all)")
    arguments = parser.parse_args()
    if device_from(arguments.device).type != "cuda":
        parser.error("the products run on GPUs only.")
    chosen = {name: SIZES[name] for name in arguments.sizes or SIZES}
    results: dict[str, Any] = {
        "sizes": {name: size._asdict() for name, size in chosen.items()},
        "times": {},
    }
    for name, size in chosen.items():
        results["times"][name] = times(size, QUICK_ROUNDS if arguments.quick else ROUNDS)
        path = harness.save("grouped_products", results, folder=arguments.results)
        harness.free_memory()
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
