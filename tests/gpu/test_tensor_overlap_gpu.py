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
from megatron_packed.distributed.symmetric_memory import (
    OVERLAPPING_DEVICES,
    SymmetricMemory,
    connect,
    workspace_bytes,
)
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_packed.layers.tensor_parallel import TensorParallel
from support.gpu_capture import capture
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu

ROWS, WIDTH, INNER = 256, 512, 384
"""Rows of each rank, hidden size, and inner width of each rank."""
FUSED = TensorOverlap(all_gather=True, reduce_scatter=True, reduce_scatter_dgrad=True)


def connected(groups: ParallelGroups) -> tuple[ParallelGroups, SymmetricMemory]:
    """Return the groups with the GPU that all ranks share, and their symmetric memory."""
    os.environ[OVERLAPPING_DEVICES] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    groups = dataclasses.replace(groups, device=device)
    assert groups.tp.group is not None
    needed = workspace_bytes(ROWS, WIDTH, torch.bfloat16)
    memory = connect(groups.tp.group, groups, torch.bfloat16, needed)
    assert isinstance(memory, SymmetricMemory), memory
    return groups, memory


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
    groups, memory = connected(groups)
    own, x = drawn(groups.tp.rank, ROWS, WIDTH), drawn(10 + groups.tp.rank, 2 * ROWS, INNER)
    inwards, outwards = drawn(20, INNER, WIDTH), drawn(30, WIDTH, INNER)
    whole = gathered(own, groups.tp.group)
    found_x, found_y = memory.all_gather_matmul(own, inwards.t(), keep=True)
    absent, again = memory.all_gather_matmul(own, inwards.t(), keep=False)
    found = memory.matmul_reduce_scatter(x, outwards.t())
    result = {
        "gathered rows": torch.equal(found_x, whole),
        "gathered product": torch.equal(found_y, whole @ inwards.t()),
        "without rows": absent is None and torch.equal(again, found_y),
        "scattered product": torch.equal(found, scattered(x @ outwards.t(), groups)),
        "largest workspace": memory.holds(memory.nbytes) and not memory.holds(memory.nbytes + 1),
    }
    dist.barrier(groups.tp.group)
    memory.close()
    return result


def test_fused_products_have_the_bits_of_products_and_collectives(one_gpu: WorkerPools) -> None:
    for found in one_gpu.run(compare_products, 2, layout={"tp_size": 2}, timeout=120):
        assert all(found.values()), found


def layers_of(tp: TensorParallel, rank: int) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    from megatron_packed.distributed.tensor_parallel_shards import SplitSegment

    segment = SplitSegment(noun="channels", count=2 * INNER, width=1)
    build = Build(backends=Backends(), tp=tp, device="cuda", dtype=torch.bfloat16)
    column = ColumnParallelLinear(WIDTH, tp.shard(segment), bias=False, build=build)
    row = RowParallelLinear(tp.shard(segment, dim=1), WIDTH, bias=False, build=build)
    for number, layer in enumerate((column, row)):
        layer.weight.data.copy_(drawn(40 + 2 * number + rank, *layer.weight.shape))
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    return column, row


def replay_and_compare(groups: ParallelGroups) -> dict[str, Any]:
    """Capture forward and backward of two layers, and replay them over other inputs."""
    groups, memory = connected(groups)
    assert groups.tp.group is not None
    products = SequenceParallelProducts(groups.tp.group, FUSED)
    products.memory = memory
    tp = TensorParallel(
        group=groups.tp.group,
        size=2,
        rank=groups.tp.rank,
        sequence_parallel=True,
        products=products,
    )
    column, row = layers_of(tp, groups.tp.rank)
    x = drawn(1, ROWS, WIDTH).requires_grad_()
    dy = drawn(2, ROWS, WIDTH)
    static_y = torch.empty_like(dy)

    def step() -> None:
        x.grad = None
        # The rows for dW are gathered on the CPU, which no graph can contain, so leave dW out.
        y = row(torch.relu(column(x)))
        y.backward(dy)
        static_y.copy_(y.detach())

    for layer in (column, row):
        layer.weight.requires_grad_(False)
    graph, _ = capture(step, times=1)
    captured_grad = x.grad
    same = []
    for number in range(3):
        with torch.no_grad():
            x.copy_(drawn(50 + 2 * number + groups.tp.rank, ROWS, WIDTH))
            dy.copy_(drawn(60 + 2 * number + groups.tp.rank, ROWS, WIDTH))
        graph.replay()
        torch.cuda.synchronize()
        replayed = (static_y.clone(), captured_grad.clone())
        step()
        torch.cuda.synchronize()
        same.append(torch.equal(replayed[0], static_y) and torch.equal(replayed[1], x.grad))
    dist.barrier(groups.tp.group)
    graph.reset()
    products.close()
    return {
        "same": same,
        "unfused": dict(products.unfused),
        "finite": bool(replayed[0].isfinite().all()),
    }


def test_replayed_fused_products_are_the_eager_ones(one_gpu: WorkerPools) -> None:
    for found in one_gpu.run(replay_and_compare, 2, layout={"tp_size": 2}, timeout=120):
        assert found == {"same": [True] * 3, "unfused": {}, "finite": True}, found


BULK = TensorOverlap(bulk_dgrad=True, bulk_wgrad=True)
OVERLAPS = {
    "plain": NO_OVERLAP,
    "in bulk": BULK,
    "fused": dataclasses.replace(FUSED, bulk_dgrad=True),
}


def both_layers(groups: ParallelGroups, overlap: TensorOverlap) -> dict[str, Any]:
    """Return output and gradients of a column- and a row-parallel layer, eagerly and by replay."""
    assert groups.tp.group is not None
    products = SequenceParallelProducts(groups.tp.group, overlap)
    if overlap.fuses:
        needed = workspace_bytes(ROWS, WIDTH, torch.bfloat16)
        memory = connect(groups.tp.group, groups, torch.bfloat16, needed)
        assert isinstance(memory, SymmetricMemory), memory
        products.memory = memory
    tp = TensorParallel(
        group=groups.tp.group,
        size=2,
        rank=groups.tp.rank,
        sequence_parallel=True,
        products=products,
    )
    column, row = layers_of(tp, groups.tp.rank)
    x = drawn(1 + groups.tp.rank, ROWS, WIDTH).requires_grad_()
    dy = drawn(3 + groups.tp.rank, ROWS, WIDTH)
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
    graph.replay()
    torch.cuda.synchronize()
    replayed = [tensor.clone() for tensor in captured]
    dist.barrier(groups.tp.group)
    graph.reset()
    products.close()
    return {"eager": eager, "replayed": replayed, "unfused": dict(products.unfused)}


def every_overlap(groups: ParallelGroups) -> dict[str, dict[str, Any]]:
    return {name: both_layers(groups, overlap) for name, overlap in OVERLAPS.items()}


@pytest.mark.multi_gpu
def test_two_gpus_compute_with_overlap_what_they_compute_without(nccl_pools: WorkerPools) -> None:
    """Collectives in bulk change no bit. Fused products round at most once more."""
    for found in nccl_pools.run(every_overlap, 2, layout={"tp_size": 2}, timeout=120):
        for name, one in found.items():
            assert not one["unfused"], (name, one["unfused"])
            assert all(map(torch.equal, one["replayed"], one["eager"])), name
        assert all(map(torch.equal, found["in bulk"]["eager"], found["plain"]["eager"]))
        for fused, plain in zip(found["fused"]["eager"], found["plain"]["eager"], strict=True):
            torch.testing.assert_close(fused, plain, rtol=2e-2, atol=2e-2 * float(plain.std()))
