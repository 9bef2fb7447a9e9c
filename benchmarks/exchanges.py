"""Compares backends of all-to-alls of equal parts: NCCL, and copies through symmetric memory.

    torchrun --nproc_per_node 2 benchmarks/exchanges.py [--megabytes 8 32 ...] [--pieces 16 ...]

A CUDA graph contains several exchanges in a row. The rate is that of the bytes that a rank sends to
its peer. Another graph runs matrix products on a second stream beside the exchanges: the excess is
its time minus that of the products alone. `--pieces` compares sizes of pieces. Copies of such pieces
alone, from the peer's memory, to it, and inside of a GPU, show the limit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import harness
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.sections.all_to_all import NCCL, SYMMETRIC_MEMORY
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.all_to_all import EqualExchange
from megatron_packed.distributed.symmetric_exchange import PIECE_BYTES, SymmetricExchange
from megatron_packed.ops.permute.used_rows import used_rows

MEGABYTES = (8, 32, 132, 185)
"""Sizes of the part for the peer, in 10^6 bytes."""
ROW, REPEATS = 8, 7
"""Number of exchanges in a graph, and number of measured replays."""
PRODUCT = (8192, 2688, 3712)
"""Rows, input and output features of the products that run beside exchanges."""
ROW_BYTES, CERTAIN, USED = 5376, 0.7, 0.75
"""Bytes of a row, and shares of the rows of a part that are copied in any case, and that are used."""
MIB = 2**20


def microseconds(run: Callable[[], object]) -> float:
    """Return the time of one of `ROW` captured calls, as the median of the slower rank."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(ROW):
            run()
    times = []
    for number in range(REPEATS + 2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        dist.barrier()
        torch.cuda.synchronize()
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(1e3 * events[0].elapsed_time(events[1]) / ROW)
    slower = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    dist.barrier()
    torch.cuda.synchronize()
    graph.reset()
    return float(slower)


class Products:
    """Matrix products on a second stream that take about as long as an exchange."""

    def __init__(self) -> None:
        rows, inputs, outputs = PRODUCT
        self.side = torch.cuda.Stream()
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(rows, inputs, **options)
        self.matrix = torch.randn(inputs, outputs, **options)
        self.y = torch.empty(rows, outputs, **options)
        self.count = 1

    def run(self) -> None:
        for _ in range(self.count):
            torch.matmul(self.x, self.matrix, out=self.y)

    def beside(self, other: Callable[[], object]) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.run()
        other()
        torch.cuda.current_stream().wait_stream(self.side)


def measured(exchange: EqualExchange, megabytes: int, products: Products) -> dict[str, Any]:
    """Return the time of an exchange alone and beside products."""
    x = torch.ones(2, megabytes * 500_000, dtype=torch.bfloat16, device="cuda")

    def run() -> Tensor:
        return exchange.exchange(x)

    alone = microseconds(run)
    products.count = 1
    products.count = max(round(alone / microseconds(products.run)), 1)
    return {
        "us": alone,
        "products_us": microseconds(products.run),
        "beside_us": microseconds(lambda: products.beside(run)),
    }


class LocalKernels(SymmetricExchange):
    """`SymmetricExchange` whose copies inside of a GPU are kernels instead of the driver's copies."""

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
        if stream is not self._staging:
            super()._copy(stream, target, source)
            return
        with torch.cuda.stream(stream):
            torch.bitwise_or(source.view(torch.int64), 0, out=target.view(torch.int64))


def copies_alone(memory: SymmetricExchange, megabytes: int) -> dict[str, float]:
    """Return the microseconds of copies of all pieces of a part: from the peer, to it, and here."""
    here, there = (memory._slots[rank].view(-1) for rank in (memory.rank, 1 - memory.rank))
    x = torch.empty(megabytes * 1_000_000, dtype=torch.uint8, device="cuda")
    pieces = x.split(memory.piece_bytes)

    def pull() -> None:
        for piece in pieces:
            piece.copy_(there[: piece.numel()])

    def push() -> None:
        for piece in pieces:
            there[: piece.numel()].copy_(piece)

    def stay() -> None:
        for piece in pieces:
            here[: piece.numel()].copy_(piece)

    found = {"pull_us": microseconds(pull), "push_us": microseconds(push)}
    dist.barrier()
    return {**found, "local_us": microseconds(stay)}


def partly_used(exchange: EqualExchange, megabytes: int) -> float:
    """Return the microseconds of an exchange of parts of which only the device knows the used rows."""
    rows = megabytes * 1_000_000 // ROW_BYTES
    x = torch.ones(2, rows, ROW_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    counts = torch.full((2, 2), int(USED * rows), device="cuda")
    used = used_rows(counts, dist.get_rank(), x[0, 0], int(CERTAIN * rows), rows)
    return microseconds(lambda: exchange.exchange(x, used))


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each size and backend."""
    rows: list[dict[str, object]] = []
    for megabytes, backends in results.items():
        for backend, found in backends.items():
            sent = int(megabytes)
            row: dict[str, object] = {"MB to the peer": sent, "backend": backend}
            row["us"] = round(found["us"])
            row["GB/s"] = round(sent * 1e3 / found["us"])
            for name in ("pull", "push", "local"):
                copies = found.get(f"{name}_us")
                row[f"{name} GB/s"] = round(sent * 1e3 / copies) if copies else ""
            row["3/4 used, us"] = round(found["used_us"]) if "used_us" in found else ""
            row["products, us"] = round(found["products_us"])
            row["both, us"] = round(found["beside_us"])
            row["excess, us"] = round(found["beside_us"] - found["products_us"])
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", nargs="+", type=int, default=MEGABYTES)
    parser.add_argument("--pieces", nargs="+", type=int, default=[PIECE_BYTES // MIB], help="MiB")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    apply_environment(TrainingConfig(train_iters=1))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    assert dist.group.WORLD is not None and dist.get_world_size() == 2
    products = Products()
    results: dict[str, Any] = {
        str(megabytes): {NCCL: measured(EqualExchange(dist.group.WORLD), megabytes, products)}
        for megabytes in arguments.megabytes
    }
    kinds = {"": SymmetricExchange, ", local kernels": LocalKernels}
    for piece, (name, kind) in itertools.product(arguments.pieces, kinds.items()):
        exchange = EqualExchange(dist.group.WORLD)
        exchange.memory = kind(dist.group.WORLD, device, piece * MIB)
        for megabytes in arguments.megabytes:
            found = measured(exchange, megabytes, products)
            found["used_us"] = partly_used(exchange, megabytes)
            if not name:
                found |= copies_alone(exchange.memory, megabytes)
            backend = f"{SYMMETRIC_MEMORY}, {piece} MiB{name}"
            results[str(megabytes)][backend] = found
            if dist.get_rank() == 0:
                print(f"{backend}, {megabytes} MB: {found['us']:.0f} us", flush=True)
        torch.cuda.synchronize()
        dist.barrier()
        exchange.close()
    if dist.get_rank() == 0:
        harness.save("exchanges", results, folder=arguments.results)
        print(harness.table(rows_of(results)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
