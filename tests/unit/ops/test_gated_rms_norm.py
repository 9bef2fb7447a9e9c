"""The reference against the formula, and the independence of rows and of groups."""

from functools import partial

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from support.op_packs import run_without_values


def make(tokens=9, channels=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((tokens, channels),) * 2 + ((channels,),)
    ]


def test_golden_value():
    """Check one value by hand.

    With x silu(z) = (3, 4) the mean square is 12.5, so y = weight * (3, 4) / sqrt(12.5 + eps).
    """
    gate = torch.tensor(2.0, dtype=torch.float64)
    z = gate.expand(1, 2)
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64) / (gate * gate.sigmoid())
    y = gated_rms_norm(
        x, z, torch.tensor([1.0, 10.0], dtype=torch.float64), 0.5, group_size=2, backend="reference"
    )
    torch.testing.assert_close(y, torch.tensor([[3.0, 40.0]], dtype=torch.float64) / 13**0.5)


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("shared_weight", [False, True])
@pytest.mark.parametrize("group_size", [1, 4, 12])
def test_gradients_are_those_of_the_function(group_size, shared_weight, norm_before_gate):
    x, z, weight = make()
    values = [x, z, weight[: group_size if shared_weight else None].clone()]
    run = partial(
        gated_rms_norm,
        eps=1e-5,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
        backend="reference",
    )
    assert torch.autograd.gradcheck(run, [value.requires_grad_() for value in values])


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_groups_and_rows_are_independent_bit_for_bit(norm_before_gate):
    x, z, weight = make(dtype=torch.float32)
    run = partial(
        gated_rms_norm,
        weight=weight,
        eps=1e-5,
        group_size=4,
        norm_before_gate=norm_before_gate,
        backend="reference",
    )
    base = run(x, z)
    for row, channel in ((2, 5), (8, 0)):
        changed_x, changed_z = x.clone(), z.clone()
        changed_x[row, channel] += 1
        changed_z[row, channel] += 1
        moved = (run(changed_x, changed_z) != base).nonzero()
        assert set(moved[:, 0].tolist()) == {row}
        assert set((moved[:, 1] // 4).tolist()) == {channel // 4}


def test_the_gate_comes_before_the_norm():
    """Check that with eps 0 a constant factor of x changes nothing, because the norm divides by it."""
    x, z, weight = make()
    y = gated_rms_norm(x, z, weight, 0.0, group_size=4, backend="reference")
    torch.testing.assert_close(
        gated_rms_norm(7 * x, z, weight, 0.0, group_size=4, backend="reference"), y
    )


@pytest.mark.parametrize("shared_weight", [False, True])
def test_the_norm_comes_before_the_gate(shared_weight):
    """Compare with PyTorch's RMSNorm of each head, times the gate."""
    x, z, weight = make()
    if shared_weight:
        weight = weight[:4]
    y = gated_rms_norm(x, z, weight, 1e-5, group_size=4, norm_before_gate=True, backend="reference")
    heads = zip(x.split(4, dim=1), (weight if shared_weight else weight.view(3, 4)).expand(3, 4))
    want = torch.cat([rms_norm(head, (4,), own, 1e-5) for head, own in heads], dim=1) * silu(z)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)


def test_a_group_split_over_ranks_is_normalised_before_the_gate():
    """Compare the two halves of a group, whose sums of squares are added, with the whole group."""
    x, z, weight = make()
    want = gated_rms_norm(x, z, weight, 1e-5, group_size=12, norm_before_gate=True)
    squares = x.square().sum(-1)
    halves = [
        gated_rms_norm(
            *(part[:, own] for part in (x, z)),
            weight[own],
            1e-5,
            group_size=12,
            norm_before_gate=True,
            sum_over_ranks=lambda own_squares: squares,
        )
        for own in (slice(0, 6), slice(6, 12))
    ]
    torch.testing.assert_close(torch.cat(halves, dim=1), want)


def test_low_precision_rounds_once():
    x, z, weight = (value.bfloat16() for value in make())
    y = gated_rms_norm(x, z, weight, 1e-5, group_size=4, backend="reference")
    wide = gated_rms_norm(
        x.float(), z.float(), weight.float(), 1e-5, group_size=4, backend="reference"
    )
    assert y.dtype == torch.bfloat16 and torch.equal(y, wide.bfloat16())


def test_no_host_sync_and_static_shapes():
    run_without_values(
        partial(gated_rms_norm, eps=1e-5, group_size=4, backend="reference"), *make()
    )


def test_what_cannot_be_is_refused_with_its_numbers():
    x, z, weight = make()
    with pytest.raises(ValueError, match="12 channels are not divisible by group_size 5"):
        gated_rms_norm(x, z, weight, 1e-5, group_size=5)
    with pytest.raises(ValueError, match=r"weight \[11\]"):
        gated_rms_norm(x, z, weight[1:], 1e-5, group_size=4)
    with pytest.raises(ValueError, match=r"weight \[6\].*\(group_size,\) = \(4,\)"):
        gated_rms_norm(x, z, weight[:6], 1e-5, group_size=4)
