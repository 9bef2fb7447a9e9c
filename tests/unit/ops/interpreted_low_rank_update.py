"""Low-rank updates of experts in Triton's interpreter; test_triton_interpreter.py runs them."""

from contextlib import nullcontext

import pytest
import torch

from megatron_packed.memory.recompute_outputs import recomputed_output
from megatron_packed.ops.grouped_mlp import grouped_mm
from megatron_packed.ops.grouped_mlp.adapted_linear import adapted_linear
from megatron_packed.ops.grouped_mlp.low_rank_update import add_low_rank_
from support.random_tensors import normal

E, R, WIDE = 5, 150, 136
ENDS = {
    "experts that share tiles": [3, 40, 41, 41, 140],
    "one expert": [0, 0, 150, 150, 150],
    "full tiles": [64, 64, 128, 128, 128],
    "no rows": [0, 0, 0, 0, 0],
}


def factor_of(inner, width, *, transposed):
    shape = (E, width, inner) if transposed else (E, inner, width)
    factor = normal(*shape, seed=3)
    return factor.transpose(1, 2) if transposed else factor


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inner", [8, 72])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_rows_get_the_update_of_their_expert(ends, inner, transposed):
    y, low, factor = (
        normal(R, WIDE),
        normal(R, inner, seed=1),
        factor_of(inner, WIDE, transposed=transposed),
    )
    low[ends[-1] :] = torch.nan
    want, start = y.clone().double(), 0
    for e, end in enumerate(ends):
        want[start:end] += low[start:end].double() @ factor[e].double()
        start = end
    got = add_low_rank_(y.clone(), low, factor, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(got[ends[-1] :], y[ends[-1] :])


def test_a_row_of_another_expert_changes_no_bit():
    offsets = torch.tensor(ENDS["experts that share tiles"], dtype=torch.int32)
    y, low, factor = normal(R, WIDE), normal(R, 8, seed=1), factor_of(8, WIDE, transposed=True)
    before = add_low_rank_(y.clone(), low, factor, offsets)
    y[20], low[20] = 3.0, torch.nan
    after = add_low_rank_(y.clone(), low, factor, offsets)
    others = torch.arange(R) != 20
    assert torch.equal(before[others], after[others]) and after[20].isnan().all()


def test_a_recomputed_activation_is_not_saved_and_changes_no_bit():
    offsets = torch.tensor(ENDS["experts that share tiles"], dtype=torch.int32)
    W, A, B = normal(E, 16, 24, seed=1), normal(E, 8, 24, seed=2), normal(E, 16, 8, seed=3)

    def gradients(recomputes):
        leaves = [normal(R, 24).requires_grad_(), A.clone().requires_grad_(), B.clone()]
        hidden = torch.relu(leaves[0])
        with recomputed_output(hidden, torch.relu, leaves[0]) if recomputes else nullcontext():
            inputs = (hidden, W, leaves[1], leaves[2].requires_grad_(), 0.5, offsets)
            y = adapted_linear(grouped_mm.PRODUCTS, "fc2", *inputs)
        dx, *of_factors = torch.autograd.grad(y.square().sum(), leaves)
        return [y, dx[: offsets[-1]], *of_factors]

    assert all(map(torch.equal, gradients(True), gradients(False)))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("which", ["fc1", "fc2"])
def test_the_layer_of_a_gpu_has_the_gradients_of_autograd(which, accumulate, bfloat16_of_a_gpu):
    """The CPU version of PyTorch's grouped product also leaves rows after the last offset unwritten."""
    ends, width, inner, scale = [3, 40, 41, 41, 140], 24, 8, 0.5
    offsets = torch.tensor(ends, dtype=torch.int32)
    x, dy = normal(R, width).bfloat16(), normal(R, WIDE, seed=9).bfloat16()
    x[ends[-1] :] = dy[ends[-1] :] = torch.nan
    W, A, B = (
        (0.2 * normal(*shape, seed=seed)).bfloat16()
        for seed, shape in enumerate([(E, WIDE, width), (E, inner, width), (E, WIDE, inner)])
    )
    leaves = [x.requires_grad_(), A.requires_grad_(), B.requires_grad_()]
    if accumulate:
        for factor in (A, B):
            factor.main_grad = torch.zeros_like(factor, dtype=torch.float32)
    y = adapted_linear(grouped_mm.PRODUCTS, which, x, W, A, B, scale, offsets)
    y.backward(dy)
    got = [x.grad, *(f.main_grad if accumulate else f.grad for f in (A, B))]
    used = ends[-1]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    merged = W.double() + scale * exact[2] @ exact[1]
    parts = zip([0, *ends], ends, merged, strict=False)
    want = torch.cat([exact[0][start:end] @ matrix.T for start, end, matrix in parts])
    wanted = torch.autograd.grad(want, exact, dy[:used].double())
    for one, other in [
        (y[:used], want),
        (got[0][:used], wanted[0][:used]),
        *zip(got[1:], wanted[1:]),
    ]:
        assert (one.double() - other).norm() < 2e-2 * other.norm()
    assert not (y if which == "fc2" else x.grad)[used:].any(), "unused rows are zeros"
