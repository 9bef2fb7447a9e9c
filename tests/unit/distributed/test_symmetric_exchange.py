"""Exchanges through symmetric memory: pieces, protocol in random orders, two streams, start and wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed import symmetric_exchange
from megatron_packed.distributed.symmetric_exchange import (
    PIECE_BYTES,
    PIECE_SLOTS,
    piece_of_peer,
    pieces_of,
    staging_bytes,
)
from megatron_packed.ops.permute.used_rows import UsedRows, used_rows
from support.queued_exchange import ExchangeMachine
from support.queued_streams import Queue


def test_pieces_cover_a_part_in_order() -> None:
    assert list(pieces_of(1300, 1024)) == [(0, 1024), (1024, 1300)]
    assert list(pieces_of(0, 1024)) == [] and list(pieces_of(1, 1024)) == [(0, 1)]
    for nbytes in (511, 512, 513, 5000, 92_274_688 + 2, 7 * PIECE_BYTES):
        for largest in (512, 1536, PIECE_BYTES):
            pieces = list(pieces_of(nbytes, largest))
            assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert pieces[-1][1] == nbytes
            assert all(0 < end - start <= largest for start, end in pieces)
            assert all(start % 512 == 0 for start, _ in pieces)
            assert len(pieces) <= -(-nbytes // largest)


def test_a_piece_begins_after_the_certain_bytes() -> None:
    assert list(pieces_of(3000, 1024, 1000)) == [(0, 1024), (1024, 2048), (2048, 3000)]
    assert list(pieces_of(3000, 2048, 10)) == [(0, 512), (512, 2048), (2048, 3000)]
    assert list(pieces_of(3000, 4096, 0)) == [(0, 3000)] == list(pieces_of(3000, 4096, 3000))


def test_the_staging_buffer_has_the_same_size_for_every_group() -> None:
    assert staging_bytes(2) == PIECE_SLOTS * PIECE_BYTES == 48 * 2**20
    for size in range(2, 9):
        assert 0 <= staging_bytes(2) - staging_bytes(size) < PIECE_SLOTS * 512 * size
        assert piece_of_peer(size, PIECE_BYTES) % 512 == 0
    assert piece_of_peer(8, 1) == 512


def wanted(messages: list[Tensor], rank: int) -> Tensor:
    return torch.stack([message[rank] for message in messages])


def drawn(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ranks, *shape, generator=generator).to(dtype) for _ in range(ranks)]


SHAPES = [(3, 5), (0, 5), (257, 4), (1,), (600, 8)]
"""Shapes of parts: odd sizes, no rows, one piece, and more pieces than slots."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("slow", ["", "pulling", "staging"])
def test_exchanges_in_sequence_keep_their_data_in_every_order(ranks: int, slow: str) -> None:
    """All exchanges are queued at once, so only the protocol keeps them apart."""
    dtypes = (torch.float32, torch.bfloat16)
    for seed in range(4):
        machine = ExchangeMachine(ranks, 1024)
        found, messages = [], []
        for number, shape in enumerate(SHAPES * 2):
            messages.append(drawn(ranks, shape, dtypes[number % 2], 100 * seed + number))
            # Each rank reads the result in its caller's stream: it must be complete there.
            results = [
                rank.exchange(x) for rank, x in zip(machine.ranks, messages[-1], strict=True)
            ]
            found.append(results)
        first: list[Queue] = []
        if slow:  # the other streams of all ranks, or of rank 0 alone, run as far ahead as they can
            held = {id(getattr(rank, f"_{slow}")) for rank in machine.ranks[seed % 2 :]}
            first = [queue for queue in machine.queues if id(queue) not in held]
        machine.run(seed, first)
        for sent, results in zip(messages, found, strict=True):
            for rank, result in enumerate(results):
                assert torch.equal(result, wanted(sent, rank))


@pytest.mark.parametrize("certain", [0, 500, 1300])
def test_used_rows_arrive_and_no_others_travel(certain: int) -> None:
    ranks, rows, row_bytes = 3, 40, 4 * 13
    for seed in range(4):
        machine = ExchangeMachine(ranks, 1024)
        counts = torch.randint(
            0, rows + 9, (ranks, ranks), generator=torch.Generator().manual_seed(seed)
        )
        messages = drawn(ranks, (rows, 13), torch.float32, seed)
        results = []
        for rank, x in zip(machine.ranks, messages, strict=True):
            used = UsedRows(
                sent_e=counts[rank.rank],
                received_e=counts[:, rank.rank],
                row_bytes=row_bytes,
                certain=certain,
            )
            assert used.reversed.sent_e is used.received_e and used.reversed.certain == certain
            results.append(rank.exchange(x, used))
            results[-1].fill_(-1)  # queued operations run later
        machine.run(seed)
        for rank, result in enumerate(results):
            right = wanted(messages, rank)
            for sender in range(ranks):
                number = int(counts[sender, rank])
                assert torch.equal(result[sender, :number], right[sender, :number])
                untouched = max(number, -(-certain // row_bytes)) + 512 // row_bytes + 1
                assert (result[sender, untouched:] == -1).all()


def test_rows_that_are_certain_need_no_count() -> None:
    counts = torch.tensor([[1, 2], [3, 4]])
    row = torch.zeros(5, dtype=torch.bfloat16)
    assert used_rows(counts, 0, row, 7, 7) is None
    found = used_rows(counts, 1, row, 6, 7)
    assert found is not None and (found.row_bytes, found.certain) == (10, 60)
    assert found.sent_e.tolist() == [3, 4] and found.received_e.tolist() == [2, 4]


def test_the_caller_waits_for_the_result_and_the_exchange_for_the_caller() -> None:
    machine = ExchangeMachine(2, 512)
    messages = [torch.zeros(2, 1500) for _ in range(2)]
    seen = []
    for rank, x in zip(machine.ranks, messages, strict=True):
        rank.caller.add(lambda x=x, value=rank.rank + 1: x.fill_(value) is not None)
        result = rank.exchange(x)
        rank.caller.add(lambda result=result: seen.append(result.clone()) is None)
        # The message may be overwritten after the exchange.
        rank.caller.add(lambda x=x: x.fill_(9) is not None)
    machine.run(0, [rank.caller for rank in machine.ranks])
    assert [set(result.unique().tolist()) for result in seen] == [{1.0, 2.0}] * 2
    assert all(
        torch.equal(result[s], torch.full((1500,), s + 1.0)) for result in seen for s in (0, 1)
    )


def test_started_exchanges_travel_beside_the_caller_and_other_streams() -> None:
    """Two callers' streams of a rank may start exchanges; a rank waits for each one."""
    for seed in range(6):
        machine = ExchangeMachine(2, 512)
        messages = [drawn(2, (700,), torch.float32, seed + number) for number in range(3)]
        found = []
        for rank in machine.ranks:
            streams = [rank.caller, Queue(machine)]
            started = []
            for number, message in enumerate(messages):
                rank.caller = streams[number % 2]
                started.append(rank.start(message[rank.rank]))
            for number, (_, end) in enumerate(started):
                rank.caller = streams[number % 2]
                end.work.wait()
            found.append([result for result, _ in started])
        machine.run(seed)
        for rank, results in enumerate(found):
            assert all(
                torch.equal(result, wanted(message, rank))
                for result, message in zip(results, messages, strict=True)
            )


@pytest.mark.parametrize("slots", [1, 2])
def test_the_random_orders_find_a_protocol_with_too_few_slots(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """The waits are those for three slots: with fewer slots, a piece is overwritten too early."""
    wrong = 0
    for seed in range(8):
        machine = ExchangeMachine(2, 512)
        message = drawn(2, (3000,), torch.float32, seed)
        for rank in machine.ranks:
            place = rank._staged
            monkeypatch.setattr(
                rank, "_staged", lambda a, slot, b, n, place=place: place(a, slot % slots, b, n)
            )
        results = [rank.exchange(x) for rank, x in zip(machine.ranks, message, strict=True)]
        held = {id(rank._pulling) for rank in machine.ranks}
        machine.run(seed, [queue for queue in machine.queues if id(queue) not in held])
        wrong += any(
            not torch.equal(result, wanted(message, rank)) for rank, result in enumerate(results)
        )
    assert wrong and symmetric_exchange.PIECE_SLOTS == 3
