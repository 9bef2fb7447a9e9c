"""Activation references against float64 formulas."""

import math

import pytest
import torch

from megatron_packed.ops.activation.api import KINDS, activation, sigmoid_gate


def formula(x, kind):
    x = x.double()
    if kind == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if kind == "squared_relu":
        return x.clamp(min=0) ** 2
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return gate / (1 + torch.exp(-gate)) * up


def assert_close(got, want, *inputs):
    """Compare a result and its gradients with those of a formula in float64."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-6)
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).reshape(want.shape)
    grads = [torch.autograd.grad((y.double() * weight).sum(), inputs) for y in (got, want)]
    for grad, want_grad in zip(*grads):
        torch.testing.assert_close(grad, want_grad, rtol=2 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_its_formula(kind, dtype):
    x = torch.linspace(-6, 6, 120, dtype=torch.float64).reshape(10, 12).to(dtype).requires_grad_()
    got, want = activation(x, kind), formula(x, kind)
    assert got.dtype == dtype and got.shape == (10, 6 if kind == "swiglu" else 12)
    assert_close(got, want, x)


def test_gelu_is_the_exact_one_not_the_tanh_approximation():
    x = torch.tensor([2.0])
    assert activation(x, "gelu").item() == pytest.approx(
        1.9544997, abs=1e-6
    )  # the tanh form gives 1.9545977


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_its_formula(dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 2, 6, dtype=dtype, requires_grad=True)
    fused = (4 * torch.randn(5, 2, 14)).to(dtype).requires_grad_()
    gate = fused[..., 3:9]
    got, want = sigmoid_gate(x, gate), x.double() / (1 + torch.exp(-gate.double()))
    assert got.dtype == dtype and got.is_contiguous()
    assert_close(got, want, x, fused)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        sigmoid_gate(torch.randn(2, 1, 4), torch.randn(2, 1, 3))
    with pytest.raises(ValueError, match="choose one of"):
        activation(torch.randn(2, 4), "relu")
    with pytest.raises(ValueError, match="5 is odd"):
        activation(torch.randn(2, 5), "swiglu")
