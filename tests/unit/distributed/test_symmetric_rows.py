"""Gathers and scatters through symmetric memory: results in random orders of the streams, barriers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed.collectives import PendingRows
from megatron_packed.distributed.symmetric_rows import (
    SymmetricRows,
    buffer_bytes,
    dtype_reasons,
    row_bytes,
)
from support.queued_rows import QueuedRows, RowsMachine
from support.queued_streams import Queue

WIDTH, INNER, MOST_ROWS = 6, 4, 5
"""Width of the exchanged rows, the other width of the products, and most rows of a rank."""
DTYPE = torch.float64
NBYTES = row_bytes(MOST_ROWS, WIDTH, DTYPE)
FORWARD = ["all_gather_matmul", "matmul_reduce_scatter"]
BACKWARD = ["all_gather_matmul", "start_gather", "start_scatter"]
KINDS = [*FORWARD, "start_gather", "start_scatter"]


class Exchange:
    """One exchange of all ranks. All numbers are small integers, so every sum is exact."""

    def __init__(self, machine: RowsMachine, name: str, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randint(-9, 9, shape, generator=generator).to(DTYPE)

        size = len(machine.ranks)
        self.name, self.rows = name, rows
        self.gathers, self.multiplies = "gather" in name, "matmul" in name
        width = INNER if name == "matmul_reduce_scatter" else WIDTH
        self.inputs = [drawn(rows if self.gathers else rows * size, width) for _ in range(size)]
        self.matrices = [drawn(width, INNER if self.gathers else WIDTH) for _ in range(size)]
        self.memory = [torch.full_like(x, -5) for x in self.inputs]
        """Input tensors, which the caller's stream writes before the exchange."""
        self.found: list[tuple[Tensor, ...] | PendingRows] = []
        self.seen: list[list[Tensor]] = [[] for _ in range(size)]

    def start(self, rank: QueuedRows) -> None:
        x, matrix = self.memory[rank.rank], self.matrices[rank.rank]
        rank.caller.add(lambda: x.copy_(self.inputs[rank.rank]) is not None)
        if self.name == "all_gather_matmul":
            x_TI, y_TO = rank.all_gather_matmul(x, matrix, keep=True)
            assert x_TI is not None
            self.found.append((x_TI, y_TO))
        elif self.name == "matmul_reduce_scatter":
            self.found.append((rank.matmul_reduce_scatter(x, matrix),))
        else:
            self.found.append(rank.start_gather(x) if self.gathers else rank.start_scatter(x))

    def read(self, rank: QueuedRows) -> None:
        """Read the results in the caller's stream, then overwrite them and the input."""
        found = self.found[rank.rank]
        if isinstance(found, PendingRows):
            found = (found.wait(),)
        for each in found:
            copy = torch.full_like(each, -99)
            self.seen[rank.rank].append(copy)
            rank.caller.add(lambda copy=copy, each=each: copy.copy_(each) is not None)
        for each in (*found, self.memory[rank.rank]):
            rank.caller.add(lambda each=each: each.fill_(-7) is not None)

    def is_right(self, rank: int) -> bool:
        pairs = zip(self.seen[rank], self.wanted(rank), strict=True)
        return all(torch.equal(seen, wanted) for seen, wanted in pairs)

    def wanted(self, rank: int) -> list[Tensor]:
        if self.gathers:
            x = torch.cat(self.inputs)
            return [x, x @ self.matrices[rank]] if self.multiplies else [x]
        own = slice(rank * self.rows, (rank + 1) * self.rows)
        pairs = zip(self.inputs, self.matrices, strict=True)
        terms = [x @ matrix if self.multiplies else x for x, matrix in pairs]
        return [torch.stack(terms).sum(dim=0)[own]]


def queue_exchanges(machine: RowsMachine, names: list[str], seed: int) -> list[Exchange]:
    """Queue exchanges of changing sizes; a started one is waited for after the next exchange."""
    drawn, queued = random.Random(seed), []
    waiting: list[Exchange] = []
    for number, name in enumerate(names):
        exchange = Exchange(machine, name, drawn.randint(1, MOST_ROWS), 100 * seed + number)
        for rank in machine.ranks:
            exchange.start(rank)
        queued.append(exchange)
        complete, waiting = [*waiting], [exchange]
        if not name.startswith("start"):
            complete, waiting = [*complete, exchange], []
        for each in complete:
            for rank in machine.ranks:
                each.read(rank)
    for each in waiting:
        for rank in machine.ranks:
            each.read(rank)
    return queued


def run(machine: RowsMachine, names: list[str], seed: int, slow: str = "") -> list[bool]:
    queued = queue_exchanges(machine, names, seed)
    first: list[Queue] = []
    if slow:  # the other streams of all ranks, or of rank 0 alone, run as far ahead as they can
        held = {id(getattr(rank, slow)) for rank in machine.ranks[seed % 2 :]}
        first = [queue for queue in machine.queues if id(queue) not in held]
    machine.run(seed, first)
    return [each.is_right(rank.rank) for each in queued for rank in machine.ranks]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("slow", ["", "_copying", "_beside", "caller"])
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
def test_exchanges_in_sequence_keep_their_data_in_every_order(
    ranks: int, slow: str, captures: bool
) -> None:
    """All exchanges are queued at once, so only the protocol keeps them apart."""
    for seed in range(4):
        mixed = random.Random(seed).choices(KINDS, k=8)
        for names in (FORWARD * 3 + BACKWARD * 3, mixed, [mixed[0]] * 4):
            machine = RowsMachine(ranks, NBYTES, captures=captures)
            assert all(run(machine, names, seed, slow)), (names, seed)


@pytest.mark.parametrize(
    "names, captured",
    [
        (FORWARD * 4, 8),
        (BACKWARD * 4, 12),
        (["all_gather_matmul"] * 4, 8),
        (["matmul_reduce_scatter", "start_scatter"], 4),
    ],
)
def test_a_captured_product_has_one_barrier(names: list[str], captured: int) -> None:
    """The first exchange has a second one, and so has an exchange in the slot of the previous one."""
    repeated = names[0] == names[-1] or "scatter" in names[0]
    for captures, wanted in ((True, captured + (not repeated)), (False, 2 * len(names))):
        machine = RowsMachine(2, NBYTES, captures=captures)
        run(machine, names, 0)
        assert machine.barriers.begun == [wanted] * 2


def test_the_random_orders_find_a_missing_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second barrier, an exchange overwrites the slot of the previous one too early."""
    opened = SymmetricRows._open

    def without_barrier(self: QueuedRows, slot: object) -> None:
        self._last = self._last and next(each for each in type(slot) if each is not slot)
        opened(self, slot)

    monkeypatch.setattr(SymmetricRows, "_open", without_barrier)
    for name in KINDS:
        found: list[bool] = []
        for seed in range(8):
            machine = RowsMachine(3, NBYTES, captures=True)
            found += run(machine, [name] * 4, seed, ("_copying", "caller")[seed % 2])
        assert not all(found), name


def test_rows_that_fit() -> None:
    (rows,) = RowsMachine(1, 1000, captures=False).ranks
    assert rows.holds(5, 100, torch.bfloat16) and not rows.holds(5, 101, torch.bfloat16)
    assert not rows.holds(0, 100, torch.bfloat16)
    assert row_bytes(5, 100, torch.bfloat16) == 1000
    assert buffer_bytes(4, 1000) == (2 + 4) * 1024
    rows.close()
    assert not rows.holds(1, 1, torch.bfloat16)


def test_dtypes_that_were_compared() -> None:
    assert dtype_reasons(torch.bfloat16) == [] == dtype_reasons(torch.float32)
    assert dtype_reasons(torch.float64) == [
        "fused products are checked in bfloat16 and float32 only, but the dtype is float64"
    ]
