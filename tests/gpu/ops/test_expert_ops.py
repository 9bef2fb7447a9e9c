"""Permutation and grouped products on a GPU: references, cleared padding, determinism, graphs."""

from functools import partial
from importlib import import_module

import pytest
import torch

from megatron_packed.config.optional_packages import is_installed
from megatron_packed.ops.grouped_mlp.api import grouped_mlp
from megatron_packed.ops.permute.api import permute, unpermute
from support.op_packs import assert_repeats, assert_replays, no_sync, norm_error

pytestmark = pytest.mark.gpu

T, K, E, D, F = 1000, 4, 16, 256, 384
GROUPED = [
    "grouped_mm",
    pytest.param(
        "quack",
        marks=pytest.mark.skipif(not is_installed("quack.gemm"), reason="quack is not installed"),
    ),
]


def make(dtype=torch.bfloat16, seed=0, tail=37, used=E):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, device="cuda")).to(dtype)

    scores = torch.rand(T, used, generator=generator, device="cuda")
    return {
        "x": normal(T, D),
        "w1": normal(E, 2 * F, D, scale=D**-0.5),
        "w2": normal(E, D, F, scale=F**-0.5),
        "weights": scores.topk(K).values,
        "ids": scores.topk(K).indices,
        "valid": torch.arange(T, device="cuda") < T - tail,
        "dy": normal(T, D),
    }


def layer(values, permute_backend="triton", mlp_backend="grouped_mm", accumulate=False):
    """Run permute, experts and unpermute, forward and backward.

    With ``accumulate``, the gradients of the experts' weights are those of their ``main_grad``.
    """
    leaf = {name: values[name].detach().requires_grad_() for name in ("x", "w1", "w2", "weights")}
    sums = {name: torch.zeros_like(leaf[name], dtype=torch.float32) for name in ("w1", "w2")}
    for name in sums if accumulate else ():
        leaf[name].main_grad = sums[name]
    permuted = permute(leaf["x"], values["ids"], E, values["valid"], backend=permute_backend)
    rows = grouped_mlp(
        permuted.x_RD,
        leaf["w1"],
        leaf["w2"],
        permuted.offsets_E,
        activation="swiglu",
        backend=mlp_backend,
    )
    y = unpermute(rows, permuted, leaf["weights"], backend=permute_backend)
    gradients = torch.autograd.grad(y, leaf.values(), values["dy"], allow_unused=True)
    found = dict(zip(leaf, gradients)) | (sums if accumulate else {})
    return {"y": y.detach(), **{f"d_{name}": gradient for name, gradient in found.items()}}


@pytest.mark.parametrize("backend", GROUPED)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("used", [E, K], ids=["all experts", "most experts without a row"])
@pytest.mark.parametrize("tail", [0, 37, T])
def test_the_layer_equals_its_references(used, tail, accumulate, backend):
    values = make(tail=tail, used=used)
    got = layer(values, mlp_backend=backend, accumulate=accumulate)
    wide = {name: v.float() if v.is_floating_point() else v for name, v in values.items()}
    want = layer(wide, "reference", "reference")
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert (
            norm_error(got[name], want[name]) < 1e-2 if want[name].any() else not got[name].any()
        ), name
    for name in ("d_w1", "d_w2"):
        assert not got[name][used:].any(), "the gradient of an expert without rows is zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_permute_kernels_equal_the_reference(dtype):
    values = make(dtype)

    def run(backend):
        leaf = {name: values[name].detach().requires_grad_() for name in ("x", "weights")}
        permuted = permute(leaf["x"], values["ids"], E, values["valid"], backend=backend)
        behind = torch.arange(T * K, device="cuda")[:, None] >= permuted.offsets_E[-1]
        y = unpermute(
            permuted.x_RD.sin().masked_fill(behind, torch.nan),
            permuted,
            leaf["weights"],
            backend=backend,
        )
        return [permuted.x_RD, y, *torch.autograd.grad(y, leaf.values(), values["dy"])]

    for got, want in zip(run("triton"), run("reference")):
        assert torch.isfinite(got).all()
        assert norm_error(got, want) < (4e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("backend", GROUPED)
@pytest.mark.parametrize("out, inner", [(384, 256), (256, 256), (136, 72), (8, 520)])
def test_weight_gradients_are_sums_in_float32(out, inner, backend):
    """Two micro-batches; NaN in the rows after the last offset, which are not read.

    The tiles of quack are 192 x 128, 128 x 128, 192 x 128 and 128 x 192.
    """
    ends = [0, 5, 5, 700, 961]
    generator = torch.Generator(device="cuda").manual_seed(0)
    main_grad = torch.full((len(ends), out, inner), 3.0, device="cuda")
    want = main_grad.double()
    for _ in range(2):
        dy, x = (
            torch.randn(T, width, generator=generator, device="cuda").bfloat16()
            for width in (out, inner)
        )
        dy[ends[-1] :], x[ends[-1] :] = torch.nan, torch.nan
        products = import_module(f"megatron_packed.ops.grouped_mlp.{backend}").PRODUCTS
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        assert products.can_add(main_grad, dy, x)
        products.add_weight_gradient(main_grad, dy, x, offsets)
        for expert, (start, end) in enumerate(zip([0, *ends], ends)):
            want[expert] += dy[start:end].double().t() @ x[start:end].double()
    assert norm_error(main_grad, want) < 1e-5
    assert (main_grad[[0, 2]] == 3).all()


@pytest.mark.parametrize("out, inner", [(384, 256), (256, 256), (136, 72), (8, 520)])
def test_sums_in_bf16_are_those_of_a_separate_addition(out, inner):
    """quack rounds a gradient to bf16 and then adds it in bf16: two roundings, as two kernels do."""
    products = import_module("megatron_packed.ops.grouped_mlp.quack").PRODUCTS
    ends = [0, 5, 5, 700, 961]
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    main_grad = torch.randn(len(ends), out, inner, generator=generator, device="cuda").bfloat16()
    apart = main_grad.clone()
    for _ in range(3):
        dy, x = (
            torch.randn(T, width, generator=generator, device="cuda").bfloat16()
            for width in (out, inner)
        )
        dy[ends[-1] :], x[ends[-1] :] = torch.nan, torch.nan
        assert products.can_add(main_grad, dy, x)
        products.add_weight_gradient(main_grad, dy, x, offsets)
        gradient = products.weight_gradient(dy, x, offsets)
        for expert, (start, end) in enumerate(zip([0, *ends], ends)):
            if end > start:
                apart[expert] += gradient[expert]
    assert main_grad.equal(apart)


@pytest.mark.parametrize("backend", GROUPED)
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_run_gives_the_same_bits(accumulate, backend):
    values = make()
    assert_repeats(partial(layer, values, mlp_backend=backend, accumulate=accumulate))


@pytest.mark.parametrize("backend", GROUPED)
@pytest.mark.parametrize("accumulate", [False, True])
def test_replay_with_other_routing_equals_eager(accumulate, backend):
    static = make()
    changes = [
        make(seed=1, tail=0),
        make(seed=2, tail=500),
        make(seed=3, used=K),
        make(seed=4, tail=T),
    ]
    run = partial(layer, mlp_backend=backend, accumulate=accumulate)
    assert_replays(run, static, changes)


@pytest.mark.parametrize("backend", GROUPED)
def test_no_host_sync(backend):
    values = make()
    run = partial(layer, mlp_backend=backend, accumulate=True)
    run(values)
    torch.cuda.synchronize()
    no_sync(run, values)


@pytest.mark.parametrize("backend", GROUPED)
def test_tokens_keep_their_results_when_others_are_routed_elsewhere(backend):
    """Other tokens change experts. With the products of quack, rows keep their bits.

    The widths are 256, 384 and 768, so quack uses tiles of 128 x 192 and of 192 x 128.

    With PyTorch's product they differ by at most 4 units in the last place of bf16, because its tiles
    depend on the row counts.
    """
    ulps = 4 if backend == "grouped_mm" else 0
    values, other = make(tail=0), make(tail=0, seed=5)
    half = slice(T // 2, T)
    for name in ("x", "ids", "weights", "dy"):
        other[name][half] = values[name][half]
    for name in ("w1", "w2"):
        other[name] = values[name]
    first, second = (layer(one, mlp_backend=backend) for one in (values, other))
    for name in ("y", "d_x", "d_weights"):
        scale = first[name][half].abs().max()
        assert (
            (first[name][half].float() - second[name][half].float()).abs().max() / scale
        ).item() <= ulps * 2**-8
    assert norm_error(second["y"][: T // 2], first["y"][: T // 2]) > 0.5
