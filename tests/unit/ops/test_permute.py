"""Permutation of tokens by expert against Python lists, the inverse, and the gradients of both."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.permute.api import permute, unpermute
from megatron_packed.ops.permute.gathers import copy_rows, sum_rows
from support.op_packs import run_without_values

T, K, E, D = 11, 2, 4, 3

ROUTINGS = {
    "mixed": [
        [1, 0],
        [1, 2],
        [3, 1],
        [0, 3],
        [2, 1],
        [1, 3],
        [0, 1],
        [3, 2],
        [1, 0],
        [2, 3],
        [0, 2],
    ],
    "one expert gets all first choices": [[2, 0]] * 11,
    "two experts stay empty": [[1, 3], [3, 1]] * 5 + [[1, 3]],
}


def make(routing, tail=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=generator, dtype=dtype)
    weights = torch.rand(T, K, generator=generator, dtype=dtype)
    return x, torch.tensor(ROUTINGS[routing]), weights, torch.arange(T) < T - tail


def by_lists(ids, valid):
    """Return (token, k) of each row with a route, sorted by expert and then by token."""
    routes = [(t, k) for t in range(T) for k in range(K)]
    return [(t, k) for e in range(E) for t, k in routes if valid[t] and ids[t, k] == e]


@pytest.mark.parametrize(
    "size", [T * K, 5, T * K + 3], ids=["a row for each route", "fewer", "more"]
)
@pytest.mark.parametrize(
    "first", [0, 1, -1], ids=["all experts", "the first is elsewhere", "the last is elsewhere"]
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tail", [0, 2, T])
def test_rows_are_in_expert_order(routing, tail, first, size):
    x, ids, _, valid = make(routing, tail)
    ids = ids - first
    permuted = permute(x, ids, E, valid, rows=size, backend="reference")
    rows = by_lists(ids, valid)
    counts = [sum(int(ids[t, k]) == e for t, k in rows) for e in range(E)]
    assert permuted.tokens_per_expert_E.tolist() == counts
    rows, spare = rows[:size], max(size - len(rows), 0)
    assert permuted.offsets_E.tolist() == [min(sum(counts[: e + 1]), size) for e in range(E)]
    assert permuted.token_R.tolist() == [t for t, _ in rows] + spare * [-1]
    assert permuted.route_R.tolist() == [t * K + k for t, k in rows] + spare * [-1]
    assert [permuted.row_TK[t, k].item() for t, k in rows] == list(range(len(rows)))
    assert (permuted.row_TK < 0).sum() == T * K - len(rows)
    assert torch.equal(permuted.x_RD[: len(rows)], x[[t for t, _ in rows]])
    assert permuted.x_RD.shape == (size, D) and not permuted.x_RD[len(rows) :].any()
    for tensor in (
        permuted.tokens_per_expert_E,
        permuted.offsets_E,
        permuted.token_R,
        permuted.row_TK,
    ):
        assert tensor.dtype == torch.int32


@pytest.mark.parametrize("size", [1, 3, 11])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_same_number_of_rows_for_every_expert(routing, size):
    x, ids, weights, valid = make(routing)
    permuted = permute(x, ids, E, valid, rows_per_expert=size, backend="reference")
    by_expert = [[(t, k) for t, k in by_lists(ids, valid) if ids[t, k] == e] for e in range(E)]
    assert permuted.tokens_per_expert_E.tolist() == [len(routes) for routes in by_expert]
    assert permuted.offsets_E.tolist() == [size * (e + 1) for e in range(E)]
    rows = [
        route for routes in by_expert for route in routes[:size] + [None] * (size - len(routes))
    ]
    assert permuted.route_R.tolist() == [
        -1 if route is None else route[0] * K + route[1] for route in rows
    ]
    assert permuted.token_R.tolist() == [-1 if route is None else route[0] for route in rows]
    for row, route in enumerate(rows):
        assert torch.equal(permuted.x_RD[row], x[route[0]] if route else torch.zeros(D))
        assert route is None or permuted.row_TK[route] == row
    assert (permuted.row_TK >= 0).sum() == sum(route is not None for route in rows)
    y = unpermute(permuted.x_RD, permuted, weights, backend="reference")
    kept = torch.tensor([[(t, k) in rows for k in range(K)] for t in range(T)])
    torch.testing.assert_close(y, x * (weights * kept).sum(1, keepdim=True))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_unpermute_is_the_weighted_sum(routing):
    x, ids, weights, valid = make(routing)
    permuted = permute(x, ids, E, valid, backend="reference")
    per_row = torch.randn(T * K, D, dtype=torch.float64)
    per_row[permuted.offsets_E[-1] :] = torch.nan  # `unpermute` must not read these rows.
    y = unpermute(per_row, permuted, weights, backend="reference")
    want = torch.zeros(T, D, dtype=torch.float64)
    for row, (t, k) in enumerate(by_lists(ids, valid)):
        if valid[t]:
            want[t] += weights[t, k] * per_row[row]
    torch.testing.assert_close(y, want)
    assert not y[~valid].any()


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradients(routing, rows):
    x, ids, weights, valid = make(routing)

    def there_and_back(x, weights):
        permuted = permute(x, ids, E, valid, rows=rows, backend="reference")
        return unpermute(permuted.x_RD.sin(), permuted, weights, backend="reference")

    assert torch.autograd.gradcheck(there_and_back, (x.requires_grad_(), weights.requires_grad_()))
    gradients = torch.autograd.grad(there_and_back(x, weights).sum(), (x, weights))
    assert not any(gradient[~valid].any() for gradient in gradients)


def test_one_route_per_token_back_without_weights():
    """Check a permutation and its inverse, forward and backward."""
    x, ids, _, valid = make("mixed")
    x.requires_grad_()
    permuted = permute(x, ids[:, :1], E, valid, backend="reference")
    back = unpermute(permuted.x_RD, permuted, backend="reference")
    assert torch.equal(back, x * valid[:, None])
    dy = torch.randn(T, D, dtype=torch.float64)
    assert torch.equal(torch.autograd.grad(back, x, dy)[0], dy * valid[:, None])
    with pytest.raises(ValueError, match=r"weights \[11, 1\]; with 22 rows, T = 11 and K = 2"):
        unpermute(permute(x, ids, E, valid).x_RD, permute(x, ids, E, valid))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_sum_without_weights_is_that_with_weights_of_one(routing):
    x, ids, weights, valid = make(routing)
    permuted = permute(x, ids, E, valid, backend="reference")
    rows = permuted.x_RD.sin().requires_grad_()
    dy = torch.randn(T, D, dtype=torch.float64)
    found, wanted = (
        (y, *torch.autograd.grad(y, rows, dy))
        for y in (
            sum_rows(rows, permuted, backend="reference"),
            unpermute(rows, permuted, torch.ones_like(weights), backend="reference"),
        )
    )
    assert all(map(torch.equal, found, wanted)) and found[0].any()


def test_copied_rows():
    x, *_ = make("mixed")
    token_R = torch.tensor([3, -1, 0, 10])
    row_T = torch.full((T,), -1).scatter_(0, token_R[[0, 2, 3]], torch.tensor([0, 2, 3]))
    y = copy_rows(x.requires_grad_(), token_R, row_T, backend="reference")
    wanted = torch.stack([x[3], torch.zeros(D), x[0], x[10]])
    assert torch.equal(y, wanted)
    dy = torch.randn(4, D, dtype=torch.float64)
    assert torch.equal(*(torch.autograd.grad(each, x, dy)[0] for each in (y, wanted)))


def test_low_precision_sums_in_fp32():
    """Check that sums are fp32: 256 + 1 + 1 is 258 in fp32, but 256 in bf16."""
    ids, valid = torch.tensor([[0, 1, 2]]), torch.tensor([True])
    permuted = permute(torch.zeros(1, 1).bfloat16(), ids, 3, valid, backend="reference")
    y = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert unpermute(y, permuted, torch.ones(1, 3), backend="reference").item() == 258.0


def test_no_host_sync_and_static_shapes():
    x, ids, weights, valid = make("mixed")

    def there_and_back(x, weights, ids, valid):
        permuted = permute(x, ids, E, valid, backend="reference")
        return unpermute(permuted.x_RD * 2, permuted, weights, backend="reference")

    run_without_values(there_and_back, x, weights, ids, valid)


def test_what_cannot_be_is_refused_with_its_numbers():
    x, ids, weights, valid = make("mixed")
    with pytest.raises(ValueError, match=r"topk_ids \[10, 2\]"):
        permute(x, ids[1:], E, valid)
    with pytest.raises(ValueError, match=r"valid has shape \[10\]"):
        permute(x, ids, E, valid[1:])
    permuted = permute(x, ids, E, valid)
    with pytest.raises(ValueError, match=r"must be \(22, D\) and \(11, 2\)"):
        partial(unpermute, permuted.x_RD[:-1], permuted)(weights)
