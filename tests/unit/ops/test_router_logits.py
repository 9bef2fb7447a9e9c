"""The reference against float64, its gradients in ``main_grad``, and refused inputs."""

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.router_logits.api import router_logits
from support.op_packs import relative_error, run_without_values
from support.random_tensors import normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_and_its_gradients(dtype):
    """The weight's gradient goes to ``main_grad`` if there is one, and is added twice in two steps."""
    x, weight, dlogits = normal(30, 12).to(dtype), normal(5, 12, seed=1), normal(30, 5, seed=2)
    xd, wd, dd = x.double(), weight.double(), dlogits.double()
    leaf, plain, flat = x.clone().requires_grad_(), *(torch.nn.Parameter(weight) for _ in range(2))
    flat.main_grad = torch.full_like(weight, 7.0)
    logits = router_logits(leaf, plain, backend="reference")
    logits.backward(dlogits)
    for _ in range(2):
        router_logits(x, flat, backend="reference").backward(dlogits)
    assert logits.dtype == torch.float32 and leaf.grad.dtype == dtype and flat.grad is None
    assert relative_error(logits, xd @ wd.t()) < 1e-6
    assert relative_error(leaf.grad, dd @ wd) < (1e-6 if dtype == torch.float32 else 3e-3)
    assert relative_error(plain.grad, dd.t() @ xd) < 1e-6
    assert relative_error((flat.main_grad - 7) / 2, dd.t() @ xd) < 1e-6


def test_autograd_agrees_in_float64():
    x, weight = (value.double().requires_grad_() for value in (normal(4, 3), normal(2, 3, seed=1)))
    assert torch.autograd.gradcheck(lambda *a: router_logits(*a, backend="reference"), (x, weight))


def test_no_host_sync():
    run_without_values(lambda x, w: router_logits(x, w, backend="reference"), *normal(2, 4, 6))


def test_what_cannot_be_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match=r"x has shape \[4, 3\] and the weight \[2, 5\]"):
        router_logits(normal(4, 3), normal(2, 5))
    with pytest.raises(NoBackendError, match=r"rows \(torch.float32\) must be bfloat16"):
        router_logits(normal(4, 3), normal(2, 3), backend="triton")
