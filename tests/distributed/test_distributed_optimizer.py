"""Tests of ``--use-distributed-optimizer``: each rank updates its share, numbers stay the same.

Sums of two numbers do not depend on their order. So all results are compared bit for bit with two
ranks, and with four ranks of which two have nothing to add. With four ranks gloo's reduce-scatter
and all-reduce round differently. There one comparison uses gradients with exact sums, and
`test_covering_layouts.py` compares four ranks that all have work with one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed import collectives
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import BufferPart, Ownership
from megatron_packed.models.metrics_layout import MetricsLayout
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.held_state import held_state
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import Job, build_job
from support.process_pools import WorkerPools, run_distributed
from support.whole_state import assert_same_bits, same_bits

SLOTS, VOCAB = 48, 211
MODEL = ModelConfig(
    hybrid_layer_pattern="M*-E",
    hidden_size=40,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=56,
    mamba_head_dim=8,
    mamba_state_dim=16,
    mamba_num_groups=2,
    mamba_chunk_size=8,
    add_bias_linear=False,
    normalization="RMSNorm",
    squared_relu=True,
    position_embedding_type="rope",
    num_experts=5,
    moe_ffn_hidden_size=24,
    moe_aux_loss_coeff=1e-2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
Found = dict[str, Any]
BAD_STEP = 2


def job_of(
    groups: ParallelGroups, distributed: bool, *, bf16: bool, clip: float = 0.5, seed: int = 1
) -> Job:
    return build_job(config_of(distributed, bf16=bf16, clip=clip, seed=seed), groups, VOCAB)


def config_of(distributed: bool, *, bf16: bool, clip: float, seed: int) -> RunConfig:
    return RunConfig(
        model=MODEL,
        data=DataConfig(train_data_path=("absent.jsonl",), sft=True),
        packing=PackingConfig(seq_length=SLOTS, global_batch_size=4),
        optim=OptimizerConfig(lr=1e-2, clip_grad=clip),
        parallel=ParallelConfig(use_distributed_optimizer=distributed),
        training=TrainingConfig(train_iters=5, device="cpu", bf16=bf16, seed=seed),
    )


def micro_batches(step: int, rank: int, count: int, *, empty: bool = False) -> list[MicroBatch]:
    draw = np.random.default_rng([step, rank])
    packs = [
        [] if empty else [(draw.integers(0, VOCAB, n), None) for n in (19, 8, 3)]
        for _ in range(count)
    ]
    return [MicroBatch.build(pack, SLOTS, scales=(1 / 100, 1 / 8)) for pack in packs]


def everything(job: Job) -> Found:
    """Return weights and expert biases, and this rank's ranges of the optimizer state."""
    shards = [held.shard for held in held_state(job.model, job.optimizer)]
    return {
        "model": {
            s.name: s.tensor.view(s.global_shape).clone()
            for s in shards
            if s.name.startswith("model/")
        },
        "state": [
            (s.name, s.global_shape, s.start, s.tensor.clone())
            for s in shards
            if s.name.startswith("optim")
        ],
    }


def assembled(ranks: list[Found]) -> dict[str, Tensor]:
    """Assemble model and optimizer state, each element from its owner.

    Ranks must agree on elements that several of them hold.
    """
    whole = dict(ranks[0]["model"])
    for found in ranks[1:]:
        assert found["model"].keys() == ranks[0]["model"].keys()
        assert all(same_bits(tensor, whole[name]) for name, tensor in found["model"].items())
    seen: dict[str, Tensor] = {}
    for found in ranks:
        for name, shape, start, part in found["state"]:
            tensor = whole.setdefault(name, torch.zeros(shape))
            filled = seen.setdefault(name, torch.zeros(tensor.numel(), dtype=torch.bool))
            place = slice(start, start + part.numel())
            assert not filled[place].any() or same_bits(tensor.view(-1)[place], part), name
            tensor.view(-1)[place] = part
            filled[place] = True
    assert all(filled.all() for filled in seen.values())
    return whole


def train(
    groups: ParallelGroups,
    distributed: bool,
    bf16: bool,
    clip: float,
    accumulate: int,
) -> Found:
    """Run four steps; in `BAD_STEP` the last rank has an infinite gradient.

    The first rank owns the element with the infinite gradient. Two of four ranks have nothing to
    add.
    """
    job = job_of(groups, distributed, bf16=bf16, clip=clip)
    reduce, metrics = job.buffers.reduce, []

    def spoilt(over: ParallelGroups) -> None:
        if groups.rank == groups.world_size - 1:
            job.buffers.grads[3] = float("inf")
        reduce(over)

    for step in range(4):
        job.buffers.reduce = spoilt if step == BAD_STEP else reduce  # type: ignore[method-assign]
        before = everything(job)
        idle = groups.world_size == 4 and groups.rank in (1, 2)
        metrics.append(
            job.step(micro_batches(step, groups.rank, accumulate, empty=idle), 1e-2).clone()
        )
        if step == BAD_STEP:
            after = everything(job)
            assert all(
                same_bits(after["model"][name], tensor) for name, tensor in before["model"].items()
            )
            assert all(same_bits(a[3], b[3]) for a, b in zip(after["state"], before["state"]))
    return {"metrics": torch.stack(metrics), "steps": job.optimizer.steps.item(), **everything(job)}


@pytest.mark.parametrize(
    ("world_size", "bf16", "clip", "accumulate"),
    [
        (1, True, 0.05, 3),
        (2, False, 0.0, 1),
        (2, False, 0.05, 3),
        (2, True, 0.0, 1),
        (2, True, 0.05, 3),
        (4, False, 0.05, 3),
        (4, True, 0.0, 1),
    ],
)
def test_steps_are_those_of_the_all_reduce(
    world_size: int, bf16: bool, clip: float, accumulate: int, pools: WorkerPools
) -> None:
    """Check that losses, norms, weights, masters and moments are equal bit for bit.

    The third of four steps has a gradient that is not finite.
    """
    expected, found = (
        pools.run(train, world_size, distributed, bf16, clip, accumulate)
        for distributed in (False, True)
    )
    for one, other in zip(expected, found):
        assert same_bits(one["metrics"], other["metrics"])
        slots = MetricsLayout(world_size).slots
        losses, norms, skipped = (
            other["metrics"][:, slots[name]].squeeze(1)
            for name in ("loss", "grad_norm", "nonfinite")
        )
        assert skipped.tolist() == [0, 0, 1, 0] and other["steps"] == 3
        assert (
            losses.min() > 0 and losses.unique().numel() == 4 and (clip == 0 or norms.min() > clip)
        )
    assert_same_bits(assembled(expected), assembled(found))


class Odd(nn.Module):
    """Module with sizes that no number of ranks divides.

    The shares of 2 and of 4 ranks end inside tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        sizes = {"one": (83, 111), "two": (9001,), "three": (7,), "none": (0, 3)}
        for dtype, kind in ((torch.bfloat16, "low"), (torch.float32, "high")):
            for name, size in sizes.items():
                values = torch.randn(size, generator=draw).to(dtype)
                self.register_parameter(f"{kind}_{name}", nn.Parameter(values))
                self.get_parameter(f"{kind}_{name}").no_weight_decay = name == "two"  # type: ignore[attr-defined]


def exact_gradients(groups: ParallelGroups, distributed: bool, clip: float) -> Found:
    """Run three steps on gradients of few bits; return results, memory sizes and collectives.

    On a GPU no operation in the step waits for the device.
    """
    module = Odd().to(groups.device)
    ownership = Ownership.over(groups) if distributed else None
    buffers = FlatBuffers(module, extras={"loss": 1}, counters={"experts": 3}, ownership=ownership)
    optimizer = Optimizer(buffers, clip_grad=clip, weight_decay=0.1)
    addresses = [p.data_ptr() for p in module.parameters()]
    calls: list[tuple[str, int]] = []
    norms = []
    for step in range(3):
        buffers.zero_grad()
        for name, parameter in buffers.parameters.items():
            draw = torch.Generator().manual_seed(97 * step + groups.rank + 7 * len(name))
            parameter.main_grad.copy_(torch.randint(-64, 65, parameter.shape, generator=draw) / 256)
        buffers.extras["loss"].fill_(groups.rank + 1)
        buffers.counters["experts"].add_(
            torch.tensor([2**24 + 1, 0, groups.rank], device=groups.device)
        )
        with noted(calls), no_wait(groups.device if step else torch.device("cpu")):
            buffers.reduce(groups)
            norms.append(optimizer.step(1e-2, loss=buffers.extras["loss"]).grad_norm.clone())
    starts = optimizer.state_starts()
    return {
        "model": {name: p.detach().clone() for name, p in module.named_parameters()},
        "state": [
            (name, optimizer.global_shapes()[name], starts[name], view.clone())
            for name, view in optimizer.state_shards().items()
        ],
        "norms": torch.stack(norms),
        "extras": [buffers.extras["loss"].tolist(), buffers.counters["experts"].value().tolist()],
        "calls": calls,
        "moved": addresses != [p.data_ptr() for p in module.parameters()],
        "sizes": {
            "elements": buffers.layout.numel,
            "bf16": buffers.params[BufferPart(torch.bfloat16)].numel(),
            "master": sum(master.numel() for _, master in optimizer._low_masters),
            "moments": (optimizer.exp_avg.numel(), optimizer.exp_avg_sq.numel()),
            "updated": sum(t.numel() for group in optimizer._slices for t in group.params),
        },
    }


@contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Make operations that wait for the GPU raise an error inside the context."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def noted(calls: list[tuple[str, int]]) -> Iterator[None]:
    """Record name and number of elements of every collective called inside the context."""

    def noting(name: str, whole: int, call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args[whole].numel()))
            return call(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noting("all_reduce", 0, dist.all_reduce))
        patch.setattr(
            collectives, "_reduce_scatter", noting("reduce_scatter", 1, collectives._reduce_scatter)
        )
        patch.setattr(collectives, "_all_gather", noting("all_gather", 0, collectives._all_gather))
        yield


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_odd_sizes_with_sums_that_are_exact(
    world_size: int, clip: float, pools: WorkerPools
) -> None:
    expected, found = (
        pools.run(exact_gradients, world_size, distributed, clip) for distributed in (False, True)
    )
    assert_same_bits(assembled(expected), assembled(found))
    ranks = range(world_size)
    for one, other in zip(expected, found):
        assert (
            same_bits(one["norms"], other["norms"])
            and one["norms"].min() > 1
            and not other["moved"]
        )
        assert (
            one["extras"]
            == other["extras"]
            == [
                [world_size * (world_size + 1) / 2],
                [world_size * (2**24 + 1), 0, sum(ranks)],
            ]
        )


@pytest.mark.multi_gpu
def test_odd_sizes_on_two_gpus() -> None:
    expected, found = (
        run_distributed(exact_gradients, 2, flag, 1.0, backend="nccl") for flag in (False, True)
    )
    assert_same_bits(assembled(expected), assembled(found))
    for one, other in zip(expected, found):
        assert same_bits(one["norms"], other["norms"]) and one["extras"] == other["extras"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_keeps_its_part_alone(world_size: int, pools: WorkerPools) -> None:
    """Check that masters and moments need 1 / ranks of the memory.

    No collective transfers all gradients to all ranks.
    """
    found = pools.run(exact_gradients, world_size, True, 1.0)
    for result in found:
        sizes, calls = result["sizes"], result["calls"]
        assert (
            sizes["master"] * world_size == sizes["bf16"]
            and sizes["updated"] * world_size == sizes["elements"]
        )
        assert sizes["moments"] == (sizes["elements"] // world_size,) * 2
        low, high = sizes["bf16"], sizes["elements"] - sizes["bf16"]
        one_step = [
            ("reduce_scatter", low),
            ("reduce_scatter", high),
            ("all_reduce", 64),
            ("all_reduce", 2),
            ("all_gather", low),
            ("all_gather", high),
        ]
        assert calls == (3 * one_step if world_size > 1 else [])
    starts = [
        start
        for result in found
        for name, _, start, _ in result["state"]
        if name.startswith("exp_avg/")
    ]
    # At least one share begins inside a row of a matrix.
    assert world_size == 1 or any(start % 111 for start in starts)


def run_state(job: Job, groups: ParallelGroups, distributed: bool, bf16: bool) -> RunState:
    config = config_of(distributed, bf16=bf16, clip=0.5, seed=1)
    return RunState(job.model, job.optimizer, groups, AskedRun(config=config))


def save(groups: ParallelGroups, folder: str, distributed: bool, bf16: bool) -> Found:
    """Run two steps, save, and run one more step."""
    job = job_of(groups, distributed, bf16=bf16)
    for step in range(2):
        job.step(micro_batches(step, groups.rank, 1), 1e-2)
    saved = run_state(job, groups, distributed, bf16).save(CheckpointConfig(save=folder))
    sizes = [file.stat().st_size for file in sorted(saved.path.glob("rank_*"))]
    then = everything(job)
    job.step(micro_batches(2, groups.rank, 1), 1e-2)
    return {**then, "later": everything(job), "sizes": sizes}


def load(
    groups: ParallelGroups, folder: str, distributed: bool, bf16: bool, finetune: bool = False
) -> Found:
    """Load a checkpoint into a job with other weights; return its state.

    Two ranks, whose sums are exact, also run a step and return the state after it.
    """
    job = job_of(groups, distributed, bf16=bf16, seed=2)
    addresses = [p.data_ptr() for p in job.model.parameters()]
    run_state(job, groups, distributed, bf16).load(CheckpointConfig(load=folder, finetune=finetune))
    then = everything(job)
    assert addresses == [p.data_ptr() for p in job.model.parameters()]
    if groups.world_size != 2:
        return then
    job.step(micro_batches(2, groups.rank, 1), 1e-2)
    return {**then, "later": everything(job)}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_checkpoints_load_into_any_number_of_ranks(
    distributed: bool, bf16: bool, tmp_path: Path, pools: WorkerPools
) -> None:
    written = pools.run(save, 2, str(tmp_path), distributed, bf16)
    expected, later = assembled(written), assembled([rank["later"] for rank in written])
    assert any(
        tensor.any() for name, tensor in expected.items() if name.startswith("optimizer/exp_avg/")
    )
    one, two = written[0]["sizes"]
    assert max(one, two) < 1.5 * min(one, two)  # Both ranks write.
    for world_size in (1, 2, 4):
        for into_distributed in (False, True):
            found = pools.run(load, world_size, str(tmp_path), into_distributed, bf16)
            assert_same_bits(assembled(found), expected)
            if world_size == 2:  # Sums of two numbers are the same with every collective.
                assert_same_bits(assembled([rank["later"] for rank in found]), later)


def test_finetuning_takes_masters_from_the_weights(tmp_path: Path, pools: WorkerPools) -> None:
    expected = assembled(pools.run(save, 2, str(tmp_path), False, True))
    found = pools.run(load, 2, str(tmp_path), True, True, True)
    state = assembled(found)
    for name, tensor in state.items():
        if name.startswith("optimizer/master/"):
            weight = expected[name.replace("optimizer/master/", "model/")]
            assert torch.equal(tensor, weight.float()), name
        elif name.startswith("optimizer/"):
            assert not tensor.any()
    plain = pools.run(load, 2, str(tmp_path), False, True, True)
    assert_same_bits(assembled([r["later"] for r in plain]), assembled([r["later"] for r in found]))


def whole_state(groups: ParallelGroups, distributed: bool) -> Found:
    """Check that ``load_state`` accepts unsplit tensors in every sharding, and gathers the weights."""
    module = Odd()
    optimizer = Optimizer(
        FlatBuffers(module, ownership=Ownership.over(groups) if distributed else None)
    )
    shapes = optimizer.global_shapes()
    draw = torch.Generator().manual_seed(5)
    state = {name: torch.rand(shape, generator=draw) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=r"missing \['step'\]"):
        optimizer.load_state({name: tensor for name, tensor in state.items() if name != "step"})
    optimizer.load_state(state)
    parts = optimizer.state_shards()
    return {
        "model": {name: p.detach().clone() for name, p in module.named_parameters()},
        "state": [
            (name, shapes[name], optimizer.state_starts()[name], part.clone())
            for name, part in parts.items()
        ],
    }


def test_a_whole_state_is_loaded_by_its_owners(pools: WorkerPools) -> None:
    expected = assembled(pools.run(whole_state, 1, False))
    for world_size in (2, 4):
        assert_same_bits(assembled(pools.run(whole_state, world_size, True)), expected)
