"""Steps whose equal parts travel through symmetric memory have the bits of steps with collectives.

Files that the processes map stand in for the memory of GPUs.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed import all_to_all
from megatron_packed.distributed.all_to_all import EqualExchange, exchange_equal_parts
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.equal_exchanges import exchange_line
from megatron_packed.training.build_job import build_job
from support.layouts import VOCAB, Way, config_of, mine
from support.process_pools import WorkerPools
from support.shared_file_exchange import PIECE_BYTES, SharedFileExchange, stand_in_exchanges
from support.whole_state import assembled, assert_same_bits, everything

CASES: dict[str, tuple[Way, dict[str, Any]]] = {
    "heads and rows": (Way(2, cp_size=2, ep_size=2, dispatcher="alltoall"), {}),
    "heads in parts": (
        Way(2, cp_size=2, mamba="heads", linear="headwise"),
        {"cp_comm_overlap_parts": 2},
    ),
    "rows of four ranks": (Way(4, ep_size=4, dispatcher="alltoall"), {"moe_dispatch": "rows"}),
    "tokens of four ranks": (Way(4, ep_size=4, dispatcher="alltoall"), {"moe_dispatch": "tokens"}),
    "rows in parts": (
        Way(4, ep_size=4, dispatcher="alltoall"),
        {"moe_dispatch": "rows", "moe_comm_overlap_parts": 3},
    ),
    "tokens in parts": (
        Way(2, ep_size=2, dispatcher="alltoall"),
        {"moe_dispatch": "tokens", "moe_comm_overlap_parts": 2},
    ),
}
"""Layout and more options of the run."""


POPULAR = slice(1, 3)
"""Experts that get all tokens.

Parts for their ranks have more used rows than are copied in any case. Parts for other ranks have
none.
"""
WIDE = {"moe_expert_rank_capacity_factor": 8.0, "moe_latent_size": 16}
"""Options of experts with room for all rows, whose parts have several pieces."""


def train(groups: ParallelGroups, way: Way, backend: str, flags: dict[str, Any]) -> dict[str, Any]:
    of_model = {name: flags[name] for name in flags if name.startswith("moe_")}
    flags = {name: flags[name] for name in flags.keys() - of_model.keys()}
    config = config_of(way, **(WIDE if way.ep_size > 1 else {}), **of_model)
    parallel = dataclasses.replace(config.parallel, all_to_all_backend=backend, **flags)
    config = dataclasses.replace(config, parallel=parallel)
    with stand_in_exchanges():
        job = build_job(config, groups, VOCAB)
    for name, buffer in job.model.named_buffers():
        if name.endswith("expert_bias"):
            buffer[POPULAR] = 1.0
    with collectives_fail() if backend == "symmetric_memory" else nullcontext():
        metrics = [
            job.step(mine(groups, way, step, way.dp_size), 1e-2).clone() for step in range(2)
        ]
    memories = [job.model.cp.exchange, job.model.ep.exchange]
    calls = [getattr(one.memory, "calls", 0) for one in memories if one is not None]
    line = exchange_line(job.model, config)
    job.close()
    return {
        "metrics": torch.stack(metrics),
        "state": everything(job),
        "calls": calls,
        "line": line,
        "closed": all(one is None or one.memory is None for one in memories),
    }


def collectives_fail() -> AbstractContextManager[Any]:
    """Return a context in which no equal parts can be exchanged by a collective."""
    return mock.patch.multiple(all_to_all, exchange_parts=None, start_exchange=None)


def train_both(groups: ParallelGroups, way: Way, flags: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(groups, way, backend, flags) for backend in ("nccl", "symmetric_memory")]


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_with_collectives(name: str, pools: WorkerPools) -> None:
    way, flags = CASES[name]
    ranks = pools.run(train_both, way.world_size, way, flags, layout=way.layout)
    plain, symmetric = zip(*ranks)
    assert_same_bits(
        assembled([rank["state"] for rank in symmetric]),
        assembled([rank["state"] for rank in plain]),
    )
    for one, other in zip(plain, symmetric):
        assert torch.equal(one["metrics"], other["metrics"])
        assert not any(one["calls"]) and one["line"] == ""
        assert all(other["calls"]) and other["closed"] and "symmetric memory" in other["line"]


def forward_and_backward(groups: ParallelGroups) -> dict[str, bool]:
    """Exchange messages of all sizes and layouts, forward and backward, both ways."""
    assert groups.tp.group is not None
    plain, symmetric = EqualExchange(groups.tp.group), EqualExchange(groups.tp.group)
    symmetric.memory = SharedFileExchange(groups.tp.group, groups.device, PIECE_BYTES)
    ranks, equal = groups.tp.size, {}
    for number, (rows, dtype) in enumerate(
        [(0, torch.float32), (1, torch.bfloat16), (77, torch.float64), (1500, torch.float32)]
    ):
        generator = torch.Generator().manual_seed(10 * number + groups.rank)
        # A view with moved dimensions: parts must be sent in the order of the elements.
        x, dy = torch.randn(2, 5, ranks, rows, generator=generator).to(dtype)
        results: list[list[Tensor]] = []
        for exchange in (plain, symmetric):
            leaf = x.clone().requires_grad_()
            y = exchange_equal_parts(leaf.movedim(2, 0), exchange)
            y.backward(dy.movedim(2, 0))
            results.append([y.detach(), leaf.grad])
        equal[f"{rows} rows, {dtype}"] = all(map(torch.equal, *results))
    return equal


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchange_and_gradient_are_those_of_the_collective(pools: WorkerPools, ranks: int) -> None:
    for found in pools.run(forward_and_backward, ranks, layout={"tp_size": ranks}):
        assert len(found) == 4 and all(found.values()), found
