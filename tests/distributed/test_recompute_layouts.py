"""Recomputation and offload in parallel layouts give the same bits as without them.

Recomputation runs collectives again in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import seed_all
from megatron_packed.training.build_job import build_job
from support.covering_layouts import VOCAB, Way, config_of, micro_batches
from support.process_pools import WorkerPools
from support.recorder import Recorder
from support.whole_state import everything, same_bits

PARTS = ("core_attn", "mamba", "gdn", "mlp", "moe", "layernorm", "moe_act")
MODES = {
    "groups": MemoryConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3
    ),
    "two layers": MemoryConfig(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=2
    ),
    "parts": MemoryConfig(recompute_granularity="selective", recompute_modules=PARTS),
    "offload": MemoryConfig(
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=3,
        offload_layer_inputs=True,
        fine_grained_activation_offloading=True,
        offload_modules=("expert_fc1", "moe_act"),
        min_offloaded_tensor_size=1,
    ),
}
MODES_OF_FIRST = ("two layers",)
"""Modes of the first layout alone: ``offload`` recomputes layers in the same way."""
WAYS = [
    Way(4, 2, "shared", 1, "none", 2, "allgather", "whole", "shared", "beside", 1),
    Way(4, 2, "whole", 2, "a2a", 2, "alltoall", "shared", "copied", "beside", 1),
    Way(4, 1, "none", 4, "p2p", 2, "alltoall", "none", "copied", "after", 1),
    Way(2, 1, "none", 2, "all_gather", 2, "alltoall", "none", "copied", "after", 1),
]
DEFAULTS = {
    "mamba_cp_comm_type": ParallelConfig.mamba_cp_comm_type,
    "linear_cp_mode": ParallelConfig.linear_cp_mode,
}
HEADS = {"mamba_cp_comm_type": "heads", "linear_cp_mode": "headwise"}


def one_step(config: RunConfig, groups: ParallelGroups) -> tuple[list[object], int]:
    """Return metrics, state and random state after one step, and its number of collectives.

    The state shows the gradients, because the first moments are gradients after one step.
    """
    seed_all(5, groups.dp.rank, cp_rank=groups.cp.rank, tp_rank=groups.tp.rank)
    job = build_job(config, groups, VOCAB)
    with Recorder() as recorder:
        metrics = job.step(micro_batches(config, groups, 0), 0.1)
    assert job.model.offload is None or job.model.offload._largest > 0, "nothing has left"
    return [metrics, everything(job), torch.get_rng_state()], len(recorder.collectives())


def compare(
    groups: ParallelGroups,
    way: Way,
    dropout: float,
    exchange: Mapping[str, str],
    expert_parts: int,
) -> dict[str, tuple[bool, int]]:
    """Compare each mode with a run without recomputation: equal results, and the number of
    additional collectives."""
    config = config_of(way)
    model = dataclasses.replace(config.model, hidden_dropout=dropout)
    model = dataclasses.replace(model, moe_comm_overlap_parts=expert_parts)
    parallel = dataclasses.replace(config.parallel, **exchange)
    config = dataclasses.replace(config, model=model, parallel=parallel)
    expected, fewest = one_step(config, groups)
    answers = {}
    for name in modes_of(way):
        memory = MODES[name]
        found, collectives = one_step(dataclasses.replace(config, memory=memory), groups)
        answers[name] = (alike(found, expected), collectives - fewest)
    return answers


def modes_of(way: Way) -> list[str]:
    return [name for name in MODES if way == WAYS[0] or name not in MODES_OF_FIRST]


def alike(found: list[object], expected: list[object]) -> bool:
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            if not torch.equal(one, other):
                return False
        elif not all(
            a[:1] == b[:1] and same_bits(a[3], b[3]) for a, b in zip(one, other, strict=True)
        ):
            return False
    return True


@pytest.mark.shows("recompute", of=lambda way: (way.processes, config_of(way), DEFAULTS))
@pytest.mark.shows("offload", of=lambda way: (way.processes, config_of(way), DEFAULTS))
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_bit_is_that_without(way: Way, pools: WorkerPools) -> None:
    check_every_bit(pools, way)


@pytest.mark.shows("recompute", "CP all_gather")
@pytest.mark.shows("offload", "CP all_gather")
def test_every_bit_is_that_without_where_heads_are_exchanged(pools: WorkerPools) -> None:
    check_every_bit(pools, WAYS[-1], HEADS)


@pytest.mark.shows("recompute", "EP alltoall")
@pytest.mark.shows("offload", "EP alltoall")
def test_every_bit_is_that_without_where_experts_compute_parts(pools: WorkerPools) -> None:
    check_every_bit(pools, WAYS[2], expert_parts=2)


def check_every_bit(
    pools: WorkerPools, way: Way, exchange: Mapping[str, str] = DEFAULTS, expert_parts: int = 1
) -> None:
    """Compare the modes with a run without them, on all ranks."""
    layout = {"tp_size": way.tp, "cp_size": way.cp, "ep_size": way.ep}
    layout["expert_tp_size"] = way.tp if way.matrices == "shared" else 1
    ranks = pools.run(compare, way.processes, way, 0.1, exchange, expert_parts, layout=layout)
    for mode in modes_of(way):
        answers = [rank[mode] for rank in ranks]
        assert all(same for same, _ in answers), mode
        assert len(set(answers)) == 1 and answers[0][1] > 0, (
            f"{mode}: collectives more than without: {answers}"
        )
