"""Expert parallelism: every layout and dispatcher computes what one process computes, and says when it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.testing import WorkerPools
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch

sys.path.append(str(Path(__file__).parents[1] / "unit" / "models"))
import hybrid_cases as cases

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
EXPERTS = 8
PACKS = 4
"""One of them is all tail."""
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {"ep_size": 2}),
    (2, {"tp_size": 2, "expert_tp_size": 1}),
    (2, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 2}),
    (4, {"ep_size": 4}),
    (4, {"ep_size": 2}),
    (4, {"tp_size": 2, "ep_size": 2}),
    (4, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 2}),
    (4, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 4}),
    (4, {"tp_size": 4, "expert_tp_size": 1, "ep_size": 2}),
]
NAMES = [" ".join(f"{name[:-5]}{size}" for name, size in ({"world_size": w} | sizes).items()) for w, sizes in LAYOUTS]

TIED = {"untie_embeddings_and_output_weights": False}
SOFTMAX = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, **TIED}
SIGMOID = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk": 3,
    "moe_shared_expert_intermediate_size": 24, "squared_relu": False, "swiglu": True, "moe_aux_loss_coeff": 0.1,
}  # fmt: skip
ALLGATHER, ALLTOALL = {"moe_token_dispatcher_type": "allgather"}, {"moe_token_dispatcher_type": "alltoall"}
CAPACITY = {"moe_expert_capacity_factor": 0.6}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}


@dataclass(frozen=True)
class Run:
    """One model and how it is run."""

    changes: dict[str, Any] = field(default_factory=dict)
    pattern: str = "M*-E"
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float64
    favourite: int | None = None
    """Every token chooses this expert first."""
    full_buffers: bool = False
    mutation: str | None = None

    @property
    def of_one_process(self) -> Run:
        return replace(self, sequence_parallel=False, full_buffers=False, mutation=None)

    def __hash__(self) -> int:
        return hash(repr(self))


def build(run: Run, groups: ParallelGroups | None) -> HybridModel:
    model = HybridModel(
        cases.tiny_config(run.pattern, num_experts=EXPERTS, **run.changes),
        vocab_size=cases.VOCAB,
        max_positions=64,
        groups=groups,
        sequence_parallel=run.sequence_parallel,
        dtype=run.dtype,
        seed=7,
    ).train()
    with torch.no_grad():
        for layer in model.moe_layers:
            router = layer.mixer.router
            router.weight.mul_(4)  # clear choices: rounding must not flip one
            if router.expert_bias is not None:
                router.expert_bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS))
                if run.favourite is not None:
                    router.expert_bias[run.favourite] = 10
    if run.dtype == torch.float64:  # those that stay float32 too: their gradients are compared as closely as all others
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    return model


@lru_cache
def packs() -> list[MicroBatch]:
    every = [cases.make_documents(cases.AWKWARD, seed=seed) for seed in range(PACKS - 1)]
    slots, targets = sum(cases.AWKWARD) + 13, sum(map(cases.count_targets, every))
    every.insert(2, [])
    return [
        cases.make_pack(documents, slots - sum(len(tokens) for tokens, _ in documents), 2, 1 / PACKS, targets)
        for documents in every
    ]


def train(run: Run, groups: ParallelGroups | None = None) -> dict[str, Any]:
    """This rank's packs one after the other: what they give, and this rank's parts of all summed gradients."""
    rank, ranks = (groups.dp_rank, groups.dp_size) if groups else (0, 1)
    with mutated(run.mutation):
        model = build(run, groups)
        shared = model.shared_gradients()
        outputs = {}
        for number in range(rank, PACKS, ranks):
            with model.full_expert_buffers() if run.full_buffers else nullcontext():
                output = model(packs()[number])
            output.loss.backward()
            outputs[number] = [value.detach() for value in output]
        shared.sum()
        sharded = model.sharded_parameters()
        for part in sharded.values():
            if groups is not None:
                group = groups.expert_dp_group if part.is_expert else groups.dp_cp_group
                all_reduce_sum(part.parameter.grad, group)
        return {
            "outputs": outputs,
            "shards": {
                name: (part.shard, tuple(part.global_shape), part.flat_pieces()) for name, part in sharded.items()
            },
            "parameters": {name: part.parameter.detach().clone() for name, part in sharded.items()},
            "gradients": {name: part.parameter.grad.clone() for name, part in sharded.items()},
        }


def train_ranks(groups: ParallelGroups, runs: list[Run]) -> list[dict[str, Any]]:
    return [train(run, groups) for run in runs]


@lru_cache
def reference(run: Run) -> dict[str, Any]:
    return train(run)


def whole(ranks: list[dict[str, Any]], kind: str, name: str) -> Tensor:
    """The tensor of one process, from the parts of all ranks; copies must agree bit for bit."""
    shape = ranks[0]["shards"][name][1]
    result = torch.full(shape, float("nan"), dtype=ranks[0][kind][name].dtype)
    by_ranges = torch.full_like(result, float("nan")).flatten()
    for rank in ranks:
        shard, its_shape, flat_pieces = rank["shards"][name]
        assert its_shape == shape
        local = rank[kind][name]
        taken = shard.take(result)
        assert torch.equal(torch.where(taken.isnan(), local, taken), local), f"{name}: copies differ"
        shard.place(local, result)
        for piece in flat_pieces:
            place = by_ranges[piece.global_start : piece.global_start + piece.length]
            place.copy_(local.flatten()[piece.local_start : piece.local_start + piece.length])
    assert torch.equal(by_ranges.view(shape), result), f"{name}: flat ranges and pieces differ"
    return result


def errors(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, float]:
    """Relative errors of everything that one process computes; and that parameters are the same to the bit."""
    found = {}
    for rank in ranks:
        for number, outputs in rank["outputs"].items():
            for i, (value, other) in enumerate(zip(outputs, expected["outputs"][number], strict=True)):
                if other.numel():
                    found[f"output {i} of pack {number}"] = cases.relative_error(value, other)
    for name, parameter in expected["parameters"].items():
        assert torch.equal(whole(ranks, "parameters", name), parameter), name
        gradient = expected["gradients"][name]
        found[name] = cases.relative_error(whole(ranks, "gradients", name), gradient)
        assert gradient.abs().max() > 0, f"{name}: a gradient that is 0 shows nothing"
    return found


def check(pools: WorkerPools, world_size: int, layout: dict[str, int], runs: list[Run]) -> None:
    results = pools.run(train_ranks, world_size, runs, layout=layout)
    for i, run in enumerate(runs):
        ranks = [result[i] for result in results]
        assert {number for rank in ranks for number in rank["outputs"]} == set(range(PACKS))
        found = errors(ranks, reference(run.of_one_process))
        where = max(found, key=found.__getitem__)
        assert found[where] <= TOLERANCES[run.dtype], f"{run}: {where} differs by {found[where]:.2e}"


def with_and_without_sequence_parallel(layout: dict[str, int], runs: list[Run]) -> list[Run]:
    choices = (False, True) if layout.get("tp_size", 1) > 1 else (False,)
    return [replace(run, sequence_parallel=choice) for run in runs for choice in choices]


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    owner, attribute, replacement = PATCHES[name]
    with mock.patch.object(owner, attribute, replacement):
        yield


PATCHES: dict[str, Any] = {}


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=NAMES)
def test_ranks_compute_what_one_process_computes(pools: WorkerPools, world_size: int, layout: dict[str, int]) -> None:
    runs = [Run({**SOFTMAX, **kind}) for kind in (ALLGATHER, ALLTOALL)]
    runs += [Run({**SIGMOID, **kind}, "E*E") for kind in (ALLGATHER, ALLTOALL)]
    runs += [replace(run, dtype=torch.float32) for run in runs]
    check(pools, world_size, layout, with_and_without_sequence_parallel(layout, runs))
