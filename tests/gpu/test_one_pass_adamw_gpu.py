"""AdamW in one pass on a GPU: every state beside the reference, and gradients of both data types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_packed.optim.adamw import Control, Reference, Slices, bias_corrections
from megatron_packed.optim.adamw_triton import OnePass
from support.adamw_slices import BF16, F32, STATES, control, masters_of, slices_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FLIPS = 2e-3
"""Share of bf16 moments that may be the other neighbour, because float32 crosses a draw's bound."""
NEIGHBOUR = 2**-7
"""Distance of neighbours in bf16, relative to the smaller one."""


def run(implementation: type[OnePass] | type[Reference], group: Slices, step: Control) -> Slices:
    implementation.run([group], step)
    return group


def moments_of(group: Slices) -> tuple[Tensor, Tensor]:
    return group.exp_avgs[0], group.exp_avg_sqs[0]


def assert_neighbours(found: Tensor, expected: Tensor) -> None:
    """Check that bf16 moments are equal, but for a few that are the neighbours in bf16."""
    torch.testing.assert_close(found, expected, rtol=NEIGHBOUR, atol=0)
    assert (found != expected).float().mean() < FLIPS


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("options", [(2.5, False), (None, True)], ids=["clipped", "changing decay"])
def test_the_kernel_equals_the_reference(
    state: tuple[torch.dtype, torch.dtype, bool, bool], options: tuple[float | None, bool]
) -> None:
    """Masters and moments agree to float32 rounding; bf16 moments differ in a few last places."""
    divisor, changes = options
    got, want = (
        run(
            implementation,
            slices_of(*state, changes=changes, device=DEVICE),
            control(divisor=divisor, device=DEVICE),
        )
        for implementation in (OnePass, Reference)
    )
    torch.testing.assert_close(masters_of(got), masters_of(want), rtol=2e-6, atol=1e-7)
    for ours, theirs in zip(moments_of(got), moments_of(want), strict=True):
        assert ours.dtype == theirs.dtype
        if theirs.dtype == F32:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        else:
            assert_neighbours(ours, theirs)
    if want.weights:
        assert torch.equal(got.weights[0], got.params[0].to(BF16))


def rounding_bounds(group: Slices, step: Control) -> dict[str, Tensor]:
    """Return for each result the largest difference by the choice of fused products, in float64.

    A moment is ``a * b + c * d`` in float32. A compiler rounds one of the two products and fuses the
    other with the sum; let p and q be the products. Two choices differ by at most half a unit in the
    last place of p and of q, and by one of the sum. That is 2^-24 (|p| + |q|) + 2^-23 |p + q|, less
    than 2^-22 (|p| + |q|). The update is ``rate * m / (sqrt(v) + eps)``. It differs by that bound of
    m, by half the relative difference of v, and by some units in the last place of the quotient.
    Together they are below 2^-20 of the update of |p| + |q|. The sum with the master adds one unit.

    Args:
        group: the slices before the step.
    """
    assert step.grad_divisor is not None
    grad = group.grads[0].double() / step.grad_divisor.double()
    exp_avg, exp_avg_sq = (moments.double() for moments in moments_of(group))
    correction1, correction2 = (float(value) for value in bias_corrections(step))
    terms = step.beta1 * exp_avg.abs() + (1 - step.beta1) * grad.abs()
    squares = step.beta2 * exp_avg_sq + (1 - step.beta2) * grad.square()
    update = float(step.lr) / correction1 * terms / ((squares / correction2).sqrt() + step.eps)
    master = masters_of(group).double().abs() + update
    return {
        "exp_avg": 2**-22 * terms,
        "exp_avg_sq": 2**-22 * squares,
        "master": 2**-20 * update + 2**-23 * master,
    }


@pytest.mark.parametrize("remainders", [True, False])
@pytest.mark.parametrize("moments", [BF16, F32], ids=str)
def test_gradients_in_bf16_give_the_results_of_float32_to_the_last_places(
    moments: torch.dtype, remainders: bool
) -> None:
    """The same gradients in float32 may give other last places, as the compiler fuses others.

    Triton 3.9 for Hopper fuses ``(1 - beta1) * grad`` with the sum of the first moment if gradients
    are float32, and ``beta1 * exp_avg`` if they are bf16, and so for squares. In the
    interpreter, which fuses nothing, the results are equal. Within one run, a parameter's gradients
    have the same data type in every layout, so they are always added by the same code.
    """
    step = control(device=DEVICE)
    before, low, full = (
        slices_of(moments, moments, remainders, True, changes=False, grad=BF16, device=DEVICE)
        for _ in range(3)
    )
    bounds = rounding_bounds(before, step)
    run(OnePass, low, step)
    full = run(OnePass, next(full.in_float32()), step)
    assert full.grads[0].dtype == F32 and low.grads[0].dtype == BF16
    found = {"master": (masters_of(low), masters_of(full))}
    for name, pair in zip(("exp_avg", "exp_avg_sq"), zip(moments_of(low), moments_of(full))):
        if moments == BF16:
            assert_neighbours(*pair)
        else:
            found[name] = pair
    for name, (ours, theirs) in found.items():
        assert not torch.equal(ours, masters_of(before))
        difference = (ours.double() - theirs.double()).abs()
        worst = float((difference / bounds[name].clamp(min=1e-45)).max())
        print(
            f"{name}: {float((difference > 0).float().mean()):.1%} differ, by {worst:.2f} of the bound"
        )
        assert worst <= 1, name


@pytest.mark.parametrize("grad", [BF16, F32], ids=str)
def test_equal_steps_give_equal_bits(grad: torch.dtype) -> None:
    first, second = (
        run(
            OnePass,
            slices_of(BF16, BF16, True, True, changes=False, grad=grad, device=DEVICE),
            control(device=DEVICE),
        )
        for _ in range(2)
    )
    assert torch.equal(masters_of(first), masters_of(second))
    assert all(torch.equal(*pair) for pair in zip(moments_of(first), moments_of(second)))


@pytest.mark.parametrize("remainders", [True, False])
def test_a_skipped_step_changes_nothing(remainders: bool) -> None:
    group, before = (
        slices_of(BF16, BF16, remainders, True, changes=True, device=DEVICE) for _ in range(2)
    )
    run(OnePass, group, control(skip=1.0, device=DEVICE))
    for name in ("params", "remainders", "weights", "exp_avgs", "exp_avg_sqs"):
        for ours, theirs in zip(getattr(group, name), getattr(before, name), strict=True):
            assert torch.equal(ours, theirs)
