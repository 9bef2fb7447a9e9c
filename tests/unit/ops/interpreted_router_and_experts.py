"""Products of routers and experts in Triton's interpreter; test_triton_interpreter.py runs them."""

import pytest
import torch

from megatron_packed.ops.grouped_mlp.weight_gradient import add_weight_gradient, can_add
from megatron_packed.ops.router_logits.api import partial_sums, router_logits
from support.op_packs import relative_error
from support.random_tensors import normal

OFFSETS = {
    "usual": [0, 37, 37, 90],
    "tail of unused rows": [20, 41, 41, 41],
    "all rows to one": [0, 0, 97, 97],
    "no rows at all": [0, 0, 0, 0],
}
EXPERTS, ROWS = 4, 97


@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_and_unused_rows_are_not_read(dtype, ends, bfloat16_of_a_gpu):
    """Two micro-batches: widths that no tile divides, and NaN in the rows after the last offset."""
    out, inner = 40, 72
    want = torch.full((EXPERTS, out, inner), 3.0, dtype=torch.float64)
    main_grad = want.float()
    offsets = torch.tensor(ends, dtype=torch.int32)
    for seed in (1, 2):
        dy, x = normal(ROWS, out, seed=seed).to(dtype), normal(ROWS, inner, seed=-seed).to(dtype)
        dy[ends[-1] :], x[ends[-1] :] = torch.nan, torch.nan
        assert can_add(main_grad, dy, x)
        add_weight_gradient(main_grad, dy, x, offsets)
        for expert, (start, end) in enumerate(zip([0, *ends], ends)):
            want[expert] += dy[start:end].double().t() @ x[start:end].double()
    assert relative_error(main_grad, want) < 1e-6
    for expert, (start, end) in enumerate(zip([0, *ends], ends)):
        assert start < end or (main_grad[expert] == 3).all()


def test_the_weight_gradient_needs_float32_sums_and_dense_rows():
    main_grad, dy, x = torch.zeros(2, 8, 16), torch.zeros(5, 8), torch.zeros(5, 16)
    assert can_add(main_grad, dy, x)
    assert not can_add(main_grad.double(), dy, x)
    assert not can_add(main_grad, torch.zeros(8, 5).t(), x)


def router_case(tokens, channels, experts):
    x, weight = normal(tokens, channels).bfloat16(), normal(experts, channels, seed=1)
    # Scales from 1e-6 to 1: the small parts of a split number must not be lost.
    weight *= torch.logspace(-6, 0, experts)[:, None]
    return x, weight, normal(tokens, experts, seed=2) * torch.logspace(-3, 3, tokens)[:, None]


def run_router(backend, x, weight, dlogits, main_grad=None):
    x, weight = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
    if main_grad is not None:
        weight.main_grad = main_grad
    logits = router_logits(x, weight, backend=backend)
    logits.backward(dlogits)
    return logits.detach(), x.grad, weight.grad


@pytest.mark.parametrize("sizes", [(70, 150, 70), (1, 24, 3), (600, 40, 16)])
def test_the_router_errs_no_more_than_a_float32_product(sizes, bfloat16_of_a_gpu):
    """Compare with float64, each row of logits and of the weight's gradient on its own scale."""
    x, weight, dlogits = router_case(*sizes)
    xd, wd, dd = x.double(), weight.double(), dlogits.double()
    want = xd @ wd.t(), dd @ wd, dd.t() @ xd
    main_grad = torch.full_like(weight, 2.0)
    got = run_router("triton", x, weight, dlogits)
    run_router("triton", x, weight, dlogits, main_grad)
    plain = run_router("reference", x, weight, dlogits)
    for ours, theirs, exact in zip(got, plain, want):
        scale = exact.abs().amax(dim=0 if ours is got[0] else 1, keepdim=True)
        errors = [((value.double() - exact) / scale).abs().max() for value in (ours, theirs)]
        assert errors[0] <= max(2 * errors[1], 2**-22), errors
    assert relative_error(main_grad - 2, got[2]) < 1e-6 * main_grad.abs().max() / got[2].abs().max()


def test_a_row_of_logits_depends_on_its_row_only(bfloat16_of_a_gpu):
    """Sums of integers are exact: numpy adds in an order that depends on the processor and the row."""
    x, weight, _ = router_case(130, 72, 5)
    x, weight = (4 * x).round(), (4 * weight).round()
    assert x.any(dim=1).all() and weight.any()
    whole = router_logits(x, weight, backend="triton")
    assert torch.equal(router_logits(x[:70], weight, backend="triton"), whole[:70])
    assert torch.equal(router_logits(x.roll(9, 0), weight, backend="triton"), whole.roll(9, 0))


def test_partial_sums_of_the_weight_gradient_are_bounded():
    assert [partial_sums(tokens) for tokens in (1, 512, 513, 8192, 131072)] == [1, 1, 2, 16, 16]
