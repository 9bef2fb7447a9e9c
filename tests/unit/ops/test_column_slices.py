"""Gradients of column slices: correct in all cases, and written into one buffer if possible."""

import pytest
import torch

from megatron_packed.ops.column_slices import (
    GradientBuffer,
    gradient_like,
    gradient_slot,
    split_columns,
)


class Scale(torch.autograd.Function):
    """Op that writes its input's gradient to the memory that ``gradient_like`` returns."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.slot, ctx.factor, ctx.like = gradient_slot(x), factor, x.detach()
        return x * factor

    @staticmethod
    def backward(ctx, dy):
        return gradient_like(ctx.like, ctx.slot).copy_(dy * ctx.factor), None


@pytest.fixture
def collected(monkeypatch):
    """Provide a list with True for each collection that used the buffer, False if it concatenated."""
    seen, true = [], GradientBuffer.collect

    def collect(self, gradients):
        whole = self._whole
        result = true(self, gradients)
        seen.append(result is whole)
        return result

    monkeypatch.setattr(GradientBuffer, "collect", collect)
    return seen


def make():
    return torch.randn(5, 10, requires_grad=True)


def test_views_and_one_buffer(collected):
    x = make()
    a, b, c = split_columns(x, (2, 3), (1,), (3,))
    assert a.shape == (5, 2, 3) and b.shape == (5, 1) and c.shape == (5, 3)
    assert a.data_ptr() == x.data_ptr() and torch.equal(torch.cat([a.flatten(1), b, c], 1), x)
    loss = Scale.apply(a, 2.0).sum() + Scale.apply(b, 3.0).sum() + Scale.apply(c, 5.0).sum()
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    want = torch.tensor([2.0] * 6 + [3.0] + [5.0] * 3).expand(5, 10)
    assert torch.equal(dx, want)
    (again,) = torch.autograd.grad(loss, x)  # A second backward pass allocates a new buffer.
    assert (
        torch.equal(again, want) and again.data_ptr() != dx.data_ptr() and collected == [True, True]
    )


def test_a_slice_used_twice_is_summed(collected):
    x = make()
    a, b = split_columns(x, (4,), (6,))
    loss = Scale.apply(a, 2.0).sum() + Scale.apply(a, 10.0).sum() + Scale.apply(b, 3.0).sum()
    (dx,) = torch.autograd.grad(loss, x)
    assert torch.equal(dx, torch.tensor([12.0] * 4 + [3.0] * 6).expand(5, 10)) and collected == [
        False
    ]


def test_a_consumer_that_knows_nothing_of_slots(collected):
    x = make()
    a, b = split_columns(x, (4,), (6,))
    (dx,) = torch.autograd.grad(Scale.apply(a, 2.0).sum() + (b * 3).sum(), x)
    assert torch.equal(dx, torch.tensor([2.0] * 4 + [3.0] * 6).expand(5, 10)) and collected == [
        False
    ]


def test_an_unused_slice_has_gradient_zero(collected):
    x = make()
    a, _ = split_columns(x, (4,), (6,))
    (dx,) = torch.autograd.grad(Scale.apply(a, 2.0).sum(), x)
    assert torch.equal(dx, torch.tensor([2.0] * 4 + [0.0] * 6).expand(5, 10)) and collected == [
        False
    ]


def test_without_gradients_there_are_no_slots():
    a, _ = split_columns(make().detach(), (4,), (6,))
    assert gradient_slot(a) is None
    with torch.no_grad():
        assert gradient_slot(split_columns(make(), (4,), (6,))[0]) is None


def test_slices_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="have 9 columns, but the tensor has 10"):
        split_columns(make(), (4,), (5,))
