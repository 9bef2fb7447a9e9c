"""Exchanges through symmetric memory on GPUs: the bits of the collective, eagerly and by replay.

Two processes can share one GPU in tests (``OVERLAPPING_DEVICES``). With two GPUs the reference is
NCCL. ``test_expert_graphs_gpu.py`` and ``test_overlapped_exchange_gpu.py`` run whole steps.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.all_to_all import EqualExchange, exchange_equal_parts
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.symmetric_exchange import (
    PIECE_BYTES,
    SymmetricExchange,
    connect_exchange,
)
from megatron_packed.distributed.symmetric_memory import OVERLAPPING_DEVICES
from megatron_packed.ops.permute.used_rows import used_rows
from support.gpu_capture import capture
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu

SHAPES = [
    ((3, 5), torch.float32),
    ((0, 64), torch.bfloat16),
    ((1,), torch.uint8),
    ((1021, 13), torch.bfloat16),
    ((2048, 2688), torch.bfloat16),
    (((5 * PIECE_BYTES + 4098) // 2,), torch.bfloat16),
]
"""Shapes of parts: odd sizes, no rows, one byte, one piece, and more pieces than slots."""
REPLAYS = 50
LAYERS, ROWS, WIDTH = 6, 3001, 1024
SLOW_CYCLES = 5_000_000
"""Cycles, some milliseconds, by which a rank is late."""


def connected(groups: ParallelGroups, piece_bytes: int = PIECE_BYTES) -> SymmetricExchange:
    assert groups.ep.group is not None
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # as in every run
    found = connect_exchange(groups.ep.group, groups)
    assert isinstance(found, SymmetricExchange), found
    if piece_bytes == PIECE_BYTES:
        return found
    found.close()
    return SymmetricExchange(groups.ep.group, groups.device, piece_bytes)


def message(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    values = torch.randint(0, 200, (2, *shape), generator=generator, device="cuda")
    return values.to(dtype)


def wanted(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return what a rank receives; every rank can draw all messages."""
    return torch.stack([message(sender, shape, dtype, seed)[rank] for sender in range(2)])


def sizes_and_replays(groups: ParallelGroups, piece_bytes: int) -> dict[str, Any]:
    """Exchange messages of all sizes, then replay a captured exchange over changing data."""
    memory, rank = connected(groups, piece_bytes), groups.ep.rank
    eager = [
        torch.equal(memory.exchange(message(rank, *one)), wanted(rank, *one)) for one in SHAPES
    ]
    shape, dtype = SHAPES[3]
    x = message(rank, shape, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = memory.exchange(x)
    replayed = []
    for seed in range(1, 6):
        x.copy_(message(rank, shape, dtype, seed))
        graph.replay()
        replayed.append(torch.equal(found, wanted(rank, shape, dtype, seed)))
    dist.barrier(groups.ep.group)
    graph.reset()
    memory.close()
    return {"eager": all(eager), "replayed": all(replayed)}


def partly_used(groups: ParallelGroups, piece_bytes: int) -> dict[str, Any]:
    """Replay an exchange of parts whose used rows change, beside rows that are not used."""
    memory, rank = connected(groups, piece_bytes), groups.ep.rank
    shape, dtype, certain = (4099, 336), torch.bfloat16, 3000
    counts = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    x = message(rank, shape, dtype)
    used = used_rows(counts, rank, x[0, 0], certain, shape[0])
    assert used is not None
    memory.exchange(x, used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        # Captured, because one of the two is a copy of a column of the counts.
        found = memory.exchange(x, used_rows(counts, rank, x[0, 0], certain, shape[0]))
    equal, untouched = [], []
    for seed, rows in enumerate([[0, 4099], [3000, 3001], [4000, 3500], [9999, 1]], 1):
        counts.copy_(torch.tensor([rows, rows[::-1]]))
        x.copy_(message(rank, shape, dtype, seed))
        found.fill_(-1)
        graph.replay()
        right = wanted(rank, shape, dtype, seed)
        for sender, row in enumerate(counts[:, rank].tolist()):
            last = min(max(row, certain), shape[0])
            equal.append(torch.equal(found[sender, :last], right[sender, :last]))
            untouched.append(bool((found[sender, last + 1 :] == -1).all()))
    dist.barrier(groups.ep.group)
    graph.reset()
    memory.close()
    return {"used": all(equal), "untouched": all(untouched)}


def on_shared_gpu(groups: ParallelGroups) -> dict[str, Any]:
    os.environ[OVERLAPPING_DEVICES] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    groups = dataclasses.replace(groups, device=device)
    return {**sizes_and_replays(groups, 2**20), **partly_used(groups, 2**18)}


def test_two_processes_on_one_gpu_exchange_their_parts(one_gpu: WorkerPools) -> None:
    for found in one_gpu.run(on_shared_gpu, 2, layout={"ep_size": 2}, timeout=120):
        assert all(found.values()), found


class Layers:
    """Layers of two exchanges; a product of another stream runs beside them in the forward pass."""

    def __init__(self, exchange: EqualExchange) -> None:
        self.exchange = exchange
        self.side = torch.cuda.Stream()
        # Rounding of these operations does not depend on the stream, so bits can be compared.
        self.factors = torch.linspace(0.5, 2, LAYERS, device="cuda").to(torch.bfloat16)
        self.matrix = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty_like(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                torch.matmul(self.matrix, self.matrix, out=self.product)
            there = exchange_equal_parts(x, self.exchange)
            x = exchange_equal_parts((there * factor).sin(), self.exchange) + x
            torch.cuda.current_stream().wait_stream(self.side)
        return x

    def step(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        x.grad = None
        y = self.forward(x)
        y.backward(dy)
        # Detached: a living autograd node of another stream would prevent the capture.
        return y.detach(), x.grad


def replayed_layers(groups: ParallelGroups) -> dict[str, Any]:
    """Compare replays of several layers, forward and backward, with eager steps over NCCL."""
    assert groups.ep.group is not None
    plain, symmetric = EqualExchange(groups.ep.group), EqualExchange(groups.ep.group)
    symmetric.memory = connected(groups, 2**20)
    over_nccl, layers = Layers(plain), Layers(symmetric)
    shape = (2, ROWS, WIDTH)
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.zeros_like(x).detach()
    graph, captured = capture(
        lambda: layers.step(x, dy),
        lambda: (layers.step(x, dy), over_nccl.step(x, dy)),
        times=1,
        capture_error_mode="thread_local",
    )
    equal = []
    for number in range(REPLAYS):
        generator = torch.Generator("cuda").manual_seed(2 * number + groups.ep.rank)
        with torch.no_grad():
            for tensor in (x, dy):
                tensor.copy_(torch.randn(shape, generator=generator, device="cuda"))
        if number % 4 == groups.ep.rank:  # a late GPU, in turns
            torch.cuda._sleep(SLOW_CYCLES)
        if number % 10 == 5 * groups.ep.rank:  # a late host
            torch.cuda.synchronize()
            time.sleep(0.02)
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        if number % 5 == 0:  # eager exchanges between replays use the same buffer
            eager = layers.step(x, dy)
            equal.append(all(map(torch.equal, replayed, eager)))
        equal.append(all(map(torch.equal, replayed, over_nccl.step(x, dy))))
    finite = bool(replayed[0].isfinite().all()) and bool(replayed[1].any())
    dist.barrier(groups.ep.group)
    graph.reset()
    symmetric.close()
    return {"equal": all(equal), "count": len(equal), "finite": finite}


def from_two_streams(groups: ParallelGroups) -> dict[str, bool]:
    """Start exchanges from two streams, which then run beside products."""
    memory, rank = connected(groups, 2**20), groups.ep.rank
    streams = [torch.cuda.Stream() for _ in range(2)]
    shape, dtype = (2 * 2**20 + 3,), torch.bfloat16
    messages = [message(rank, shape, dtype, seed) for seed in range(8)]
    matrix = torch.randn(2048, 2048, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    results = []
    for number, x in enumerate(messages):
        with torch.cuda.stream(streams[number % 2]):
            result, started = memory.start(x)
            torch.matmul(matrix, matrix)
            started.work.wait()
            results.append(result.clone())
    torch.cuda.synchronize()
    same = [
        torch.equal(result, wanted(rank, shape, dtype, seed)) for seed, result in enumerate(results)
    ]
    dist.barrier(groups.ep.group)
    memory.close()
    return {"same": all(same)}


def on_two_gpus(groups: ParallelGroups) -> dict[str, Any]:
    assert groups.ep.group is not None
    return {
        **sizes_and_replays(groups, PIECE_BYTES),
        **partly_used(groups, PIECE_BYTES),
        **from_two_streams(groups),
        **replayed_layers(groups),
    }


@pytest.mark.multi_gpu
def test_two_gpus_exchange_the_bits_of_nccl(nccl_pools: WorkerPools) -> None:
    for found in nccl_pools.run(on_two_gpus, 2, layout={"ep_size": 2}, timeout=180):
        assert found.pop("count") == REPLAYS + REPLAYS // 5, found
        assert all(found.values()), found
