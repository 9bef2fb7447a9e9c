"""References of RMSNorm and LayerNorm against float64 formulas, and the independence of rows."""

import pytest
import torch

from megatron_packed.layers.norm import layer_norm
from megatron_packed.ops.rms_norm.api import rms_norm, rms_norm_with_residual


def formula(x, weight, eps, shift=0.0):
    x, weight = x.double(), weight.double() + shift
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_its_formula(dtype, zero_centered):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(9, 33, dtype=dtype, requires_grad=True),
        torch.rand(33, dtype=dtype, requires_grad=True),
    )
    got = rms_norm(x, weight, 1e-5, zero_centered=zero_centered)
    want = formula(x, weight, 1e-5, float(zero_centered))
    assert got.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-6)
    grad_out = torch.randn_like(got)
    for grad, want_grad in zip(
        torch.autograd.grad(got, (x, weight), grad_out),
        torch.autograd.grad(want, (x, weight), grad_out.double()),
    ):
        torch.testing.assert_close(grad, want_grad, rtol=2 * tolerance, atol=5 * tolerance)


def test_the_residual_is_x_and_its_gradient_counts():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    normed, residual = rms_norm_with_residual(x, weight, 1e-5)
    assert torch.equal(residual, x) and torch.equal(normed, rms_norm(x, weight, 1e-5))
    got = torch.autograd.grad((residual + normed.sin()).square().sum(), (x, weight))
    want = torch.autograd.grad((x + rms_norm(x, weight, 1e-5).sin()).square().sum(), (x, weight))
    torch.testing.assert_close(got, want)


def test_rows_do_not_see_each_other():
    x, weight = torch.randn(6, 16), torch.rand(16)
    changed = x.clone()
    changed[2] = torch.nan
    keep = torch.arange(6) != 2
    assert torch.equal(rms_norm(x, weight, 1e-5)[keep], rms_norm(changed, weight, 1e-5)[keep])


def test_layer_norm_takes_fp32_weights_for_bf16_rows():
    x, weight, bias = torch.randn(4, 16).bfloat16(), torch.rand(16), torch.rand(16)
    wide = x.double()
    want = (wide - wide.mean(-1, keepdim=True)) / (
        wide.var(-1, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    got = layer_norm(x, weight, bias, 1e-5)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want * weight + bias, rtol=2e-2, atol=2e-2)


def test_a_zero_centered_weight_is_added_to_one_without_rounding():
    x, weight = (4 * torch.randn(40, 16)).bfloat16(), (torch.rand(16) - 0.5).bfloat16()
    wide, scale = x.double(), 1 + weight.double()
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / centred.square().mean(-1, keepdim=True).sqrt() * scale
    got = layer_norm(x, weight, None, 0.0, zero_centered=True)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="last dimension"):
        rms_norm(torch.randn(4, 8), torch.rand(7), 1e-5)
    with pytest.raises(ValueError, match="last dimension"):
        rms_norm_with_residual(torch.randn(4, 8), torch.rand(7), 1e-5)
