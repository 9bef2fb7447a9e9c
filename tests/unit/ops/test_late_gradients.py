"""Gradients of experts' weights that are computed late, with a stand-in for quack (`quack_stand_in`)."""

from importlib import import_module

import pytest
import torch

from megatron_packed.ops.grouped_mlp.grouped_linear import first_linear, second_linear
from megatron_packed.ops.grouped_mlp.late_gradients import late_weight
from support.quack_stand_in import accept, clear_by_torch, quack_stand_in
from support.random_tensors import normal

PACKAGE = "megatron_packed.ops.grouped_mlp."
E, R, D, F, PARTS = 3, 40, 16, 24, 2
OFFSETS = [torch.tensor(ends, dtype=torch.int32) for ends in ([10, 10, 33], [0, 5, 40])]


@pytest.fixture
def products(monkeypatch):
    """Products of quack's stand-in, with zeros written by plain torch."""
    with quack_stand_in(monkeypatch):
        joined, quack = (import_module(PACKAGE + name) for name in ("quack_joined", "quack"))
        clear_by_torch(monkeypatch, joined)
        for module in (joined, quack):
            accept(monkeypatch, module)
        yield quack.PRODUCTS


class _Arrived(torch.autograd.Function):
    """Identity that notes its backward, as rows of a part that were received."""

    @staticmethod
    def forward(ctx, x, part, events):
        ctx.part, ctx.events = part, events
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.events.append(f"rows {ctx.part}")
        return dx, None, None


def steps_apart(products):
    return lambda x, w1, w2, offsets: second_linear(
        products, first_linear(products, x, w1, offsets).relu().square(), w2, offsets
    )


def joined(products):
    return import_module(PACKAGE + "quack_joined").run


def noting(products, events):
    """Return products that note which gradient of a weight they compute."""

    def noted(function):
        def run(*tensors):
            events.append("W2" if tensors[-3].shape[-1] == D else "W1")
            return function(*tensors)

        return run

    return products._replace(
        weight_gradient=noted(products.weight_gradient),
        add_weight_gradient=noted(products.add_weight_gradient),
    )


def run(mlp, late, accumulate, events):
    """Return y of both parts, the gradients of their rows, and those of the weights."""
    x, dy = normal(2, PARTS, R, D).bfloat16()
    weights = [normal(E, *shape).bfloat16().requires_grad_() for shape in ((F, D), (D, F))]
    if accumulate:
        for weight in weights:
            weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    x.requires_grad_()
    results = []
    for part in range(PARTS):
        used = [late_weight(weight) for weight in weights] if late else weights
        results.append(mlp(_Arrived.apply(x[part], part, events), *used, OFFSETS[part]))
    y = torch.stack(results)
    y.backward(dy)
    gradients = (w.main_grad if accumulate else w.grad for w in weights)
    return y.detach(), x.grad, *gradients


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("steps", [steps_apart, joined])
def test_a_late_gradient_is_the_gradient(products, steps, accumulate):
    wanted = run(steps(products), False, accumulate, [])
    assert all(gradient.abs().max() > 1 for gradient in wanted)
    assert all(map(torch.equal, run(steps(products), True, accumulate, []), wanted))


def test_the_gradient_of_rows_goes_first(products, monkeypatch):
    for steps in (steps_apart, joined):
        events = []
        noted = noting(products, events)
        monkeypatch.setattr(import_module(PACKAGE + "quack_joined"), "PRODUCTS", noted)
        run(steps(noted), False, True, events)
        assert events == ["W2", "W1", "rows 1", "W2", "W1", "rows 0"]
        events.clear()
        run(steps(noted), True, True, events)
        assert events == ["rows 1", "W2", "W1", "rows 0", "W2", "W1"]


def test_a_frozen_weight_and_a_forward_pass_alone_have_no_late_gradient():
    weight = torch.ones(2, 3, 4)
    assert late_weight(weight) is weight
    weight.requires_grad_()
    with torch.no_grad():
        assert late_weight(weight) is weight
    assert late_weight(weight) is not weight
