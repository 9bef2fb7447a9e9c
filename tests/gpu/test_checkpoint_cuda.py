"""Checkpoints of CUDA tensors: equal bits, stream order, little memory, and agreement over NCCL."""

import resource

import pytest
import torch

from megatron_packed.checkpoint.background_save import BackgroundSaves
from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.tensor_shard import (
    Extent,
    shards_of,
    split_replicated,
    whole_tensors,
)
from megatron_packed.distributed.groups import ParallelGroups
from support.process_pools import run_distributed


def make_state(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    state = {
        "weight": torch.randn(9001, 1003, generator=generator),  # 34 MiB in 9 blocks
        "weight.bf16": torch.randn(3_000_001, generator=generator).bfloat16(),
        "step": torch.tensor(3),
        "flags": torch.rand(77, generator=generator) > 0.5,
        "nothing": torch.empty(0),
    }
    return {name: tensor.to(device) for name, tensor in state.items()}


@pytest.mark.gpu
def test_cuda_tensors_come_back_and_cuda_and_cpu_files_are_the_same(tmp_path):
    on_gpu, on_cpu = make_state("cuda"), make_state("cpu")
    paths = [
        save_checkpoint(tmp_path / device, 1, whole_tensors(state), {}).path
        / "rank_00000.safetensors"
        for device, state in (("cuda", on_gpu), ("cpu", on_cpu))
    ]
    one, two = (path.read_bytes() for path in paths)
    assert one[-(30 << 20) :] == two[-(30 << 20) :]  # the headers differ in the id of the save
    found = {name: torch.zeros_like(tensor) for name, tensor in on_gpu.items()}
    load_checkpoint(tmp_path / "cpu", whole_tensors(found))
    assert all(torch.equal(found[name], on_gpu[name]) for name in found)


@pytest.mark.gpu
def test_saved_beside_training(tmp_path):
    """The save copies to reused page-locked memory; the file has no changes of the next step."""
    state = make_state("cuda")
    before = {name: tensor.clone() for name, tensor in state.items()}
    saves = BackgroundSaves()
    for step in (1, 2):
        saves.begin(
            lambda shards, step=step: save_checkpoint(tmp_path, step, shards, {}),
            whole_tensors(state),
        )
        for tensor in state.values():
            tensor.zero_()
        assert saves.take(wait=True).step == step
        found = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        assert load_checkpoint(tmp_path, whole_tensors(found)).step == step
        assert all(torch.equal(found[name], before[name]) for name in found)
        for name, tensor in before.items():
            state[name].copy_(tensor)
    assert saves._staging._locked and saves._staging._memory.is_pinned()


@pytest.mark.gpu
def test_columns_are_saved_and_loaded(tmp_path):
    """Columns of tensor-parallel ranks load into more ranks and into one; rows cross block
    edges.
    """
    whole = torch.randn(4096, 3000, device="cuda")  # 46 MiB
    halves = [
        shards_of(
            "w",
            (4096, 3000),
            [Extent(at, at + 1500, 4096, 3000)],
            whole[:, at : at + 1500].reshape(-1),
        )
        for at in (0, 1500)
    ]
    save_checkpoint(tmp_path, 1, halves[0] + halves[1], {})
    for at, width in ((0, 1500), (750, 750), (1000, 1000), (0, 3000)):
        found = torch.zeros(4096 * width, device="cuda")
        load_checkpoint(
            tmp_path, shards_of("w", (4096, 3000), [Extent(at, at + width, 4096, 3000)], found)
        )
        assert torch.equal(found.view(4096, width), whole[:, at : at + width])
    found = torch.zeros_like(whole)
    load_checkpoint(tmp_path, whole_tensors({"w": found}))
    assert torch.equal(found, whole)


@pytest.mark.gpu
def test_copies_follow_the_work_that_is_queued_on_the_stream(tmp_path):
    """A save may start while the tensor is computed, and a loaded tensor can be used at once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        values = torch.zeros(6 << 20, device="cuda")
        torch.cuda._sleep(200_000_000)
        values += 5
        save_checkpoint(tmp_path, 1, whole_tensors({"w": values}), {})
        torch.cuda._sleep(200_000_000)
        values.zero_()
        load_checkpoint(tmp_path, whole_tensors({"w": values}))
        assert float(values.sum()) == 5.0 * values.numel()


@pytest.mark.gpu
def test_no_device_memory_and_two_blocks_of_host_memory(tmp_path):
    tensor = torch.full((256 << 20,), 1.5, device="cuda")  # 1 GiB
    small = torch.ones(1, device="cuda")
    save_checkpoint(tmp_path / "warm", 1, whole_tensors({"w": small}), {})
    load_checkpoint(tmp_path / "warm", whole_tensors({"w": small}))
    torch.cuda.reset_peak_memory_stats()
    device, host = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save_checkpoint(tmp_path, 1, whole_tensors({"w": tensor}), {})
    tensor.zero_()
    load_checkpoint(tmp_path, whole_tensors({"w": tensor}))
    assert torch.cuda.max_memory_allocated() == device
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 64 << 10
    assert bool((tensor == 1.5).all())


def _over_nccl(groups: ParallelGroups, root: str) -> bool:
    state = make_state("cuda")
    shards = split_replicated(state, groups.rank, groups.world_size)
    more = {"rank": groups.rank, "world_size": groups.world_size, "group": groups.dp.group}
    save_checkpoint(root, 1, shards, {"a": 1}, **more)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert load_checkpoint(root, whole_tensors(found), **more).metadata == {"a": 1}
    return all(torch.equal(found[name], state[name]) for name in found)


@pytest.mark.multi_gpu
def test_two_ranks_agree_over_nccl(tmp_path):
    assert run_distributed(_over_nccl, 2, str(tmp_path), backend="nccl", timeout=120) == [
        True,
        True,
    ]
