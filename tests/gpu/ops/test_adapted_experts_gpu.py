"""Adapters of routed experts on a GPU: float64, unwritten rows, determinism, graphs, host waits."""

from functools import partial
from importlib import import_module

import pytest
import torch

from megatron_packed.config.optional_packages import is_installed
from megatron_packed.ops.grouped_mlp.adapted_linear import adapted_linear
from support.op_packs import assert_repeats, assert_replays, no_sync, norm_error

pytestmark = pytest.mark.gpu

R, E, SCALE = 1000, 6, 0.75
BACKENDS = [
    "grouped_mm",
    pytest.param(
        "quack",
        marks=pytest.mark.skipif(not is_installed("quack.gemm"), reason="quack is not installed"),
    ),
]
ENDS = [0, 5, 5, 700, 768, 961]
"""Row after the last one of each expert: two experts without rows, and rows after the last offset."""
SIZES = [(8, 256, 384), (16, 384, 136), (48, 72, 520), (128, 256, 256)]
"""Inner width of the adapters, input width and output width."""


def make(inner=16, width_in=256, width_out=384, ends=ENDS, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()

    return {
        "x": normal(R, width_in),
        "weight": normal(E, width_out, width_in, scale=width_in**-0.5),
        "A": normal(E, inner, width_in, scale=width_in**-0.5),
        "B": normal(E, width_out, inner, scale=inner**-0.5),
        "dy": normal(R, width_out),
        "ends": torch.tensor(ends, dtype=torch.int32, device="cuda"),
    }


def run(values, backend="quack", which="fc1", accumulate=False):
    leaf = {name: values[name].detach().requires_grad_() for name in ("x", "A", "B")}
    sums = {name: torch.zeros_like(leaf[name], dtype=torch.float32) for name in ("A", "B")}
    for name in sums if accumulate else ():
        leaf[name].main_grad = sums[name]
    products = import_module(f"megatron_packed.ops.grouped_mlp.{backend}").PRODUCTS
    y = adapted_linear(
        products,
        which,
        leaf["x"],
        values["weight"],
        leaf["A"],
        leaf["B"],
        SCALE,
        values["ends"],
    )
    gradients = torch.autograd.grad(y, leaf.values(), values["dy"], allow_unused=True)
    found = dict(zip(leaf, gradients)) | (sums if accumulate else {})
    # Rows after the last offset are undefined in one of the two tensors of rows.
    written = (torch.arange(R, device="cuda") < values["ends"][-1])[:, None]
    return {
        "y": y.detach().where(written, 0) if which == "fc1" else y.detach(),
        **{f"d_{name}": gradient for name, gradient in found.items() if name != "x"},
        "d_x": found["x"] if which == "fc1" else found["x"].where(written, 0),
    }


def oracle(values, ends):
    """Return output and gradients in float64, expert by expert."""
    leaf = {name: values[name].double().requires_grad_() for name in ("x", "A", "B")}
    y = torch.zeros(R, values["B"].shape[1], dtype=torch.float64, device="cuda")
    for e, (start, end) in enumerate(zip([0, *ends], ends)):
        weight = values["weight"][e].double() + SCALE * leaf["B"][e] @ leaf["A"][e]
        y = torch.cat([y[:start], leaf["x"][start:end] @ weight.t(), y[end:]])
    gradients = torch.autograd.grad(y, leaf.values(), values["dy"].double(), allow_unused=True)
    return {"y": y.detach(), **{f"d_{name}": found for name, found in zip(leaf, gradients)}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["fc1", "fc2"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_those_of_merged_weights(sizes, accumulate, which, backend):
    values = make(*sizes)
    want = oracle(values, ENDS)
    for name in ("x", "dy"):
        values[name][ENDS[-1] :] = torch.nan
    got = run(values, backend, which, accumulate)
    for name, value in want.items():
        assert got[name].isfinite().all(), name
        assert norm_error(got[name], value) < 1e-2, name
    for name in ("d_A", "d_B"):
        assert not got[name][[0, 2]].any(), "an expert without rows has a gradient of zero"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_run_gives_the_same_bits(accumulate, backend):
    assert_repeats(partial(run, make(), backend, accumulate=accumulate))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_replay_with_other_routing_equals_eager(accumulate, backend):
    changes = [
        make(seed=1, ends=[0] * E),
        make(seed=2, ends=[R] * E),
        make(seed=3, ends=[1, 2, 3, 4, 5, R]),
        make(seed=4, ends=[100, 200, 300, 400, 500, 600]),
    ]
    assert_replays(partial(run, backend=backend, accumulate=accumulate), make(), changes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_host_sync(backend):
    values = make()
    call = partial(run, backend=backend, accumulate=True)
    call(values)
    torch.cuda.synchronize()
    no_sync(call, values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_keep_their_bits_when_other_rows_change(backend):
    """PyTorch's grouped product chooses its tiles by the row counts, which are the same here."""
    values, other = make(), make(seed=5)
    for name in ("weight", "A", "B"):
        other[name] = values[name]
    half = slice(R // 2, R)
    for name in ("x", "dy"):
        other[name][half] = values[name][half]
    first, second = (run(one, backend) for one in (values, other))
    for name in ("y", "d_x"):
        assert torch.equal(first[name][half], second[name][half])
        assert norm_error(second[name][: R // 2], first[name][: R // 2]) > 0.5
