"""Measures products of quack that include an activation or the residual, against separate kernels.

    python benchmarks/joined_products.py [--sizes NAME ...]

- ``product + residual``: the last projection of a layer adds the residual.
- ``product + activation``: the first projection of a dense MLP also computes squared ReLU.
- ``product + derivative``: the gradient of that activation, in backward.
- ``experts``: forward and backward of the MLPs of experts, against the products of quack alone.

``separate`` are a product of cuBLAS and the kernel of the other operation. Times are the GPU-busy times
of one call, median [10th, 90th percentile] over rounds in which both take turns. The ratio pairs the
times of each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import grouped_products
import harness
from harness import Spread
from megatron_packed.ops.activation.api import activation
from megatron_packed.ops.dense_mlp import api as dense_mlp
from megatron_packed.ops.grouped_mlp.api import grouped_mlp
from megatron_packed.ops.residual_projection import api as residual_projection
from workloads import device_from

SIDES = ("joined", "separate")
KIND = "squared_relu"
ROUNDS, QUICK_ROUNDS = 7, 2
Calls = dict[str, dict[str, Callable[[], object]]]


class Size(NamedTuple):
    tokens: int
    channels: int
    inner: int
    """Inner channels of the MLP."""
    projected: int
    """Input channels of the projection after the scan."""


SIZES = {
    "shard8b": Size(4096, 4096, 2688, 1024),
    "hybrid1b": Size(8192, 2048, 8192, 4096),
    "Nano": Size(8192, 2688, 3712, 4096),
}
EXPERTS = "Nano, EP8"
"""Size of `grouped_products.py` whose experts are measured."""


def drawn(seed: int = 0) -> Callable[..., Tensor]:
    """Return a function that draws bf16 tensors with a standard deviation of ``scale``."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()

    return normal


def layer_calls(size: Size) -> Calls:
    """Return both sides of the products of a dense MLP, and of two last projections."""
    normal, (tokens, channels, inner, projected) = drawn(), size
    x_TD, residual_TD, dy_TD = (normal(tokens, channels) for _ in range(3))
    w1_FD = normal(inner, channels, scale=channels**-0.5)
    w2_DF = normal(channels, inner, scale=inner**-0.5)
    out_DI, y_TI = normal(channels, projected, scale=projected**-0.5), normal(tokens, projected)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_type": "cuda"}
    mlp = dense_mlp.OP.select(
        dense_mlp.DenseMLPInputs(channels=channels, inner=inner, kind=KIND, **options), "quack"
    ).loaded

    def added(width: int) -> residual_projection.AddedProduct:
        inputs = residual_projection.ResidualProjectionInputs(
            inner=width, channels=channels, **options
        )
        product: residual_projection.AddedProduct = residual_projection.OP.select(
            inputs, "quack"
        ).loaded.added_product
        return product

    hidden_TF = F.linear(x_TD, w1_FD).requires_grad_()
    activated_TF = activation(hidden_TF, KIND)
    a_TF, h_TF = activated_TF.detach(), hidden_TF.detach()

    def derivative() -> object:
        product_TF = dy_TD @ w2_DF
        return torch.autograd.grad(activated_TF, hidden_TF, product_TF, retain_graph=True)

    return {
        "product + activation": {
            "joined": lambda: mlp.hidden_and_activation(x_TD, w1_FD),
            "separate": torch.no_grad()(lambda: activation(F.linear(x_TD, w1_FD), KIND)),
        },
        "product + derivative": {
            "joined": lambda: mlp.gradient(dy_TD, w2_DF, h_TF),
            "separate": derivative,
        },
        f"product + residual, of {inner:,}": {
            "joined": partial(added(inner), residual_TD, a_TF, w2_DF),
            "separate": lambda: residual_TD + F.linear(a_TF, w2_DF),
        },
        f"product + residual, of {projected:,}": {
            "joined": partial(added(projected), residual_TD, y_TI, out_DI),
            "separate": lambda: residual_TD + F.linear(y_TI, out_DI),
        },
    }


def expert_calls() -> Calls:
    """Return forward and backward of experts whose gradients are added to fp32."""
    normal, size = drawn(), grouped_products.SIZES[EXPERTS]
    offsets_E = grouped_products.offsets_of(size)
    x_RD, dy_RD = normal(size.rows, size.channels), normal(size.rows, size.channels)
    w1_EFD = normal(size.experts, size.hidden, size.channels, scale=size.channels**-0.5)
    w2_EDF = normal(size.experts, size.channels, size.hidden, scale=size.hidden**-0.5)
    for weight in (w1_EFD, w2_EDF):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        weight.requires_grad_()

    def both(backend: str) -> None:
        x = x_RD.detach().requires_grad_()
        y_RD = grouped_mlp(x, w1_EFD, w2_EDF, offsets_E, activation=KIND, backend=backend)
        y_RD.backward(dy_RD)

    return {"experts": {"joined": lambda: both("quack_joined"), "separate": lambda: both("quack")}}


def times(calls: Calls, rounds_each: int) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of both sides and their ratio, for each operation."""
    found: dict[str, dict[str, Any]] = {}
    for name, sides in calls.items():
        for call in sides.values():
            call()  # compiles the kernels
        rounds = [
            {side: harness.gpu_busy(sides[side]).milliseconds / 1e3 for side in SIDES}
            for _ in range(rounds_each)
        ]
        seconds = {side: [one[side] for one in rounds] for side in SIDES}
        found[name] = {side: Spread.of(of) for side, of in seconds.items()}
        found[name]["ratio"] = Spread.of_ratios(*(seconds[side] for side in SIDES))
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    return [
        {
            "size": size,
            "operation": operation,
            **{f"{side} ms": harness.shown(found[side]) for side in SIDES},
            "ratio": harness.shown(found["ratio"]),
        }
        for size, operations in results["times"].items()
        for operation, found in operations.items()
    ]


def main() -> None:
    """Measure all sizes and save the results after each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.common_arguments(parser)
    names = (*SIZES, EXPERTS)
    parser.add_argument("--sizes", nargs="*", choices=names, help="sizes to measure (default: all)")
    arguments = parser.parse_args()
    if device_from(arguments.device).type != "cuda":
        parser.error("the products run on GPUs only.")
    results: dict[str, Any] = {
        "sizes": {name: size._asdict() for name, size in SIZES.items()},
        "times": {},
    }
    for name in arguments.sizes or names:
        calls = expert_calls() if name == EXPERTS else layer_calls(SIZES[name])
        results["times"][name] = times(calls, QUICK_ROUNDS if arguments.quick else ROUNDS)
        path = harness.save("joined_products", results, folder=arguments.results)
        del calls
        harness.free_memory()
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
