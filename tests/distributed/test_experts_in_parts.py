"""Tests of rows for experts that travel in parts: equal results, and the order of the messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed import all_to_all
from megatron_packed.distributed.collectives import Started, start_exchange, wait_for
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.ops.grouped_mlp import grouped_linear, reference
from megatron_packed.ops.grouped_mlp.grouped_linear import Products, row_bounds
from megatron_packed.training.build_job import build_job
from support import rank_models
from support.layouts import VOCAB, Way, config_of
from support.parallel_graphs import LENGTHS, step_of
from support.process_pools import WorkerPools
from support.recorder import Recorder
from support.row_products import experts_row_by_row

PARTS = "moe_comm_overlap_parts"
ALLTOALL = {"moe_token_dispatcher_type": "alltoall", "moe_dispatch": "rows"}
TOKENS = {**ALLTOALL, "moe_dispatch": "tokens"}
BOUNDED = {"moe_expert_rank_capacity_factor": 8.0}
DROPPING = {"moe_expert_capacity_factor": 0.6}
PADDED = {**DROPPING, "moe_pad_expert_input_to_capacity": True}
ROUNDING = 1e-5
"""Largest difference of the gradient of an expert's weight, whose terms are added in another order,
relative to its largest value.
"""
KINDS = {
    "rows": ALLTOALL,
    "bounded rows": {**ALLTOALL, **BOUNDED},
    "rows within a capacity": {**ALLTOALL, **BOUNDED, **DROPPING},
    "padded rows": {**ALLTOALL, **PADDED},
    "tokens": TOKENS,
    "bounded tokens": {**TOKENS, **BOUNDED},
    "tokens within a capacity": {**TOKENS, **DROPPING},
    "padded tokens": {**TOKENS, **PADDED},
}
WAYS = [
    Way(2, ep_size=2, dispatcher="alltoall"),
    Way(4, ep_size=4, dispatcher="alltoall"),
    Way(4, 2, True, ep_size=4, expert_tp_size=1, dispatcher="alltoall"),
    Way(4, ep_size=2, cp_size=2, dispatcher="alltoall"),
    Way(4, 4, ep_size=2, expert_tp_size=2, dispatcher="alltoall"),
]


@experts_row_by_row()
def results_of(
    groups: ParallelGroups, way: Way, changes: dict[str, Any], parts: list[int]
) -> list[dict[str, Tensor]]:
    """Return for each number of parts the results and all gradients of some packs of this rank."""
    found = []
    for count in parts:
        config = config_of(way, **{"hybrid_layer_pattern": "E*E/E", **changes, PARTS: count})
        job = build_job(config, groups, VOCAB)
        job.buffers.zero_grad()
        results: dict[str, Tensor] = {}
        # One pack of a rank is empty, so it sends no rows. One replica has two packs, not four.
        lengths = [*LENGTHS[:3], []] if groups.dp.size > 1 else [LENGTHS[1], []]
        for number, micro_batch in enumerate(step_of(way, groups, 0, lengths)):
            output = job.model.forward_backward(micro_batch)
            assert not output.expert_overflow
            results |= {
                f"loss {number}": output.loss.clone(),
                f"token losses {number}": output.per_token_loss_T.clone(),
                f"counts {number}": output.tokens_per_expert.clone(),
                f"dropped {number}": output.dropped_assignments.clone(),
            }
        for name, parameter in job.buffers.parameters.items():
            results[name] = parameter.main_grad.clone()
        found.append(results)
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_parts_change_nothing_but_the_order_of_sums(way: Way, pools: WorkerPools) -> None:
    """Check bits of all results and of all gradients but those of the experts' weights.

    5 parts divide no number of token slots evenly. The first layout has every kind, and each other
    one has every second kind.
    """
    number = WAYS.index(way)
    names = [*KINDS] if number == 0 else [*KINDS][number % 2 :: 2]
    for name in names:
        changes, parts = KINDS[name], [1, 5] if number else [1, 2, 5]
        ranks = pools.run(results_of, way.world_size, way, changes, parts, layout=way.layout)
        for whole, *others in ranks:
            for found in others:
                for key, wanted in whole.items():
                    if "experts.fc" in key:
                        error = (found[key] - wanted).abs().max() / wanted.abs().max()
                        assert error <= ROUNDING, (name, key, error)
                    else:
                        assert torch.equal(found[key], wanted), (name, key)
        drops = any(
            value.any() for rank in ranks for key, value in rank[0].items() if "drop" in key
        )
        assert drops == ("moe_expert_capacity_factor" in changes), name
        gradients = [sum(rank[0][key].abs().max() for rank in ranks) for key in ranks[0][0]]
        assert all(largest > 0 for largest in gradients[-8:])


# -- order of the messages -------------------------------------------------------------------------


class _Noted(torch.autograd.Function):
    """Identity that notes when it runs in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, event: str, events: list[str]) -> Tensor:
        ctx.event, ctx.events = event, events
        events.append(event)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.event)
        return dy, None, None


def noting(function: Callable[..., Tensor], event: str, events: list[str]) -> Any:
    """Return ``function``, which notes its calls and the beginning of its backward pass."""
    calls = iter(range(100))
    return lambda *args: _Noted.apply(function(*args), f"{event} {next(calls)}", events)


def noted_products(events: list[str]) -> Products:
    """Return products that compute one expert after the other, and note the gradients of weights.

    These are separate calls, as on a GPU. The reference leaves them to autograd.
    """

    def of_experts(offsets_E: Tensor) -> list[slice]:
        return [slice(*bounds) for bounds in pairwise(row_bounds(offsets_E).tolist())]

    def rows(x_RI: Tensor, weight_EIO: Tensor, offsets_E: Tensor) -> Tensor:
        y_RO = x_RI.new_zeros(x_RI.shape[0], weight_EIO.shape[2])
        for matrix_IO, own in zip(weight_EIO, of_experts(offsets_E), strict=True):
            y_RO[own] = x_RI[own] @ matrix_IO
        return y_RO

    def weight_gradient(dy_RO: Tensor, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
        events.append("weights")
        return torch.stack([dy_RO[own].t() @ x_RI[own] for own in of_experts(offsets_E)])

    def add(main_grad: Tensor, *args: Tensor) -> None:
        main_grad.add_(weight_gradient(*args))

    return Products(rows, weight_gradient, lambda *args: True, add)


def events_of(groups: ParallelGroups, way: Way, changes: dict[str, Any]) -> list[str]:
    """Return the events of a layer in forward and backward.

    An exchange that ends before the next operation is no event.
    """
    job = build_job(config_of(way, hybrid_layer_pattern="E/-", **changes), groups, VOCAB)
    (layer,) = job.model.moe_layers
    events: list[str] = []
    start_rows = all_to_all._start_rows

    def starting(*args: Any, **options: Any) -> tuple[Tensor, Started]:
        events.append("start")
        return start_exchange(*args, **options)

    def starting_rows(*args: Any, **options: Any) -> tuple[Tensor, Started | None]:
        events.extend(["start"] * options["overlaps"])
        return start_rows(*args, **options)

    def waiting(started: Started | None) -> None:
        if started is not None:
            events.append("wait")
        wait_for(started)

    mixer = layer.mixer
    mixer.experts.forward = noting(mixer.experts.forward, "experts", events)
    mixer.shared_expert.forward = noting(mixer.shared_expert.forward, "shared", events)
    (micro_batch,) = step_of(way, groups, 0, LENGTHS[: groups.dp.size])
    linear = partial(grouped_linear.first_linear, noted_products(events))
    with (
        mock.patch.object(reference, "_grouped_linear", linear),
        mock.patch.object(grouped_linear, "zero_rows_after_", lambda rows, offsets: rows),
        mock.patch.object(all_to_all, "start_exchange", starting),
        mock.patch.object(all_to_all, "_start_rows", starting_rows),
        mock.patch.object(all_to_all, "wait_for", waiting),
    ):
        job.model.forward_backward(micro_batch)
    return events


def orders(groups: ParallelGroups, way: Way, kinds: list[dict[str, Any]]) -> list[list[str]]:
    return [events_of(groups, way, changes) for changes in kinds]


def test_messages_travel_while_other_parts_are_computed(pools: WorkerPools) -> None:
    way = Way(2, ep_size=2, dispatcher="alltoall")
    kinds = [{**KINDS[name], PARTS: 2} for name in ("rows", "bounded rows", "bounded tokens")]
    start, wait, weights = "start", "wait", ["weights", "weights"]
    ends = [start, "shared 0", wait, wait]
    forward = [start, start, wait, "experts 0", start, wait, "experts 1", *ends]
    backward = [start, start, "shared 0", wait, "experts 1", start, *weights]
    backward += [wait, "experts 0", start, *weights, wait, wait]
    for rank in pools.run(orders, 2, way, kinds, layout=way.layout):
        for events in rank:
            assert events == [*forward, *backward], events


def test_gradients_of_rows_travel_while_weights_get_theirs(pools: WorkerPools) -> None:
    """Check one part: its other three messages end before the next operation."""
    way = Way(2, ep_size=2, dispatcher="alltoall")
    backward = ["experts 0", "start", "weights", "weights", "wait"]
    for rank in pools.run(orders, 2, way, [*KINDS.values()], layout=way.layout):
        for name, events in zip(KINDS, rank, strict=True):
            assert [event for event in events if "shared" not in event] == [
                "experts 0",
                *backward,
            ], name


def collectives(
    groups: ParallelGroups, way: Way, kinds: list[dict[str, Any]]
) -> list[tuple[list[str], int]]:
    """Return the collectives of two packs in order, and how often the host reads the device."""
    found = []
    for changes in kinds:
        job = build_job(config_of(way, hybrid_layer_pattern="E/E", **changes), groups, VOCAB)
        # All documents are on one rank of each group; the other ranks have a tail alone.
        packs = step_of(way, groups, 0, [LENGTHS[0], *[[]] * (groups.dp.size - 1)])
        with Recorder() as recorder, mock.patch.object(Tensor, "tolist", recorder.tolist):
            for micro_batch in packs:
                job.model.forward_backward(micro_batch)
        asked = [name for name, _ in recorder.calls if rank_models.asks([(name, [])], alone=True)]
        found.append((recorder.collectives(), len(asked)))
    return found


def test_all_ranks_exchange_in_the_same_order_and_ask_once(pools: WorkerPools) -> None:
    """Check ranks without rows too. The host reads the counts of all parts at once, or none."""
    way = Way(4, ep_size=4, dispatcher="alltoall")
    kinds = [
        {**KINDS[name], PARTS: parts}
        for name in ("rows", "tokens", "bounded rows", "bounded tokens", "padded rows")
        for parts in (1, 3)
    ]
    ranks = pools.run(collectives, 4, way, kinds, layout=way.layout)
    assert all(rank == ranks[0] for rank in ranks)
    asked = [count for _, count in ranks[0]]
    assert asked == [2, 2, 2, 2, *[0] * 6], asked
    for (whole, _), (parts, _) in zip(ranks[0][::2], ranks[0][1::2], strict=True):
        # There and back, in both directions, in two layers.
        assert parts.count("alltoall_base_") == 3 * whole.count("alltoall_base_") == 24
