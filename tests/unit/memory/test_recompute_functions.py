"""Recomputed functions: the same gradients bit for bit, and only the inputs are saved."""

import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from megatron_packed.memory.recompute import RecomputeError, checkpoint
from megatron_packed.memory.recompute_outputs import recomputed_output
from support.random_tensors import normal
from support.recomputed_outputs import without_output

T, D = 6, 4


class IntoMainGrad(torch.autograd.Function):
    """Matrix product that adds the gradient of its weight to ``main_grad``, as layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x, weight = ctx.saved_tensors  # a second unpack returns the same tensors
        ctx.main_grad.add_(x.t() @ grad)
        return grad @ weight.t(), None


class Block(nn.Module):
    """Module with a gain, two products that add to ``main_grad``, dropout, and a scalar result."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.gain = nn.Parameter(torch.randn(D, generator=generator))
        self.inner = nn.Parameter(torch.randn(D, 3 * D, generator=generator))
        self.outer = nn.Parameter(torch.randn(3 * D, D, generator=generator))
        self.calls, self.ends, self.made, self.dropout = 0, 0, [], 0.0
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter)

    def forward(self, x, add):
        self.calls += 1
        hidden = IntoMainGrad.apply(x * self.gain, self.inner)
        self.made.append(weakref.ref(hidden))
        hidden = F.dropout(torch.tanh(hidden), self.dropout)
        aux = hidden.square().mean()
        y = IntoMainGrad.apply(hidden, self.outer)
        self.ends += 1
        return {"y": x + y + add, "aux": (aux,)}

    def gradients(self):
        return [self.gain.grad, self.inner.main_grad, self.outer.main_grad]


def inputs(seed=0):
    return normal(T, D, seed=seed + 100).requires_grad_()


def run(block, x, how=lambda function, *args: function(*args), add=1.0):
    result = how(block, x, add)
    return result["y"].square().sum() + 3 * result["aux"][0]


def assert_same(block, x, expected_block, expected_x):
    assert torch.equal(x.grad, expected_x.grad)
    for found, expected in zip(block.gradients(), expected_block.gradients()):
        assert expected.abs().sum() > 0 and torch.equal(found, expected)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_those_without_it_and_arrive_once(micro_batches):
    plain, again, x, same_x = Block(), Block(), inputs(), inputs()
    for _ in range(micro_batches):
        loss, expected = run(again, same_x, checkpoint), run(plain, x)
        assert torch.equal(loss, expected)
        loss.backward(), expected.backward()
    assert_same(again, same_x, plain, x)
    assert (plain.calls, again.calls) == (micro_batches, 2 * micro_batches)


def test_nothing_is_kept_but_the_input_and_the_second_run_ends_where_nothing_more_is_wanted():
    block, x, kept = Block(), inputs(), []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = checkpoint(block, x, 1.0)
    assert len(kept) == 1 and kept[0].data_ptr() == x.data_ptr()
    assert block.made[0]() is None  # freed when the call has ended
    result["y"].sum().backward()
    assert (
        block.calls == 2 and block.ends == 1
    )  # the second run stops when the second product has saved the last tensor
    assert all(reference() is None for reference in block.made)


def test_memory_of_a_second_run_goes_as_the_backward_pass_goes():
    """A recomputed tensor is freed with its autograd node, not at the end of the backward pass."""
    seen, sizes = [], []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            sizes.append(sum(reference() is not None for reference in seen))
            return grad

    def function(x):
        for _ in range(3):
            x = Note.apply(torch.tanh(x))
            y = x.exp()
            seen.append(weakref.ref(y.untyped_storage()))
            x = y * 0.5 + y
        return x

    checkpoint(function, inputs()).sum().backward()
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_random_numbers_are_drawn_again_without_changing_later_ones():
    losses, grads, states = [], [], []
    for how in (lambda f, *args: f(*args), lambda f, *args: checkpoint(f, *args, rewind=True)):
        block, x = Block(), inputs()
        block.dropout = 0.5
        torch.manual_seed(5)
        loss = run(block, x, how)
        torch.rand(3)  # other code draws random numbers between the passes
        loss.backward()
        losses.append(loss), grads.append(x.grad), states.append(torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in (losses, grads, states))
    block, x = Block(), inputs()
    block.dropout = 0.5
    torch.manual_seed(5)
    run(block, x, checkpoint).backward()
    assert not torch.equal(
        x.grad, grads[0]
    )  # without rewind, the second run draws different numbers


def test_two_micro_batches_in_flight_and_two_models_in_turns():
    plain, again = [Block(1), Block(2)], [Block(1), Block(2)]
    xs, same = [inputs(n) for n in range(4)], [inputs(n) for n in range(4)]
    for blocks, given, how in ((plain, xs, lambda f, *a: f(*a)), (again, same, checkpoint)):
        losses = [run(blocks[n % 2], x, how, add=float(n)) for n, x in enumerate(given)]
        for n in (1, 0, 2, 3):
            losses[n].backward()
    for x, other in zip(xs, same):
        assert torch.equal(x.grad, other.grad)
    assert all(
        torch.equal(a, b)
        for p, q in zip(plain, again)
        for a, b in zip(p.gradients(), q.gradients())
    )


def test_one_in_another_and_torchs_own_inside():
    """Checkpoints may be nested, also around torch's own checkpoint (as in reference attention)."""

    def function(x, how, inner):
        for _ in range(2):
            x = how(
                lambda x: torch.tanh(inner(lambda x: torch.sigmoid(x) * x.exp(), x)).square(), x
            )
        return x

    def by_torch(function, x):
        return torchs_checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)

    def plainly(function, *args):
        return function(*args)

    x = inputs()
    (expected,) = torch.autograd.grad(function(x, plainly, plainly).sum(), x)
    for inner in (checkpoint, by_torch):
        for outer in (
            lambda x, inner=inner: function(x, checkpoint, inner),
            lambda x, inner=inner: checkpoint(function, x, checkpoint, inner),
        ):
            (found,) = torch.autograd.grad(outer(x).sum(), x)
            assert torch.equal(found, expected)


def test_gradients_of_named_inputs_and_a_retained_graph():
    """Recomputation works with ``torch.autograd.grad`` and ``retain_graph``, as captures use it."""
    plain, again, x = Block(), Block(), inputs()
    expected = torch.autograd.grad(run(plain, x), [x, plain.gain])
    loss = run(again, x, checkpoint)
    for _ in range(2):
        found = torch.autograd.grad(loss, [x, again.gain], retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert again.gain.grad is None and torch.equal(again.inner.main_grad, 2 * plain.inner.main_grad)
    assert again.calls == 2


def test_without_gradients_it_is_a_call_and_an_error_leaves_no_hooks():
    block, x = Block(), inputs()
    with torch.no_grad():
        checkpoint(block, x, 1.0, save=None)
    assert block.calls == 1

    def fails(x):
        torch.tanh(x)
        raise ValueError("in the middle")

    for scope in (lambda: checkpoint(fails, x), lambda: without_output(torch.exp, fails, x)):
        with pytest.raises(ValueError, match="in the middle"):
            scope()
    y = x.exp()
    assert y.grad_fn._saved_result is not None and block.calls == 1
    run(block, x, checkpoint).backward()
    assert block.calls == 3


def test_a_function_that_does_something_else_the_second_time_is_named():
    switch = {"on": True}

    def function(x):
        x = torch.tanh(x)
        return (x.exp() if switch["on"] else x) * x

    y = checkpoint(function, inputs())
    switch["on"] = False
    with pytest.raises(
        RecomputeError, match="saves 4 tensors in its first run and 3 when it runs again"
    ):
        y.sum().backward()

    def grows(x):
        return torch.tanh(x.repeat(2, 1) if switch["on"] else x).exp()

    y = checkpoint(grows, inputs())
    switch["on"] = True
    with pytest.raises(
        RecomputeError,
        match=r"is \(6, 4\) torch.float32 in its first run and \(12, 4\) torch.float32",
    ):
        y.sum().backward()


def test_inputs_ask_for_gradients_in_the_second_run_as_in_the_first():
    """Inputs of the second run have the same ``requires_grad`` as those of the first run.

    Otherwise the second run would save other tensors with the same shapes.
    """
    x, mask = torch.randn(2, T, D).unbind()
    x.requires_grad_()
    checkpoint(torch.mul, x, mask).sum().backward()
    assert torch.equal(x.grad, mask)
    x.grad = None
    checkpoint(torch.mul, mask, x).sum().backward()
    assert torch.equal(x.grad, mask) and mask.grad is None


def test_an_input_that_is_written_to_is_an_error_and_no_wrong_gradient():
    x = inputs().detach()
    y = checkpoint(lambda x, w: torch.tanh(x @ w), x, torch.ones(D, D, requires_grad=True))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Elsewhere:
    """Fake offloader that stores copies and logs each save and restore."""

    log: ClassVar = []

    def __init__(self, tensors):
        self.copies, self.number = [tensor.clone() for tensor in tensors], len(self.log)
        assert not any(tensor.requires_grad for tensor in tensors)
        self.log.append(f"put {self.number}")

    def restore(self):
        self.log.append(f"take {self.number}")
        copies, self.copies = self.copies, None
        return copies


def test_inputs_may_be_stored_elsewhere_and_are_loaded_once_in_reverse_order():
    Elsewhere.log = []
    plain, again, x, same_x = (
        [Block(n) for n in range(3)],
        [Block(n) for n in range(3)],
        inputs(),
        inputs(),
    )
    for blocks, given, how in (
        (plain, x, lambda f, *args: f(*args)),
        (again, same_x, lambda f, *args: checkpoint(f, *args, save=Elsewhere)),
    ):
        hidden, reference = given, None
        for block in blocks:
            hidden = how(block, hidden, 0.0)["y"]
            reference = reference or weakref.ref(hidden)
        if blocks is again:
            assert reference() is None  # no reference on the device keeps it alive
        hidden.square().sum().backward()
    assert torch.equal(x.grad, same_x.grad)
    assert Elsewhere.log == ["put 0", "put 1", "put 2", "take 2", "take 1", "take 0"]


def test_hooks_around_see_what_is_kept():
    """Inputs that autograd saves pass through outer hooks, so that an outer scope can offload them."""
    x, kept = inputs(), []
    with saved_tensors_hooks(lambda t: kept.append(t) or (t * 2), lambda t: t / 2):
        y = checkpoint(lambda x: torch.tanh(x).exp(), x)
    y.sum().backward()
    assert len(kept) == 1
    expected = inputs()
    torch.tanh(expected).exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize(
    "view", [lambda y: y, lambda y: y[2:], lambda y: y.view(D, T), lambda y: y.t()]
)
def test_an_output_that_is_recomputed(view):
    calls = []

    def norm(x):
        calls.append(1)
        return x / x.norm(dim=1, keepdim=True)

    def use(y):
        return (view(y) * view(y).exp()).sum()

    x, same_x = inputs(), inputs()
    expected, found = use(norm(x)), without_output(norm, use, same_x)
    assert torch.equal(found, expected)
    expected.backward(), found.backward()
    assert torch.equal(x.grad, same_x.grad) and len(calls) == 3


def test_what_is_saved_of_an_output_is_not_kept_and_all_else_is_as_it_was():
    weight, x, kept, made = torch.ones(D, D, requires_grad=True), inputs(), [], []

    def first(x):
        y = x.exp().sin()
        made.append(weakref.ref(y.untyped_storage()))
        return y

    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        z = without_output(first, lambda y: y @ weight, x)
        assert made[0]() is None
    storages = {t.data_ptr() for t in kept}
    assert weight.data_ptr() in storages and x.data_ptr() in storages
    z.sum().backward()
    assert all(reference() is None for reference in made) and weight.grad is not None


def test_a_checkpoint_of_what_is_recomputed_keeps_neither():
    """A checkpoint with a recomputed output as input saves only the input of the first function.

    An example is a recomputed mixer after a norm with a recomputed output.
    """
    kept, x, same_x = [], inputs(), inputs()

    def mixer(y):
        return torch.tanh(y).exp()

    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = x.sin()
        with recomputed_output(y, torch.sin, x):
            z = checkpoint(mixer, y)
        del y
    assert {t.data_ptr() for t in kept} == {x.data_ptr()}
    z.sum().backward()
    mixer(same_x.sin()).sum().backward()
    assert torch.equal(x.grad, same_x.grad)
