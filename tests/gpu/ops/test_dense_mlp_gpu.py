"""Dense MLP with quack's joined products on a GPU: separate layers, float64, rows, graphs, memory."""

import pytest
import torch

from megatron_packed.config.optional_packages import is_installed
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.mlp import MLP
from support.op_packs import assert_repeats, assert_replays, no_sync, norm_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed("quack.gemm"), reason="quack is not installed"),
]
SIZES = [(1000, 512, 768), (1000, 512, 1024), (129, 64, 72)]
"""Tokens, hidden size and inner size. In backward the tiles are 128 x 192, 192 x 128 and 192 x 128."""


def mlp(hidden, inner, backend="quack", dtype=torch.bfloat16):
    backends = Backends(dense_mlp=backend, activation="auto" if dtype.itemsize < 8 else "reference")
    layer = MLP(
        hidden,
        inner,
        kind="squared_relu",
        bias=False,
        build=Build(backends=backends, device="cuda", dtype=dtype),
    )
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for weight in (layer.fc1.weight, layer.fc2.weight):
            draw = torch.randn(weight.shape, generator=generator, device="cuda")
            weight.copy_((draw * weight.shape[1] ** -0.5).bfloat16())
    return layer


def values(tokens, hidden, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, dy = torch.randn(2, tokens, hidden, generator=generator, device="cuda").bfloat16()
    return {"x": x, "dy": dy}


def run(layer, given, accumulate=False):
    weights = (layer.fc1.weight, layer.fc2.weight)
    for weight in weights:
        weight.grad = None
        if accumulate:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = given["x"].detach().requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y, (x, *weights), given["dy"], allow_unused=accumulate)
    of_weights = [weight.main_grad for weight in weights] if accumulate else gradients[1:]
    return dict(zip(("y", "x", "fc1", "fc2"), (y.detach(), gradients[0], *of_weights)))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_layer_equals_separate_layers_and_errs_no_more(size, accumulate):
    tokens, *widths = size
    given = values(tokens, widths[0])
    got = run(mlp(*widths), given, accumulate)
    apart = run(mlp(*widths, "torch"), given, accumulate)
    wide = {name: value.double() for name, value in given.items()}
    exact = run(mlp(*widths, "torch", torch.float64), wide)
    for name, want in exact.items():
        assert norm_error(got[name], want) <= 1.02 * norm_error(apart[name], want) < 1e-2, name


@pytest.mark.parametrize("size", SIZES)
def test_both_activations_are_those_of_the_rounded_values(size):
    tokens, *widths = size
    layer, given = mlp(*widths), values(tokens, widths[0])
    products = layer.joined_products("cuda", torch.bfloat16)
    hidden, activated = products.hidden_and_activation(given["x"], layer.fc1.weight)
    _, again = products.gradient(given["dy"], layer.fc2.weight, hidden)
    assert torch.equal(activated, again) and torch.equal(activated, layer.mlp_act(hidden))
    exact = given["x"].double() @ layer.fc1.weight.double().t()
    apart = layer.fc1(given["x"])
    assert norm_error(hidden, exact) <= 1.02 * norm_error(apart, exact)


def test_every_run_gives_the_same_bits_and_a_row_depends_on_itself_only():
    tokens, *widths = SIZES[0]
    layer, given = mlp(*widths), values(tokens, widths[0])
    first = assert_repeats(lambda: run(layer, given), times=3)
    others = torch.arange(tokens, device="cuda") != 300
    given["x"][300], given["dy"][300] = 5.0, torch.nan
    changed = run(layer, given)
    assert all(torch.equal(first[name][others], changed[name][others]) for name in ("y", "x"))
    fewer = run(layer, {name: value[:299] for name, value in given.items()})
    assert torch.isfinite(fewer["x"]).all()


@pytest.mark.parametrize("accumulate", [False, True])
def test_replay_with_other_data_equals_eager(accumulate):
    tokens, *widths = SIZES[1]
    layer = mlp(*widths)
    changes = [values(tokens, widths[0], seed) for seed in (1, 2)]
    assert_replays(
        lambda static: run(layer, static, accumulate), values(tokens, widths[0]), changes
    )


def test_nothing_waits_for_the_device_and_no_activation_is_saved():
    tokens, hidden, inner = 4096, 512, 4096
    held = {}
    for backend in ("quack", "torch"):
        layer, given = mlp(hidden, inner, backend), values(tokens, hidden)
        run(layer, given)
        no_sync(run, layer, given)
        before = torch.cuda.memory_allocated()
        y = layer(given["x"].requires_grad_())
        held[backend] = torch.cuda.memory_allocated() - before
        del y
    assert held["torch"] - held["quack"] == tokens * inner * 2
