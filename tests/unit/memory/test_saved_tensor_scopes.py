"""Scopes whose saved tensors are offloaded together."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.recompute import checkpoint
from megatron_packed.memory.saved_tensor_scopes import SavedTensorScopes
from support.late_streams import ORDERS, LateStreams
from support.random_tensors import normal
from support.recomputed_outputs import without_output

T, D = 6, 4


class Part(nn.Module):
    """Module that saves its input, views of one product, a parameter, a buffer, and its output."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(D, 3 * D, generator=generator))
        self.register_buffer("table", torch.randn(T, D, generator=generator))

    def forward(self, x_TD):
        a, b, c = (x_TD @ self.weight).split(D, dim=1)
        return torch.tanh(a * b.t().exp().t() * c * self.table)


class Log:
    """Fake offloader that stores copies, and records sizes and the number of restores."""

    def __init__(self):
        self.put, self.taken = [], 0

    def __call__(self, tensors):
        copies = [tensor.clone() for tensor in tensors]
        self.put.append([tensor.numel() for tensor in tensors])
        log = self

        class Stored:
            def restore(self):
                log.taken += 1
                return copies

        return Stored()


def inputs(seed=0):
    return normal(T, D, seed=seed).requires_grad_()


def run(parts, x, scopes=None):
    for part in parts:
        if scopes is None:
            x = part(x)
        else:
            with scopes.scope(part):
                x = part(x)
    return x.square().sum()


def gradients(parts, x, **how):
    return torch.autograd.grad(run(parts, x, **how), [x, *(part.weight for part in parts)])


def test_gradients_are_those_without_and_every_storage_travels_once():
    parts, x = [Part(n) for n in range(3)], inputs()
    log = Log()
    found = gradients(parts, x, scopes=SavedTensorScopes(log, 1))
    assert all(map(torch.equal, found, gradients(parts, x)))
    # The largest storage is the product, saved by three views. The output of a part is the input of
    # the next part, so later parts save one storage fewer.
    assert [sorted(sizes)[-1] for sizes in log.put] == [T * 3 * D] * 3
    assert [len(sizes) for sizes in log.put] == [
        len(log.put[0]),
        len(log.put[0]) - 1,
        len(log.put[0]) - 1,
    ]
    assert log.taken == 3


@pytest.mark.parametrize("order", ORDERS[::3])
def test_with_late_copies(order):
    for buffers in (1, 3):
        offload = Offload(
            torch.device("cpu"),
            forced_buffers=buffers,
            min_elements=1,
            streams=LateStreams(order, prompt=True),
        )
        scopes, parts = SavedTensorScopes(offload.save, 1), [Part(n) for n in range(5)]
        for seed in range(3):
            found = gradients(parts, inputs(seed), scopes=scopes)
            assert all(map(torch.equal, found, gradients(parts, inputs(seed))))


def test_parameters_tables_and_small_tensors_stay():
    part, x, log, seen = Part(), inputs(), Log(), []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        loss = run([part], x, scopes=SavedTensorScopes(log, T * D + 1))
    assert log.put == [[T * 3 * D]] or log.put == []  # all views are smaller
    assert {part.weight.data_ptr(), part.table.data_ptr(), x.data_ptr()} <= {
        tensor.data_ptr() for tensor in seen
    }
    loss.backward()
    log = Log()
    run([part], x, scopes=SavedTensorScopes(log, 1))
    assert D * 3 * D not in log.put[0]


def test_memory_is_freed_after_the_scope_with_its_last_reader():
    made = []

    def part(x):
        y = x.exp()
        made.append(weakref.ref(y))
        return (y * y.sin()).sum(dim=1)

    class Owner(nn.Module):
        pass

    log = Log()
    with SavedTensorScopes(log, 1).scope(Owner()):
        loss = part(inputs())
    assert made[0]() is None
    loss.sum().backward()
    assert log.taken == 1


def test_a_retained_graph_and_a_dropped_graph():
    part, x, log = Part(), inputs(), Log()
    loss = run([part], x, scopes=SavedTensorScopes(log, 1))
    twice = [torch.autograd.grad(loss, [x], retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*twice) and log.taken == 1
    run([part], x, scopes=SavedTensorScopes(log, 1))
    assert log.taken == 1


def test_an_error_inside_puts_nothing_away():
    log = Log()
    with pytest.raises(KeyError), SavedTensorScopes(log, 1).scope(Part()):
        torch.tanh(inputs())
        raise KeyError
    assert log.put == []
    y = inputs().exp()
    assert y.grad_fn._saved_result is not None


def test_nothing_happens_without_gradients_or_in_what_is_computed_again():
    part, x, log = Part(), inputs(), Log()
    scopes = SavedTensorScopes(log, 1)
    with torch.no_grad():
        run([part], x, scopes=scopes)
    assert log.put == []
    expected = gradients([part], x)

    def again(x):
        return without_output(torch.sin, lambda y: run([part], y), x)

    def scoped(y):
        with scopes.scope(part):
            return torch.sin(y)

    def again_in_scope(x):
        return without_output(scoped, lambda y: run([part], y), x)

    assert torch.equal(
        *(torch.autograd.grad(function(x), x)[0] for function in (again, again_in_scope))
    )
    assert len(log.put) == 1  # saved in the first run
    log.put.clear()
    found = torch.autograd.grad(checkpoint(lambda x: run([part], x), x), [x, part.weight])
    assert all(map(torch.equal, found, expected)) and log.put == []


def test_hooks_around_see_what_stays():
    seen, part, x = [], Part(), inputs()
    with saved_tensors_hooks(
        lambda tensor: seen.append(tensor.data_ptr()) or (tensor * 2), lambda tensor: tensor / 2
    ):
        loss = run([part], x, scopes=SavedTensorScopes(Log(), T * D))
    assert part.weight.data_ptr() in seen and x.data_ptr() not in seen
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, torch.autograd.grad(run([part], x), x)[0])


def saved_in_two_scopes(first, then, between=lambda: None):
    """Return gradients of products with ``first`` and ``then``, computed in two separate scopes."""
    offload = Offload(torch.device("cpu"), forced_buffers=1, min_elements=1)
    scopes, found = SavedTensorScopes(offload.save, 1), []
    for factor in (first, then):
        x = torch.ones(factor.shape, requires_grad=True)
        with scopes.scope(Part()):
            found.append((x, x * factor))
        offload.join()
        between()
    return [torch.autograd.grad(y.sum(), x)[0] for x, y in found]


def test_a_storage_travels_again_where_more_of_it_or_other_values_are_saved():
    x = torch.randn(6, 4)
    for first, then in ((x[:2], x), (x[2:], x[:3]), (x, x.view(torch.float16))):
        found = saved_in_two_scopes(first, then)
        assert torch.equal(found[0], first) and torch.equal(
            found[1].nan_to_num(), then.float().nan_to_num()
        )
    before = x.clone()
    found = saved_in_two_scopes(x, x, between=lambda: x.add_(1))
    assert torch.equal(found[0], before) and torch.equal(found[1], before + 1)


def test_writing_within_the_scope_is_an_error_as_without():
    x, log = inputs(), Log()
    with SavedTensorScopes(log, 1).scope(Part()):
        y = x.exp()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_lazy_conjugates_and_sparse_tensors_stay():
    x = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    weight = torch.eye(3, dtype=torch.complex64).to_sparse()

    def part():
        return (torch.sparse.mm(weight, x.conj() * x) * x.conj().exp()).abs().sum()

    with SavedTensorScopes(Log(), 1).scope(Part()):
        found = part()
    assert torch.equal(*(torch.autograd.grad(loss, x)[0] for loss in (found, part())))


def test_a_backward_pass_inside_the_scope_reads_the_sources():
    scopes = SavedTensorScopes(Offload(torch.device("cpu"), min_elements=1).save, 1)
    x = torch.randn(8, 4, requires_grad=True)
    with scopes.scope(nn.Module()):
        y = x * 2
        (grad,) = torch.autograd.grad(y[3:].square().sum() + y.square().sum(), x)
    assert torch.equal(grad[:3], 8 * x[:3]) and torch.equal(grad[3:], 16 * x[3:])
