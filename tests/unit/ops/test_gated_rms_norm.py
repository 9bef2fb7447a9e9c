"""The reference against the formula, and the independence of rows and of groups."""

from functools import partial

import pytest
import torch

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


@pytest.mark.parametrize("group_size", [1, 4, 12])
def test_gradients_are_those_of_the_function(group_size):
    values = [value.requires_grad_() for value in make()]
    run = partial(gated_rms_norm, eps=1e-5, group_size=group_size, backend="reference")
    assert torch.autograd.gradcheck(run, values)


def test_groups_and_rows_are_independent_bit_for_bit():
    x, z, weight = make(dtype=torch.float32)
    run = partial(gated_rms_norm, weight_D=weight, eps=1e-5, group_size=4, backend="reference")
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
