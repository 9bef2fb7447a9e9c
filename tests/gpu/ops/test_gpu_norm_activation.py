"""RMSNorm and activation kernels on a GPU: errors, isolation, determinism, replay, no host sync."""

import pytest
import torch

from megatron_packed.ops.activation.api import KINDS, activation, sigmoid_gate
from megatron_packed.ops.rms_norm.api import rms_norm, rms_norm_with_residual
from support.gpu_checks import (
    T,
    check_determinism,
    check_errors,
    check_isolation,
    check_no_sync,
    check_replay,
    step,
)

pytestmark = pytest.mark.gpu

WIDTHS = [64, 1000, 2048, 4096, 16384]
BACKENDS = ["triton", "torch"]


def rows(features, seed=0):
    return torch.randn(
        T, features, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
    ).bfloat16()


def plain_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def check(kernel, reference, plain, values, isolated):
    """Check a Triton kernel; ``isolated`` is the kernel of its first value alone."""
    check_errors(kernel, reference, plain, values, torch.bfloat16)
    check_determinism(kernel, values, torch.bfloat16)
    check_no_sync(kernel, values, torch.bfloat16)
    check_replay(kernel, values, torch.bfloat16, [lambda: None])
    check_isolation(isolated, values[:1], slice(300, 301), torch.bfloat16)


@pytest.mark.parametrize("width", [64, 256])
def test_rms_norm_of_query_heads_in_a_fused_projection(width):
    """Each of 3 groups has 2 query heads and 2 other heads; the weight is zero-centered."""

    def heads(x):
        return x.view(3 * T, 4, width)[:, :2]

    def kernel(x, weight, backend="triton"):
        y = rms_norm(heads(x), weight, 1e-5, zero_centered=True, backend=backend)
        return y.reshape(T, -1)

    values = [rows(12 * width), rows(width, 1)[0]]
    check(
        kernel,
        lambda x, w: kernel(x, w, "reference"),
        lambda x, w: plain_norm(heads(x), 1 + w).reshape(T, -1),
        values,
        lambda x: kernel(x, values[1]),
    )


def test_sigmoid_gate_of_a_fused_projection():
    """Each of 2 groups has 1,000 channels of x, their gates, and 7 other channels."""

    def parts(fused):
        groups = fused.view(T, 2, 2007)
        return groups[..., :1000], groups[..., 1000:2000]

    def kernel(fused, backend="triton"):
        return sigmoid_gate(*parts(fused), backend=backend).view(T, -1)

    def plain(fused):
        x, gate = parts(fused)
        return (x * torch.sigmoid(gate)).reshape(T, -1)

    check(kernel, lambda x: kernel(x, "reference"), plain, [rows(4014)], kernel)


@pytest.mark.parametrize("features", WIDTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_norm(backend, features):
    def kernel(x, weight, backend=backend):
        return rms_norm(x, weight, 1e-5, backend=backend)

    values = [rows(features), rows(features, 1)[0]]
    check_errors(kernel, lambda x, w: kernel(x, w, "reference"), plain_norm, values, torch.bfloat16)
    check_determinism(kernel, values, torch.bfloat16)
    check_no_sync(kernel, values, torch.bfloat16)
    check_replay(kernel, values, torch.bfloat16, [lambda: None] * 2)
    weight = values[1]
    check_isolation(lambda x: kernel(x, weight), values[:1], slice(300, 301), torch.bfloat16)


@pytest.mark.parametrize("features", [1000, 4096])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_norm_with_residual(backend, features):
    def kernel(x, weight, backend=backend):
        return rms_norm_with_residual(x, weight, 1e-5, backend=backend)

    def plain(x, weight):
        return plain_norm(x, weight), x * 1

    values = [rows(features), rows(features, 1)[0]]
    check_errors(kernel, lambda x, w: kernel(x, w, "reference"), plain, values, torch.bfloat16)
    check_determinism(kernel, values, torch.bfloat16)
    check_no_sync(kernel, values, torch.bfloat16)
    check_replay(kernel, values, torch.bfloat16, [lambda: None])
    check_isolation(lambda x: kernel(x, values[1]), values[:1], slice(300, 301), torch.bfloat16)


def test_rms_norm_adds_its_weight_gradient_into_main_grad():
    x, weight = rows(2048), torch.nn.Parameter(torch.rand(2048, device="cuda"))
    want = step(lambda w: rms_norm(x, w, 1e-5, backend="reference"), [weight])[1]
    weight.main_grad = torch.ones(2048, device="cuda")
    y = rms_norm(x, weight, 1e-5, backend="triton")
    y.backward(
        torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(5), device="cuda").to(
            y.dtype
        )
    )
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("features", [1000, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_activation(kind, features):
    def kernel(x, backend="triton"):
        return activation(x, kind, backend=backend)

    def plain(x):
        if kind == "gelu":
            return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))
        if kind == "squared_relu":
            return torch.relu(x) * torch.relu(x)
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    values = [rows(features)]
    check_errors(kernel, lambda x: kernel(x, "reference"), plain, values, torch.bfloat16)
    check_determinism(kernel, values, torch.bfloat16, runs=2)
    check_no_sync(kernel, values, torch.bfloat16)
    check_replay(kernel, values, torch.bfloat16, [lambda: None])
    check_isolation(kernel, values, slice(300, 301), torch.bfloat16)
