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


@pytest.mark.parametrize(
    ("loss_of", "of_a", "of_b"),
    [
        (
            lambda a, b: (
                Scale.apply(a, 2.0).sum() + Scale.apply(a, 10.0).sum() + Scale.apply(b, 3.0).sum()
            ),
            12.0,
            3.0,
        ),
        (lambda a, b: Scale.apply(a, 2.0).sum() + (b * 3).sum(), 2.0, 3.0),
        (lambda a, b: Scale.apply(a, 2.0).sum(), 2.0, 0.0),
    ],
    ids=["a slice used twice is summed", "a consumer without slots", "an unused slice has zero"],
)
def test_gradients_that_no_slot_collects(collected, loss_of, of_a, of_b):
    x = make()
    (dx,) = torch.autograd.grad(loss_of(*split_columns(x, (4,), (6,))), x)
    assert torch.equal(dx, torch.tensor([of_a] * 4 + [of_b] * 6).expand(5, 10))
    assert collected == [False]


def test_without_gradients_there_are_no_slots():
    a, _ = split_columns(make().detach(), (4,), (6,))
    assert gradient_slot(a) is None
    with torch.no_grad():
        assert gradient_slot(split_columns(make(), (4,), (6,))[0]) is None


def test_slices_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="have 9 columns, but the tensor has 10"):
        split_columns(make(), (4,), (5,))
