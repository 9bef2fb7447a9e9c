"""The reference against complex multiplication in float64, and edge cases.

test_triton_interpreter.py tests the kernel.
"""

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.rope.api import apply_rope, rope_tables
from support.random_tensors import normal


def complex_rotation(x, positions, rotary_dim, base):
    """Rotate dimensions r and r + R as one complex number, by position * base^(-2r / rotary_dim)."""
    half = rotary_dim // 2
    angle = positions.double()[:, None] * base ** (
        -torch.arange(half, dtype=torch.float64) * 2 / rotary_dim
    )
    turned = (
        torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
        * torch.exp(1j * angle)[:, None]
    )
    return torch.cat([turned.real, turned.imag, x[..., rotary_dim:].double()], -1)


@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
def test_reference_is_a_complex_rotation(rotary_dim):
    torch.manual_seed(0)
    q, k = torch.randn(20, 4, 16, requires_grad=True), torch.randn(20, 2, 16, requires_grad=True)
    positions = torch.tensor([*range(7), *range(12), 900], dtype=torch.int32)
    got = apply_rope(q, k, positions, *rope_tables(1000, rotary_dim, 10000.0))
    for turned, x in zip(got, (q, k)):
        want = complex_rotation(x, positions, rotary_dim, 10000.0)
        torch.testing.assert_close(turned.double(), want, rtol=0, atol=5e-7)
        weight = torch.randn_like(x)
        grad, want_grad = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (turned, want))
        torch.testing.assert_close(grad, want_grad, rtol=0, atol=5e-7)


def test_a_document_is_rotated_the_same_at_every_place_in_the_pack():
    q, k = torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    tables = rope_tables(6000, 8, 10000.0)
    alone = apply_rope(q, k, torch.arange(50), *tables)
    shift = 5000
    packed = [torch.cat([torch.randn(shift, 2, 8), x]) for x in (q, k)]
    inside = apply_rope(*packed, torch.cat([torch.arange(shift), torch.arange(50)]), *tables)
    assert all(torch.equal(a[shift:], b) for a, b in zip(inside, alone))
    # Without a restart of the positions the results differ.
    unreset = apply_rope(*packed, torch.arange(shift + 50), *tables)
    assert not torch.allclose(unreset[0][shift:], alone[0], atol=1e-3)


def test_scores_depend_on_distance_only():
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    tables = rope_tables(100_001, 64, 10000.0)

    def score(q_position, k_position):
        turned_q, _ = apply_rope(q, k, torch.tensor([q_position]), *tables)
        _, turned_k = apply_rope(q, k, torch.tensor([k_position]), *tables)
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(99_990, 99_980), score(10, 0), rtol=1e-4, atol=1e-4)


def test_angles_are_exact_at_far_positions():
    cos, sin = rope_tables(200_000, 4, 10000.0)
    assert cos[199_999, 0].item() == pytest.approx(
        float(torch.tensor(199_999.0, dtype=torch.float64).cos()), abs=6e-8
    )
    assert sin[199_999, 1].item() == pytest.approx(
        float(torch.tensor(1999.99, dtype=torch.float64).sin()), abs=6e-8
    )


def test_a_position_outside_the_tables_is_loud_and_stays_in_its_row():
    q, k = torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    turned = apply_rope(q, k, torch.tensor([0, 8, -1]), *rope_tables(8, 4, 10000.0))[0]
    assert torch.equal(turned[0], q[0]) and turned[1:].isnan().all()


def test_bf16_is_rounded_once():
    q = torch.randn(64, 2, 32).bfloat16()
    tables = rope_tables(64, 32, 10000.0)
    got = apply_rope(q, q, torch.arange(64), *tables)[0]
    want = apply_rope(q.float(), q.float(), torch.arange(64), *tables)[0].bfloat16()
    assert torch.equal(got, want)


def test_wrong_arguments_are_refused():
    q = torch.randn(4, 2, 8)
    tables = rope_tables(8, 8, 10000.0)
    with pytest.raises(ValueError, match="rotary_dim"):
        rope_tables(8, 7, 10000.0)
    with pytest.raises(ValueError, match="position_ids"):
        apply_rope(q, q, torch.arange(5), *tables)
    with pytest.raises(ValueError, match="rotate 8 of 4 dimensions"):
        apply_rope(q[..., :4], q[..., :4], torch.arange(4), *tables)
    with pytest.raises(ValueError, match="fp32 tables"):
        apply_rope(q, q, torch.arange(4), tables[0].bfloat16(), tables[1])
    with pytest.raises(NoBackendError, match="CUDA"):
        apply_rope(q, q, torch.arange(4), *tables, backend="triton")


def test_bf16_gradients_are_rounded_once():
    """Check that the gradients of an element's two products are added before they are rounded."""
    cos, sin = rope_tables(64, 32, 10000.0, "cpu")
    values = normal(64, 3, 32).bfloat16()
    upstream = normal(64, 3, 32, seed=1).bfloat16()

    def gradient(dtype):
        x = values.to(dtype).requires_grad_()
        turned, _ = apply_rope(
            x, x[:, :1].detach(), torch.arange(64), cos, sin, backend="reference"
        )
        return torch.autograd.grad(turned, x, upstream.to(dtype))[0]

    assert torch.equal(gradient(torch.bfloat16), gradient(torch.float32).bfloat16())
