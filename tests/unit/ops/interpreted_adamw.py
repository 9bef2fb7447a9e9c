"""One-pass AdamW in Triton's interpreter; test_triton_interpreter.py runs it."""

from dataclasses import replace

import pytest
import torch

from megatron_packed.optim.adamw import Reference, Slices
from megatron_packed.optim.adamw_triton import OnePass
from support.adamw_slices import BF16, F32, STATES, control, masters_of, slices_of
from support.optimizer_states import numbers_of_shards


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("options", [(2.5, False), (None, True)], ids=["clipped", "changing decay"])
def test_the_kernel_equals_the_reference(state, options, bfloat16_of_a_gpu):
    """Masters and moments agree to float32 rounding; bf16 moments differ in a few last places."""
    divisor, changes = options
    want, got = (slices_of(*state, changes=changes) for _ in range(2))
    Reference.run([want], control(divisor=divisor))
    OnePass.run([got], control(divisor=divisor))
    torch.testing.assert_close(masters_of(got), masters_of(want), rtol=2e-6, atol=1e-7)
    for ours, theirs in ((got.exp_avgs, want.exp_avgs), (got.exp_avg_sqs, want.exp_avg_sqs)):
        if theirs[0].dtype == F32:
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)
        else:
            # A draw decides the same unless the rounding of float32 moves a value across its bound.
            torch.testing.assert_close(ours[0], theirs[0], rtol=2**-7, atol=0)
            assert (ours[0] != theirs[0]).float().mean() < 2e-3
    if want.weights:
        assert torch.equal(got.weights[0], got.params[0].to(BF16))


@pytest.mark.parametrize("remainders", [True, False])
def test_the_kernel_reads_gradients_in_bf16(remainders):
    """They give the bits of the same gradients in float32."""
    low, full = (slices_of(BF16, BF16, remainders, True, changes=False, grad=BF16) for _ in "ab")
    full = next(full.in_float32())
    for group in (low, full):
        OnePass.run([group], control())
    assert torch.equal(masters_of(low), masters_of(full))
    assert torch.equal(low.exp_avgs[0], full.exp_avgs[0])
    assert torch.equal(low.exp_avg_sqs[0], full.exp_avg_sqs[0])


@pytest.mark.parametrize("remainders", [True, False])
def test_a_skipped_step_changes_nothing(remainders):
    group, before = (slices_of(BF16, BF16, remainders, True, changes=True) for _ in range(2))
    OnePass.run([group], control(skip=1.0))
    for name in ("params", "remainders", "weights", "exp_avgs", "exp_avg_sqs"):
        for ours, theirs in zip(getattr(group, name), getattr(before, name), strict=True):
            assert torch.equal(ours, theirs)


def test_the_kernel_draws_the_words_of_the_reference():
    """First moments halfway between two bf16 numbers, which no rounding of float32 disturbs."""
    numbers = numbers_of_shards()
    length = max(begin + count for begin, count, *_ in numbers.runs.tolist())
    found = []
    for implementation in (OnePass, Reference):
        group = Slices(
            weight_decay=0.0,
            params=[torch.zeros(length)],
            grads=[torch.full((length,), 2 + 2**-7)],
            exp_avgs=[torch.zeros(length, dtype=BF16)],
            exp_avg_sqs=[torch.ones(length, dtype=BF16)],
            numbers=[numbers],
            stochastic=True,
        )
        implementation.run([group], replace(control(divisor=None), beta1=0.5, beta2=0.0))
        found.append(torch.stack([group.exp_avgs[0], group.exp_avg_sqs[0]]))
    of_blocks = torch.cat(
        [torch.arange(begin, begin + count) for begin, count, *_ in numbers.runs.tolist()]
    )
    kernel, reference = (moments[:, of_blocks] for moments in found)
    assert torch.equal(kernel, reference)
    assert 0.4 < (kernel[0] > 1).float().mean() < 0.6
