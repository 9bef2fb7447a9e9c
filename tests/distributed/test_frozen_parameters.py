"""``--freeze-params``: losses, gradients and updates are those of plain torch with frozen weights.

The oracle is the model of one process without flat buffers: its frozen parameters have
``requires_grad`` False, torch computes every gradient, and ``torch.optim.AdamW`` updates the rest.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_job import build_job, build_model
from megatron_packed.training.replica_checks import ReplicaCheck, ReplicaMismatchError
from support.layouts import VOCAB, Way, config_of, mine, packs_of, step_values
from support.parallel_graphs import REPLAYED, replay
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, everything, same_bits

PATTERNS = {
    "the first layers": ("embedding.*", "layers.[01].*"),
    "parts of all layers": (
        "*.in_proj.weight",
        "*.mixer.A_log",
        "*.router.*",
        "*.fc2*",
        "*.proj.*",
    ),
    "all but norms": ("embedding.*", "*.mixer.*", "*.eh_proj.*"),
}
PACKS, STEPS = 6, 2
MODEL = {"moe_router_enable_expert_bias": False}  # its update is no gradient


def train(
    groups: ParallelGroups, way: Way, patterns: tuple[str, ...], overlap: bool
) -> tuple[list[float], list[Shards]]:
    """Return the loss of each step, and the state after each step."""
    config = config_of(way, freeze_params=patterns, **MODEL)
    parallel = dataclasses.replace(
        config.parallel, overlap_grad_reduce=overlap, ddp_bucket_size=3000
    )
    job = build_job(dataclasses.replace(config, parallel=parallel), groups, VOCAB)
    frozen = {name for name, p in job.model.named_parameters() if not p.requires_grad}
    assert frozen.isdisjoint(job.buffers.parameters)
    assert not any(hasattr(job.model.get_parameter(name), "main_grad") for name in frozen)
    losses, states = [], []
    for step in range(STEPS):
        values = step_values(job.step(mine(groups, way, step, PACKS), 1e-2).tolist())
        losses.append(values.loss)
        # No gradient of these models is exactly zero, and frozen weights are not counted as zeros.
        assert "embedding.weight" not in frozen or values.grad_zeros == 0
        states.append(everything(job))
    assert all(job.model.get_parameter(name).grad is None for name in frozen)
    return losses, states


@cache
def oracle(patterns: tuple[str, ...]) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Return the loss of each step, and weights and first moments by the names of checkpoints."""
    config = config_of(Way(), **MODEL)
    model = build_model(config, VOCAB, "cpu").train()
    chosen = build_model(config_of(Way(), freeze_params=patterns, **MODEL), VOCAB, "meta")
    for (_, parameter), (_, other) in zip(model.named_parameters(), chosen.named_parameters()):
        parameter.requires_grad_(other.requires_grad)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_decay = [
        {
            "params": [p for p in trained.values() if hasattr(p, "no_weight_decay") is not decay],
            "weight_decay": config.optim.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    betas, eps = (config.optim.adam_beta1, config.optim.adam_beta2), config.optim.adam_eps
    adamw = torch.optim.AdamW(by_decay, lr=1e-2, betas=betas, eps=eps)
    losses, states = [], []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = torch.zeros(())
        for pack in packs_of(Way(), step, PACKS):
            output = model(pack)
            output.loss.backward()
            loss += output.loss_sum.detach() * pack.scales[0]
        torch.nn.utils.clip_grad_norm_(trained.values(), config.optim.clip_grad)
        adamw.step()
        losses.append(loss.item())
        weights = {f"model/{name}": p.detach().clone() for name, p in model.named_parameters()}
        moments = {
            f"optimizer/exp_avg/{name}": adamw.state[p]["exp_avg"].clone()
            for name, p in trained.items()
        }
        states.append({**weights, **moments})
    return losses, states


@pytest.mark.parametrize(
    ("way", "name", "overlap"),
    [
        (Way(2), "parts of all layers", True),
        (Way(2, distributed_optimizer=True), "the first layers", True),
        (Way(2, 2, True), "the first layers", False),
        (Way(2, 2, True), "all but norms", False),
        (Way(2, cp_size=2), "the first layers", False),
        (Way(4, 1, False, True, 2), "parts of all layers", False),
    ],
    ids=str,
)
def test_gradients_and_updates_are_those_of_plain_torch(
    way: Way, name: str, overlap: bool, pools: WorkerPools
) -> None:
    """After the first step the first moments are the clipped gradients, times a constant."""
    patterns = PATTERNS[name]
    ranks = pools.run(train, way.world_size, way, patterns, overlap, layout=way.layout)
    losses, states = oracle(patterns)
    for own, _ in ranks:
        torch.testing.assert_close(own, losses, rtol=1e-5, atol=0)
    start = build_model(config_of(Way(), **MODEL), VOCAB, "cpu").state_dict()
    for step, expected in enumerate(states):
        state = assembled([rank_states[step] for _, rank_states in ranks])
        stored = {key for key in state if key.startswith(("model/", "optimizer/exp_avg/"))}
        assert stored == expected.keys()
        for key, wanted in expected.items():
            if f"optimizer/exp_avg/{key.removeprefix('model/')}" in expected or "exp_avg" in key:
                scale = wanted.abs().max().item()
                assert scale > 0, f"{key} is zero and shows nothing"
                torch.testing.assert_close(state[key], wanted, rtol=0, atol=1e-4 * scale, msg=key)
            else:
                assert same_bits(state[key], start[key.removeprefix("model/")][: len(wanted)]), key


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("the first layers", "local"),
        ("the first layers", "full_iteration"),
        ("parts of all layers", "local"),
        ("all but norms", "transformer_engine"),
    ],
)
def test_replayed_steps_are_the_eager_ones(name: str, impl: str, pools: WorkerPools) -> None:
    """The first layer is captured too, although its input depends on no trained parameter."""
    way = Way(2, distributed_optimizer=True)
    for result in pools.run(replay, 2, way, {"freeze_params": PATTERNS[name]}, impl):
        assert result == REPLAYED


def flip(groups: ParallelGroups, way: Way) -> str:
    """Change a frozen weight on the last rank, and return the error of the comparison."""
    patterns = ("embedding.*", "*.experts.*")
    job = build_job(config_of(way, bf16=True, freeze_params=patterns), groups, VOCAB)
    check = ReplicaCheck(job.model, job.optimizer, groups)
    check.weights()
    if groups.rank == groups.world_size - 1:
        with torch.no_grad():
            job.model.get_parameter("layers.3.mixer.experts.fc1").view(-1)[5] += 1
    with pytest.raises(ReplicaMismatchError) as raised:
        check.weights()
    return str(raised.value)


@pytest.mark.parametrize("way", [Way(2), Way(4, ep_size=2)], ids=str)
def test_replicas_of_frozen_weights_are_compared(way: Way, pools: WorkerPools) -> None:
    for message in pools.run(flip, way.world_size, way, layout=way.layout):
        assert "layers.3.mixer.experts.fc1" in message and "embedding" not in message
