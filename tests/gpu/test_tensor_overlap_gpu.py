"""Products with overlap: with two processes that share one GPU, and on two GPUs.

torch lets processes share a GPU in tests (``OVERLAPPING_DEVICES``). The collectives of the reference
then run on the CPU, because NCCL does not accept two ranks on one GPU.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import all_gather_rows
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.sequence_parallel_products import (
    NO_OVERLAP,
    SequenceParallelProducts,
    TensorOverlap,
)
from megatron_packed.distributed.symmetric_memory import OVERLAPPING_DEVICES
from megatron_packed.distributed.symmetric_rows import SymmetricRows, connect, row_bytes
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_packed.layers.tensor_parallel import TensorParallel
from support.gpu_capture import capture
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu

ROWS, WIDTH, INNER = 256, 512, 384
"""Rows of each rank, hidden size, and inner width of each rank."""
BULK = TensorOverlap(bulk_dgrad=True, bulk_wgrad=True)
DEFAULT = dataclasses.replace(BULK, all_gather=True, reduce_scatter=True)
EVERYTHING = dataclasses.replace(DEFAULT, reduce_scatter_dgrad=True)
REPLAYS = 100
SLOW_CYCLES = 2_000_000
"""Cycles, about a millisecond, by which a rank is late."""


def connected(groups: ParallelGroups) -> SymmetricRows:
    assert groups.tp.group is not None
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # as in every run
    needed = row_bytes(ROWS, WIDTH, torch.bfloat16)
    memory = connect(groups.tp.group, groups, torch.bfloat16, needed)
    assert isinstance(memory, SymmetricRows), memory
    return memory


def on_shared_gpu(groups: ParallelGroups) -> ParallelGroups:
    """Return the groups with the GPU that all ranks share."""
    os.environ[OVERLAPPING_DEVICES] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return dataclasses.replace(groups, device=device)


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16) / 8


def gathered(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return all_gather_rows(own.cpu(), group).cuda()


def scattered(term: Tensor, groups: ParallelGroups) -> Tensor:
    """Return this rank's rows of the sum of all terms, rounded once."""
    terms = gathered(term[None], groups.tp.group).float().sum(dim=0).to(term.dtype)
    return terms.chunk(groups.tp.size)[groups.tp.rank]


def compare_products(groups: ParallelGroups) -> dict[str, Any]:
    groups = on_shared_gpu(groups)
    memory = connected(groups)
    own, x = drawn(groups.tp.rank, ROWS, WIDTH), drawn(10 + groups.tp.rank, 2 * ROWS, INNER)
    inwards, outwards = drawn(20, INNER, WIDTH), drawn(30, WIDTH, INNER)
    whole = gathered(own, groups.tp.group)
    found_x, found_y = memory.all_gather_matmul(own, inwards.t(), keep=True)
    absent, again = memory.all_gather_matmul(own, inwards.t(), keep=False)
    found = memory.matmul_reduce_scatter(x, outwards.t())
    term = x @ outwards.t()
    result = {
        "gathered rows": torch.equal(found_x, whole),
        "gathered product": torch.equal(found_y, whole @ inwards.t()),
        "without rows": absent is None and torch.equal(again, found_y),
        "scattered product": torch.equal(found, scattered(term, groups)),
        "started gather": torch.equal(memory.start_gather(own).wait(), whole),
        "started scatter": torch.equal(memory.start_scatter(term).wait(), found),
        "largest rows": memory.holds(ROWS, WIDTH, torch.bfloat16)
        and not memory.holds(ROWS, WIDTH + 1, torch.bfloat16),
    }
    dist.barrier(groups.tp.group)
    memory.close()
    return result


def test_exchanges_have_the_bits_of_products_and_collectives(one_gpu: WorkerPools) -> None:
    for found in one_gpu.run(compare_products, 2, layout={"tp_size": 2}, timeout=120):
        assert all(found.values()), found


def layers_of(tp: TensorParallel) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    segment = SplitSegment(noun="channels", count=tp.size * INNER, width=1)
    build = Build(backends=Backends(), tp=tp, device="cuda", dtype=torch.bfloat16)
    column = ColumnParallelLinear(WIDTH, tp.shard(segment), bias=False, build=build)
    row = RowParallelLinear(tp.shard(segment, dim=1), WIDTH, bias=False, build=build)
    for number, layer in enumerate((column, row)):
        layer.weight.data.copy_(drawn(40 + 10 * number + tp.rank, *layer.weight.shape))
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    return column, row


def tensor_parallel(groups: ParallelGroups, overlap: TensorOverlap) -> TensorParallel:
    assert groups.tp.group is not None
    products = SequenceParallelProducts(groups.tp.group, overlap)
    products.memory = None if overlap == NO_OVERLAP else connected(groups)
    return TensorParallel(
        group=groups.tp.group,
        size=groups.tp.size,
        rank=groups.tp.rank,
        sequence_parallel=True,
        products=products,
    )


def replay_and_compare(groups: ParallelGroups) -> dict[str, Any]:
    """Capture forward and backward of two layers, and replay them over other inputs."""
    groups = on_shared_gpu(groups)
    tp = tensor_parallel(groups, DEFAULT)
    products = tp.products
    assert products is not None
    column, row = layers_of(tp)
    x = drawn(1, ROWS, WIDTH).requires_grad_()
    dy = drawn(2, ROWS, WIDTH)
    static_y = torch.empty_like(dy)
    grads = [layer.weight.main_grad for layer in (column, row)]

    def step() -> None:
        x.grad = None
        for grad in grads:
            grad.zero_()
        y = row(torch.relu(column(x)))
        y.backward(dy)
        static_y.copy_(y.detach())

    graph, _ = capture(step, times=1)
    captured_grad = x.grad
    same = []
    for number in range(REPLAYS):
        with torch.no_grad():
            x.copy_(drawn(50 + 2 * number + groups.tp.rank, ROWS, WIDTH))
            dy.copy_(drawn(60 + 2 * number + groups.tp.rank, ROWS, WIDTH))
        if number % 2 == groups.tp.rank:
            torch.cuda._sleep(SLOW_CYCLES)
        graph.replay()
        replayed = [each.clone() for each in (static_y, captured_grad, *grads)]
        step()
        same.append(all(map(torch.equal, replayed, (static_y, x.grad, *grads))))
    torch.cuda.synchronize()
    dist.barrier(groups.tp.group)
    graph.reset()
    products.close()
    return {
        "same": all(same),
        "unfused": dict(products.unfused),
        "finite": bool(replayed[0].isfinite().all()),
    }


def test_replayed_fused_products_are_the_eager_ones(one_gpu: WorkerPools) -> None:
    for found in one_gpu.run(replay_and_compare, 2, layout={"tp_size": 2}, timeout=120):
        assert found == {"same": True, "unfused": {}, "finite": True}, found


OVERLAPS = {
    "plain": NO_OVERLAP,
    "in bulk": BULK,
    "Megatron's default": DEFAULT,
    "everything": EVERYTHING,
}


def both_layers(groups: ParallelGroups, overlap: TensorOverlap, memory: bool) -> dict[str, Any]:
    """Return output and gradients of a column- and a row-parallel layer, eagerly and by replay."""
    tp = tensor_parallel(groups, overlap)
    products = tp.products
    assert products is not None
    if not memory:
        products.close()
    column, row = layers_of(tp)
    x = drawn(1 + groups.tp.rank, ROWS, WIDTH).requires_grad_()
    dy = drawn(30 + groups.tp.rank, ROWS, WIDTH)
    weights = [layer.weight for layer in (column, row)]

    def step() -> list[Tensor]:
        x.grad = None
        for weight in weights:
            weight.main_grad.zero_()
        y = row(torch.relu(column(x)))
        y.backward(dy)
        # Detached: a living autograd node of another stream would prevent the capture.
        return [y.detach(), x.grad, *(weight.main_grad for weight in weights)]

    eager: list[Tensor] = []
    graph, captured = capture(
        step,
        lambda: eager.extend(tensor.clone() for tensor in step()),
        times=1,
        capture_error_mode="thread_local",
    )
    same = []
    for number in range(REPLAYS):
        if number % groups.tp.size == groups.tp.rank:
            torch.cuda._sleep(SLOW_CYCLES)
        graph.replay()
        same.append(all(map(torch.equal, captured, eager)))
    torch.cuda.synchronize()
    dist.barrier(groups.tp.group)
    graph.reset()
    products.close()
    return {"eager": eager, "replays equal": all(same), "unfused": dict(products.unfused)}


def every_overlap(groups: ParallelGroups) -> dict[str, dict[str, Any]]:
    found = {
        name: both_layers(groups, overlap, memory=overlap != NO_OVERLAP)
        for name, overlap in OVERLAPS.items()
    }
    return {**found, "NCCL in bulk": both_layers(groups, BULK, memory=False)}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_compute_with_overlap_what_they_compute_without(
    ranks: int, nccl_pools: WorkerPools
) -> None:
    """Sums of more than two ranks round at most once more; everything else has the same bits."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, and {torch.cuda.device_count()} are visible")
    for found in nccl_pools.run(every_overlap, ranks, layout={"tp_size": ranks}, timeout=240):
        plain = found["plain"]["eager"]
        for name, one in found.items():
            assert not one["unfused"], (name, one["unfused"])
            assert one["replays equal"], name
            for overlapped, wanted in zip(one["eager"], plain, strict=True):
                torch.testing.assert_close(
                    overlapped, wanted, rtol=2e-2, atol=2e-2 * float(wanted.std())
                )
        exact = ["NCCL in bulk"] if ranks > 2 else list(found)
        for name in exact:
            assert all(map(torch.equal, found[name]["eager"], plain)), name
