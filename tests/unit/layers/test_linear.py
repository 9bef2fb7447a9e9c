"""Tests that gradients added to the flat float32 buffer equal those of autograd."""

import pytest
import torch

from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.embedding import Embedding
from megatron_packed.layers.linear import Linear, accumulate_weight_grad, linear
from support.random_tensors import filled


def built_on(device, dtype):
    return Build(backends=Backends(), device=device, dtype=dtype)


def make_linear(bias, dtype=torch.float32):
    return filled(Linear(6, 4, bias=bias, build=built_on("cpu", dtype)))


def give_main_grad(module, value=0.0):
    for parameter in module.parameters():
        parameter.main_grad = torch.full(parameter.shape, value, dtype=torch.float32)


def batches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    for tokens in (5, 1, 8):
        yield (
            torch.randn(tokens, 6, generator=generator).to(dtype),
            torch.randn(tokens, 4, generator=generator).to(dtype),
        )


@pytest.mark.parametrize("bias", [True, False])
def test_main_grad_equals_autograd_over_accumulated_batches(bias):
    plain, flat = make_linear(bias), make_linear(bias)
    give_main_grad(flat)
    for x, grad in batches():
        x_plain, x_flat = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = flat(x_flat)
        assert torch.equal(y, plain(x_plain))
        plain(x_plain).backward(grad)
        y.backward(grad)
        torch.testing.assert_close(x_flat.grad, x_plain.grad)
    for mine, autograd in zip(flat.parameters(), plain.parameters(), strict=True):
        assert mine.grad is None
        torch.testing.assert_close(mine.main_grad, autograd.grad)


def test_main_grad_adds_to_what_is_there():
    layer = make_linear(True)
    give_main_grad(layer, value=3.0)
    layer(torch.zeros(2, 6)).backward(torch.ones(2, 4))
    assert torch.equal(layer.weight.main_grad, torch.full((4, 6), 3.0))
    assert torch.equal(layer.bias.main_grad, torch.full((4,), 5.0))


def test_bfloat16_gradients_are_summed_in_float32():
    """Check the sum 1 + 257 x 2^-9: in bfloat16 every addend is lost, in float32 none."""
    layer = make_linear(False, torch.bfloat16)
    give_main_grad(layer)
    x, grad = torch.zeros(1, 6, dtype=torch.bfloat16), torch.ones(1, 4, dtype=torch.bfloat16)
    for value in [1.0] + 257 * [2.0**-9]:
        layer(x.fill_(value)).backward(grad)
    assert torch.equal(layer.weight.main_grad, torch.full((4, 6), 1 + 257 * 2.0**-9))
    tokens = torch.full((258, 6), 2.0**-9, dtype=torch.bfloat16)
    tokens[0] = 1
    give_main_grad(layer)
    layer(tokens).backward(torch.ones(258, 4, dtype=torch.bfloat16))
    assert torch.equal(layer.weight.main_grad, torch.full((4, 6), 1 + 257 * 2.0**-9))


def test_frozen_weight_keeps_its_main_grad():
    layer = make_linear(True)
    give_main_grad(layer)
    layer.weight.requires_grad_(False)
    x = torch.ones(2, 6, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.main_grad.abs().max() == 0
    assert layer.bias.main_grad.min() == 2
    assert x.grad is not None


def test_a_bias_may_stay_with_autograd():
    layer = make_linear(True)
    layer.weight.main_grad = torch.zeros(4, 6)
    linear(torch.ones(3, 6), layer.weight, layer.bias).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((4,), 3.0))


def test_biases_and_norms_are_marked_for_no_weight_decay():
    layer = make_linear(True)
    assert layer.bias.no_weight_decay
    assert not hasattr(layer.weight, "no_weight_decay")


def test_accumulation_takes_a_broadcast_gradient():
    grad = torch.ones(1, 4).expand(5, 4)  # The stride is zero, as in the gradient of a sum.
    into = torch.zeros(4, 6)
    accumulate_weight_grad(into, grad, torch.ones(5, 6))
    assert torch.equal(into, torch.full((4, 6), 5.0))


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
def test_embedding_main_grad_equals_autograd(token_dtype):
    tokens = torch.tensor([3, 1, 3, 3, 0], dtype=token_dtype)
    grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    build = built_on("cpu", torch.float32)
    plain, flat = (filled(Embedding(6, 4, build=build)) for _ in range(2))
    give_main_grad(flat, value=1.0)
    rows = flat(tokens)
    assert torch.equal(rows, plain.weight[tokens.long()])
    rows.backward(grad)
    plain(tokens).backward(grad)
    assert flat.weight.grad is None
    torch.testing.assert_close(flat.weight.main_grad, plain.weight.grad + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_main_grad_on_the_gpu_equals_a_float64_product(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(300, n, generator=generator, device="cuda").to(dtype) for n in (96, 64))
    into = torch.ones(64, 96, device="cuda")
    accumulate_weight_grad(into, grad, x)
    exact = grad.double().t() @ x.double() + 1
    assert (into - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.gpu
def test_embedding_gradient_on_the_gpu_is_right_and_deterministic():
    tokens = torch.randint(0, 50, (4096,), generator=torch.Generator().manual_seed(0)).cuda().int()
    grad = torch.randn(4096, 64, device="cuda").bfloat16()
    results = []
    for _ in range(3):
        layer = Embedding(64, 64, build=built_on("cuda", torch.bfloat16))
        give_main_grad(layer)
        layer.weight.main_grad = layer.weight.main_grad.cuda()
        layer(tokens).backward(grad)
        results.append(layer.weight.main_grad)
    exact = torch.zeros(64, 64, dtype=torch.float64, device="cuda").index_add_(
        0, tokens.long(), grad.double()
    )
    assert (results[0] - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
