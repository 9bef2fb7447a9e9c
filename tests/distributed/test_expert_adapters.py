"""Adapters of routed experts in parallel layouts: every step is that of one process.

With expert tensor parallelism one factor is split and the other is on all ranks that share the
matrices of experts, so these ranks sum the terms of its gradient.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_job import build_job
from support.layouts import VOCAB, Way, config_of, mine, step_values
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, everything

PACKS, STEPS = 4, 2
MODEL = {
    "hybrid_layer_pattern": "E/E",
    "squared_relu": False,
    "swiglu": True,  # fits no family with latent experts, so gate and up have an A each
    "moe_router_enable_expert_bias": False,
    "lora_rank": 4,
}
BOUNDED = {"moe_expert_rank_capacity_factor": 8.0}
PADDED = {"moe_expert_capacity_factor": 8.0, "moe_pad_expert_input_to_capacity": True}
DROPPING = {"moe_expert_capacity_factor": 0.5}


def train(
    groups: ParallelGroups, way: Way, changes: dict[str, float]
) -> tuple[list[tuple[float, ...]], list[Shards]]:
    """Return loss and norm of the gradients of each step, and the state after each step."""
    config = config_of(way, **MODEL, **changes)
    overlap = way.distributed_optimizer
    changed = {
        "optim": dataclasses.replace(config.optim, clip_grad=0.01),
        "parallel": dataclasses.replace(
            config.parallel, overlap_grad_reduce=overlap, ddp_bucket_size=3000
        ),
    }
    job = build_job(dataclasses.replace(config, **changed), groups, VOCAB)
    experts = [name for name in job.buffers.parameters if "experts" in name]
    assert len(experts) == 8 and not any(name.endswith(("fc1", "fc2")) for name in experts)
    reported, states = [], []
    for step in range(STEPS):
        values = step_values(job.step(mine(groups, way, step, PACKS), 1e-2).tolist())
        reported.append((values.loss, values.grad_norm))
        states.append(everything(job))
    return reported, states


@cache
def one_process(changes: tuple[tuple[str, float], ...]):
    return train(ParallelGroups.single(torch.device("cpu")), Way(), dict(changes))


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        (Way(2, ep_size=2), {}),
        (Way(2, ep_size=2, dispatcher="alltoall", distributed_optimizer=True), BOUNDED),
        (Way(2, ep_size=2, dispatcher="alltoall"), PADDED),
        (Way(2, ep_size=2, dispatcher="alltoall"), {"moe_comm_overlap_parts": 2}),
        (Way(2, tp_size=2), DROPPING),
        (Way(2, tp_size=2, expert_tp_size=1, ep_size=2, dispatcher="alltoall"), {}),
        (Way(4, 2, True, True, ep_size=2), {}),
        (Way(4, tp_size=4, expert_tp_size=2, ep_size=2), {}),
        (Way(4, 4, True, True, expert_tp_size=2), DROPPING),
    ],
    ids=lambda value: str(value) if isinstance(value, Way) else "-".join(value) or "plain",
)
def test_steps_are_those_of_one_process(
    way: Way, changes: dict[str, float], pools: WorkerPools
) -> None:
    ranks = pools.run(train, way.world_size, way, changes, layout=way.layout)
    wanted, states = one_process(tuple(changes.items()))
    for reported, _ in ranks:
        torch.testing.assert_close(reported, wanted, rtol=1e-5, atol=0)
    for step, state in enumerate(states):
        got, want = assembled([each[step] for _, each in ranks]), assembled([state])
        assert got.keys() == want.keys()
        for key, value in want.items():
            scale = value.abs().max().item()
            moved = "lora" in key and (step or not key.endswith("A"))
            assert scale > 0 or not moved, f"{key} is zero and shows nothing"
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-4 * scale, msg=key)
