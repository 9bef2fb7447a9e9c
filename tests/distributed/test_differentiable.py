"""Tests of differentiable collectives: results, exact adjoints, and small models in every split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.distributed.all_to_all import (
    EqualExchange,
    Overlaps,
    compute_by_heads,
    heads_to_rows,
    rows_in_motion,
    rows_to_columns,
)
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.differentiable import (
    copy_to,
    gather_last,
    gather_rows,
    join_rows,
    pass_on,
    reduce_from,
    scatter_rows,
    split_rows,
)
from megatron_packed.distributed.groups import ParallelGroups
from support.process_pools import WorkerPools, run_distributed

SHARED, OWN = "shared", "own"


def exchange_over(group: dist.ProcessGroup | None) -> EqualExchange | None:
    return None if group is None else EqualExchange(group)


def fused_to_columns(x_TW: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Convert a fused ``(T/c, 12 + 4 + 8)`` tensor to the head-parallel layout.

    It contains four heads of width 3, four heads of width 1, and two heads of width 4. The last two
    are copied if there are more ranks.
    """
    x, dt, b = x_TW.split([12, 4, 8], dim=1)
    return rows_to_columns(
        [x.unflatten(1, (4, 3)), dt, b.unflatten(1, (2, 4))], exchange_over(group)
    )


def fused_to_rows(x_TW: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Convert a fused ``(T, 6 + 2)`` tensor, two heads of 3 and two of 1 per rank, back to rows."""
    y, z = x_TW.split([6, 2], dim=1)
    moved = heads_to_rows([y.unflatten(1, (2, 3)), z], exchange_over(group))
    return torch.cat([y.flatten(1) for y in moved], dim=1)


def counts(source: int, destination: int) -> int:
    return (3 * source + 2 * destination) % 4  # The result is 0 for some pairs of ranks.


def by_counts(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [counts(rank, other) for other in range(size)]
    received = [counts(other, rank) for other in range(size)]
    overlaps = x.dtype == torch.float32
    return (
        rows_in_motion(sent, received, group, overlaps=Overlaps(overlaps, overlaps))
        .send(x[: sum(sent)])
        .receive()
    )


@dataclass(frozen=True)
class Case:
    function: Callable[[Tensor, Any], Tensor]
    domain: str
    image: str
    shape: tuple[int, ...] = (16, 3, 8)


CASES = {
    "copy_to": Case(copy_to, SHARED, OWN),
    "reduce_from": Case(reduce_from, OWN, SHARED),
    "gather_rows": Case(gather_rows, OWN, OWN),
    "scatter_rows": Case(scatter_rows, OWN, OWN),
    "split_rows": Case(split_rows, SHARED, OWN),
    "join_rows": Case(join_rows, OWN, SHARED),
    "gather_last": Case(gather_last, OWN, SHARED),
    "pass_on": Case(pass_on, OWN, OWN),
    "rows_to_columns": Case(fused_to_columns, OWN, OWN, (5, 24)),
    "heads_to_rows": Case(fused_to_rows, OWN, OWN, (16, 8)),
    "rows_in_motion": Case(by_counts, OWN, OWN, (12, 3)),
}


def draw(shape: tuple[int, ...], state: str, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + (rank if state == OWN else 99))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inner(a: Tensor, b: Tensor, state: str, group: dist.ProcessGroup) -> float:
    """Return the inner product of distributed tensors.

    A replicated tensor counts once; the products of parts are summed over the ranks.
    """
    product = (a * b).sum()
    return float(all_reduce_sum(product, group) if state == OWN else product)


def adjointness(groups: ParallelGroups) -> dict[str, tuple[float, float, bool, bool]]:
    group, rank = groups.tp.group, groups.tp.rank
    assert group is not None
    found = {}
    for name, case in CASES.items():
        x = draw(case.shape, case.domain, rank, 1).to(groups.device).requires_grad_()
        before = x.detach().clone()
        y = case.function(x, group)
        v = draw(tuple(y.shape), case.image, rank, 2).to(groups.device)
        v_before = v.clone()
        (u,) = torch.autograd.grad(y, x, v)
        found[name] = (
            inner(y.detach(), v, case.image, group),
            inner(x.detach(), u, case.domain, group),
            torch.equal(x, before) and torch.equal(v, v_before),
            case.domain == OWN or _equal_everywhere(u, group),
        )
    return found


def _equal_everywhere(x: Tensor, group: dist.ProcessGroup) -> bool:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return all(torch.equal(part, x) for part in parts)


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 2), (4, 4), (4, 2)])
def test_backward_is_the_adjoint(pools: WorkerPools, world_size: int, tp_size: int) -> None:
    check_adjointness(pools.run(adjointness, world_size, layout={"tp_size": tp_size}))


@pytest.mark.multi_gpu
def test_backward_is_the_adjoint_on_gpus() -> None:
    check_adjointness(
        run_distributed(adjointness, 2, backend="nccl", layout={"tp_size": 2}, timeout=120)
    )


def check_adjointness(ranks: list[dict[str, tuple[float, float, bool, bool]]]) -> None:
    for found in ranks:
        assert set(found) == set(CASES)
        for name, (forward, backward, untouched, shared) in found.items():
            assert abs(forward) > 0.1 and abs(forward - backward) <= 1e-12 * abs(forward), name
            assert untouched and shared, name


def outputs(groups: ParallelGroups, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Return inputs and outputs; inputs are small integers, so sums are exact in every dtype."""
    found = {}
    for name, case in CASES.items():
        x = (4 * draw(case.shape, case.domain, groups.tp.rank, 3)).round().to(dtype)
        found[name] = (x, case.function(x, groups.tp.group))
    return found


def meaning(name: str, x: list[Tensor], rank: int) -> Tensor:
    """Return the expected result on rank ``rank`` for the inputs ``x`` of all ranks."""
    size = len(x)
    if name == "copy_to":
        return x[rank]
    if name == "reduce_from":
        return torch.stack(x).sum(0)
    if name in ("gather_rows", "join_rows"):
        return torch.cat(x)
    if name == "scatter_rows":
        return torch.stack(x).sum(0).chunk(size)[rank]
    if name == "split_rows":
        return x[rank].chunk(size)[rank]
    if name == "gather_last":
        return torch.cat(x, dim=-1)
    if name == "pass_on":
        return x[rank - 1]
    if name == "rows_to_columns":
        heads, dt, b = torch.cat(x).split([12, 4, 8], dim=1)
        group = rank * 2 // size
        b = b.chunk(2, dim=1)[rank] if size == 2 else b[:, 4 * group : 4 * group + 4]
        return torch.cat([heads.chunk(size, dim=1)[rank], dt.chunk(size, dim=1)[rank], b], dim=1)
    if name == "heads_to_rows":
        rows = [part.chunk(size)[rank].split([6, 2], dim=1) for part in x]
        return torch.cat([*(y for y, _ in rows), *(z for _, z in rows)], dim=1)
    assert name == "rows_in_motion"
    starts = [sum(counts(source, other) for other in range(rank)) for source in range(size)]
    return torch.cat(
        [
            part[start : start + counts(source, rank)]
            for source, (part, start) in enumerate(zip(x, starts))
        ]
    )


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_is_what_one_process_would_compute(
    pools: WorkerPools, dtype: torch.dtype, world_size: int, tp_size: int
) -> None:
    ranks = pools.run(outputs, world_size, dtype, layout={"tp_size": tp_size})
    for first in range(0, world_size, tp_size):
        members = ranks[first : first + tp_size]
        for name in CASES:
            x = [found[name][0] for found in members]
            for rank, found in enumerate(members):
                assert found[name][1].dtype == dtype
                torch.testing.assert_close(
                    found[name][1], meaning(name, x, rank), rtol=0, atol=0, msg=f"{name} {rank}"
                )


@pytest.mark.parametrize("name", CASES)
def test_one_rank_gets_its_own_tensor_back(name: str) -> None:
    x = draw((8, 24), OWN, 0, 1)
    case = CASES[name]
    result = case.function(x[:, :8] if name == "heads_to_rows" else x, None)
    assert torch.equal(result, x[:, :8] if name == "heads_to_rows" else x)
    if name not in ("rows_to_columns", "heads_to_rows"):
        assert result is x


# This layer knows only its groups, so the same code runs on one process and on any number.


def mlp(x: Tensor, w1: Tensor, w2: Tensor, groups: ParallelGroups, how: str) -> Tensor:
    """Apply a column-parallel and then a row-parallel matrix.

    ``x`` and the result are replicated, or split by rows with sequence parallelism.
    """
    group = groups.tp.group
    w1, w2 = (
        _mine(w1, groups.tp.rank, groups.tp.size, 0),
        _mine(w2, groups.tp.rank, groups.tp.size, 1),
    )
    if how == "sequence parallel":
        return scatter_rows(F.gelu(gather_rows(x, group) @ w1.T) @ w2.T, group)
    if how == "gathered":
        return gather_last(F.gelu(copy_to(x, group) @ w1.T), group) @ join_rows(
            w2.T.contiguous(), group
        )
    return reduce_from(F.gelu(copy_to(x, group) @ w1.T) @ w2.T, group)


def mixer(x_TW: Tensor, decay_N: Tensor, groups: ParallelGroups) -> Tensor:
    """Compute a running sum over all tokens per head, scaled per group of heads.

    Input ``(T/c, 4 x 3 + 2 x 3)``, output ``(T/c, 12)``.
    """
    group, ranks, rank = groups.tp.group, groups.tp.size, groups.tp.rank
    x, b = x_TW.split([12, 6], dim=1)
    tensors = [x.unflatten(1, (4, 3)), b.unflatten(1, (2, 3))]

    def scan(part: int, columns_TW: Tensor) -> Tensor:
        heads, groups_of_heads = 4 // ranks, max(2 // ranks, 1)
        x, b = columns_TW.split([3 * heads, 3 * groups_of_heads], dim=1)
        b = b.unflatten(1, (-1, 3)).repeat_interleave(heads // groups_of_heads, dim=1)
        decay = _mine(decay_N, rank, ranks, 0)[:, None]
        return torch.cumsum(x.unflatten(1, (-1, 3)) * b.sigmoid(), dim=0) * decay

    if group is None:
        return scan(0, rows_to_columns(tensors, None)).flatten(1)
    return compute_by_heads(tensors, scan, EqualExchange(group), 1).flatten(1)


def _mine(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    return x.chunk(size, dim)[rank]


def train(groups: ParallelGroups, how: str) -> dict[str, Tensor]:
    """Return the loss over all tokens and the gradient of every weight, summed over ranks.

    Both must equal the values of one process.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (16, 18), "w1": (20, 18), "w2": (18, 20), "decay": (4,), "out": (12,)}
    weights = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }
    group, rank, size = groups.tp.group, groups.tp.rank, groups.tp.size
    rows = how == "sequence parallel"
    x = _mine(weights["x"], rank, size, 0) if rows else weights["x"]
    h = x + mlp(x, weights["w1"], weights["w2"], groups, how)
    h = h if rows else split_rows(h, group)
    loss = (mixer(h, weights["decay"], groups) * weights["out"]).sum().tanh() if size == 1 else None
    if loss is None:
        # Compute the same loss: here the sum over tokens is a sum over ranks.
        loss = reduce_from(
            (mixer(h, weights["decay"], groups) * weights["out"]).sum(), group
        ).tanh()
    loss.backward()
    found = {"loss": loss.detach()}
    for name, weight in weights.items():
        gradient = weight.grad.clone()
        shared = name == "x" and not rows  # This gradient is already complete on every rank.
        found[name] = gradient if shared else all_reduce_sum(gradient, group)
    return found


@pytest.mark.parametrize("how", ["shared", "gathered", "sequence parallel"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_those_of_one_process(pools: WorkerPools, world_size: int, how: str) -> None:
    alone = train(ParallelGroups.single(), how)
    for found in pools.run(train, world_size, how, layout={"tp_size": world_size}):
        for name, expected in alone.items():
            torch.testing.assert_close(
                found[name], expected, rtol=0, atol=1e-12 * float(expected.abs().max()), msg=name
            )


def count_calls(groups: ParallelGroups) -> list[int]:
    calls = []
    original = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        x = torch.randn(4, 24, requires_grad=True)
        y = fused_to_columns(x, groups.tp.group)
        forward = len(calls)
        y.sum().backward()
    finally:
        dist.all_to_all_single = original
    return [forward, len(calls) - forward]


def test_all_tensors_travel_in_one_message(pools: WorkerPools) -> None:
    assert pools.run(count_calls, 2, layout={"tp_size": 2}) == [[1, 1]] * 2


def refusals(groups: ParallelGroups) -> list[str]:
    group = groups.tp.group
    exchange = exchange_over(group)
    attempts = [
        lambda: scatter_rows(torch.ones(5, 2), group),
        lambda: split_rows(torch.ones(5, 2), group),
        lambda: rows_to_columns([torch.ones(3, 3)], exchange),
        lambda: rows_to_columns([torch.ones(3, 2), torch.ones(4, 2)], exchange),
        lambda: rows_to_columns([torch.ones(3, 2), torch.ones(3, 2).double()], exchange),
        lambda: heads_to_rows([torch.ones(3, 2)], exchange),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(ValueError) as raised:
            attempt()
        messages.append(str(raised.value))
    return messages


def test_what_does_not_divide_is_said_before_anything_is_sent(pools: WorkerPools) -> None:
    assert pools.run(refusals, 2, layout={"tp_size": 2})[0] == [
        "5 rows cannot be split evenly among the 2 ranks of the group 'tp'.",
        "5 rows cannot be split evenly among the 2 ranks of the group 'tp'.",
        "3 heads cannot be distributed over 2 ranks: the number of heads must be a multiple or a divisor of the "
        "number of ranks.",
        "tensors of one all-to-all must have the same number of rows and the same dtype; found "
        "(3, 2) torch.float32, (4, 2) torch.float32.",
        "tensors of one all-to-all must have the same number of rows and the same dtype; found "
        "(3, 2) torch.float32, (3, 2) torch.float64.",
        "3 tokens cannot be split evenly among the 2 ranks of the group 'tp'.",
    ]
