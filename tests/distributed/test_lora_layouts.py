"""Adapters in parallel layouts: losses, gradients and updates are those of one process.

The model has every kind of layer, multi-token prediction, latent and shared experts. After the first
step the first moments of B are its gradients. From the second step on, A has gradients, too.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import seed_all
from megatron_packed.distributed.tensor_parallel_shards import Shard, shard_of
from megatron_packed.layers.lora import Lora
from megatron_packed.training.build_job import build_job
from support.layouts import SLOTS, VOCAB, Way, config_of, mine, step_values
from support.parallel_graphs import REPLAYED, replay
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, everything

Options = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
"""Changes of a run's sections: name of a section, and the values of its options."""
PACKS, STEPS = 2, 2
"""Packs of a replica in one step, and number of steps."""
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
NO_OPTIONS: Options = ()
OVERLAP: Options = (
    (
        "parallel",
        (("overlap_grad_reduce", True), ("overlap_param_gather", True), ("ddp_bucket_size", 500)),
    ),
)
FULL: Options = (
    (
        "memory",
        (
            ("recompute_granularity", "full"),
            ("recompute_method", "uniform"),
            ("recompute_num_layers", 2),
        ),
    ),
)
SELECTIVE: Options = (
    (
        "memory",
        (
            ("recompute_granularity", "selective"),
            ("recompute_modules", ("core_attn", "mamba", "gdn", "mlp", "moe", "layernorm")),
        ),
    ),
)
OFFLOAD: Options = (
    (
        "memory",
        (
            ("fine_grained_activation_offloading", True),
            (
                "offload_modules",
                ("qkv_linear", "core_attn", "attn_proj", "mamba_in_proj", "expert_fc1"),
            ),
            ("min_offloaded_tensor_size", 1),
        ),
    ),
)
LOW_STATE: Options = (
    (
        "optim",
        (
            ("use_precision_aware_optimizer", True),
            ("exp_avg_dtype", "bf16"),
            ("exp_avg_sq_dtype", "bf16"),
        ),
    ),
)


class Case(NamedTuple):
    """Layout and options of a run."""

    way: Way
    options: Options = NO_OPTIONS
    model: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1
    """Data-parallel ranks of the layout with whose packs one process trains."""

    @property
    def packs(self) -> int:
        return PACKS * max(self.way.dp_size, self.replicas)

    @property
    def config(self) -> RunConfig:
        config = config_of(self.way, **LORA, **dict(self.model))
        changes = {
            name: dataclasses.replace(getattr(config, name), **dict(values))
            for name, values in self.options
        }
        return dataclasses.replace(config, **changes)


CASES = {
    "TP2": Case(Way(2, 2)),
    "TP2, sequence parallel": Case(Way(2, 2, True)),
    "TP2, sequence parallel, overlap": Case(Way(2, 2, True, tp_overlap=True)),
    "TP2, one key-value head": Case(Way(2, 2), model=(("num_query_groups", 1),)),
    "TP2, dropout": Case(Way(2, 2), model=(("lora_dropout", 0.2), ("moe_latent_size", None))),
    "CP2": Case(Way(2, cp_size=2)),
    "CP2, exchanged heads": Case(Way(2, cp_size=2, mamba="heads", linear="headwise")),
    "EP2": Case(Way(2, ep_size=2)),
    "EP2, alltoall": Case(Way(2, ep_size=2, dispatcher="alltoall")),
    "EP2 x TP2, sequence parallel": Case(Way(4, 2, True, False, 2)),
    "EP2 x TP4, two ranks share an expert": Case(Way(4, 4, False, True, 2, 2)),
    "DP2, ZeRO-1, overlaps": Case(Way(2, distributed_optimizer=True), OVERLAP),
    "TP2, all recomputed": Case(Way(2, 2, True), FULL),
    "TP2, parts recomputed": Case(Way(2, 2), SELECTIVE),
    "TP2, offload": Case(Way(2, 2, True), OFFLOAD),
    "DP2, state in bf16": Case(Way(2, distributed_optimizer=True), LOW_STATE),
    "whole weights beside": Case(
        Way(2, 2, True),
        model=(
            ("lora_modules_to_save", ("embedding.*", "*norm.weight", "*.router.weight")),
            ("lora_keep_balancing", True),
        ),
    ),
    "some matrices": Case(
        Way(2, 2), model=(("lora_target_modules", ("q_proj", "v_proj", "experts", "eh_proj")),)
    ),
}


def train(groups: ParallelGroups, case: Case) -> tuple[list[list[float]], list[Shards], list[str]]:
    """Return losses and gradient norms, the state after each step, and the trained parameters."""
    job = build_job(case.config, groups, VOCAB)
    bias = {name: each.clone() for name, each in job.model.named_buffers() if "expert_bias" in name}
    numbers, states = [], []
    for step in range(STEPS):
        values = step_values(job.step(mine(groups, case.way, step, case.packs), 1e-2).tolist())
        numbers.append([values.loss, values.grad_norm, values.aux_loss])
        states.append(everything(job))
    moved = [n for n, each in job.model.named_buffers() if n in bias and not each.equal(bias[n])]
    assert bool(moved) == job.model.config.balances_experts
    return numbers, states, list(job.buffers.parameters)


@cache
def alone(options: Options, model: tuple[tuple[str, Any], ...], replicas: int) -> Any:
    seed_all(0)  # the processes of a pool get the same seed
    kept = tuple(each for each in options if each[0] == "optim")
    numbers, states, trained = train(ParallelGroups.single(), Case(Way(), kept, model, replicas))
    return torch.tensor(numbers), [assembled([state]) for state in states], trained


@pytest.mark.shows("eager", of=lambda name: (CASES[name].way.world_size, CASES[name].config))
@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_in_one_process(name: str, pools: WorkerPools) -> None:
    case = CASES[name]
    ranks = pools.run(train, case.way.world_size, case, layout=case.way.layout)
    one_process = alone(case.options, case.model, case.way.dp_size)
    compare(ranks, one_process, low=case.options == LOW_STATE)


def compare(ranks: list[Any], one_process: Any, *, low: bool = False) -> None:
    """Compare losses, gradients and updates of all ranks with those of one process."""
    numbers, states, trained = one_process
    for found, _, names in ranks:
        torch.testing.assert_close(torch.tensor(found), numbers, rtol=2e-5, atol=1e-7)
        assert {*names} == {*trained}
    for step, wanted in enumerate(states):
        state = assembled([rank[1][step] for rank in ranks])
        assert state.keys() == wanted.keys()
        for key, want in wanted.items():
            if "exp_avg_sq" in key or "expert_bias" in key:
                continue
            check_gradient(key, want, step)
            scale = want.float().abs().max().item()
            # B begins at zero, so after a step it shows the relative error of an update.
            exact = step == 0 and not key.startswith("model/")
            tolerance = 1e-5 if exact else 1e-4
            atol = (1e-2 if low else tolerance) * scale
            torch.testing.assert_close(
                state[key].float(), want.float(), rtol=0, atol=atol, msg=f"{key} in step {step}"
            )


# -- dropout under sequence parallelism ------------------------------------------------------------

DROPOUT, TOLERANCE = 0.2, 0.02
"""Probability of dropout, and the largest difference of the share of dropped elements from it."""
MASKED = {
    "experts of all tokens": Way(2, 2, True),
    "experts of own tokens": Way(2, 2, True, expert_tp_size=1),
    "slices of a pack": Way(4, 2, True, cp_size=2),
}


class Mask(NamedTuple):
    """Mask of an input on a rank, and the shard of A, which has the columns of the input."""

    values_TI: Tensor
    shard: Shard


def train_with_own_masks(groups: ParallelGroups, case: Case) -> tuple[Any, list[Mask]]:
    """Train with the random numbers of a run, and return the masks in the order of their use."""
    masks: list[Mask] = []
    dropped = Lora._dropped

    def recorded(lora: Lora, x_TI: Tensor) -> Tensor:
        mask_TI = dropped(lora, torch.ones_like(x_TI))
        masks.append(Mask(mask_TI, shard_of(lora.A, groups.tp.size)))
        return x_TI * mask_TI

    seed_all(0, cp_rank=groups.cp.rank, tp_rank=groups.tp.rank)
    with mock.patch.object(Lora, "_dropped", recorded):
        return train(groups, case), masks


def of_one_process(masks: list[Mask], way: Way) -> Tensor:
    """Return the mask of all rows and columns from those of the ranks."""
    firsts = range(0, way.world_size, way.tp_size)
    rows = SLOTS // way.cp_size
    return torch.cat([of_slice(masks[first : first + way.tp_size], rows) for first in firsts])


def of_slice(masks: list[Mask], rows: int) -> Tensor:
    """Return the mask of the rows of a context-parallel rank from those of its tensor-parallel ranks."""
    mask_TI, shard = masks[0]
    if shard.dim == 1:
        whole_TI = torch.empty(rows, shard.length)
        for mask in masks:
            mask.shard.place(mask.values_TI, whole_TI)
        return whole_TI
    if mask_TI.shape[0] < rows:
        return torch.cat([mask.values_TI for mask in masks])
    assert all(torch.equal(mask.values_TI, mask_TI) for mask in masks)
    return mask_TI


@pytest.mark.parametrize("name", MASKED)
def test_ranks_drop_elements_of_their_own_rows(name: str, pools: WorkerPools) -> None:
    """Check that one process with the masks of the ranks has the same losses and gradients."""
    way = MASKED[name]
    case = Case(way, model=(("lora_dropout", DROPOUT),))
    ranks = pools.run(train_with_own_masks, way.world_size, case, layout=way.layout)
    calls = zip(*(rank[1] for rank in ranks), strict=True)
    masks = [of_one_process(list(call), way) for call in calls]
    for mask_TI in masks:
        assert set(mask_TI.unique().tolist()) == {0.0, 1 / (1 - DROPOUT)}
        assert not torch.equal(*mask_TI.chunk(2)) and not torch.equal(*mask_TI.chunk(2, dim=1))
    zeros = torch.cat([mask_TI.flatten() for mask_TI in masks]) == 0
    assert zeros.double().mean().item() == pytest.approx(DROPOUT, abs=TOLERANCE)
    order = iter(masks)
    with mock.patch.object(Lora, "_dropped", lambda lora, x_TI: x_TI * next(order)):
        one_process = train(ParallelGroups.single(), Case(Way(), model=case.model))
    assert next(order, None) is None
    numbers, states, trained = one_process
    compare(
        [rank[0] for rank in ranks],
        (torch.tensor(numbers), [assembled([state]) for state in states], trained),
    )


def train_again(groups: ParallelGroups, cases: list[Case]) -> list[Any]:
    """Train in each way with the same random numbers."""
    found = []
    for case in cases:
        seed_all(0, tp_rank=groups.tp.rank)
        numbers, states, _ = train(groups, case)
        found.append((numbers, [by_range(state) for state in states]))
    return found


def by_range(state: Shards) -> dict[str, Tensor]:
    """Return a rank's state by name and range."""
    return {f"{name} {extent}": tensor for name, _, extent, tensor in state}


def test_recomputed_masks_are_the_same(pools: WorkerPools) -> None:
    way, model = Way(2, 2, True), (("lora_dropout", DROPOUT),)
    cases = [Case(way, options, model) for options in (NO_OPTIONS, FULL, SELECTIVE)]
    for plain, *recomputed in pools.run(train_again, 2, cases, layout=way.layout):
        for numbers, states in recomputed:
            assert numbers == plain[0]
            for found, wanted in zip(states, plain[1], strict=True):
                assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_replayed_steps_are_the_eager_ones(impl: str, pools: WorkerPools) -> None:
    way = Way(2, distributed_optimizer=True)
    for result in pools.run(replay, 2, way, LORA, impl):
        assert result == REPLAYED


def check_gradient(key: str, moment: Tensor, step: int) -> None:
    """Check that an adapter has a gradient: B from the first step on, and A from the second on."""
    if not key.startswith("optimizer/exp_avg/"):
        return
    per_adapter = moment.flatten(1) if moment.dim() > 2 else moment.flatten()[None]
    smallest = per_adapter.abs().amax(dim=1).min()
    if key.endswith("lora.A") and step == 0:
        assert smallest == 0, f"{key} has a gradient although B is zero"
    else:
        assert smallest > 0, f"{key} has no gradient in step {step}"
