"""Tests of bounded expert buffers: no bound changes a bit, and overflows raise the bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.moe.expert_room import HEAD_ROOM, Load
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.expert_bounds import ExpertBounds
from support.layouts import VOCAB, Way, config_of, step_values
from support.parallel_graphs import LENGTHS, graphed, step_of
from support.process_pools import WorkerPools
from support.whole_state import everything, same_bits

FACTOR = "moe_expert_rank_capacity_factor"
BYPASSED = "it needs an expert buffer for all rows, and its graphs have a smaller buffer"

PACKS = LENGTHS[:2]
"""Documents of two packs, so that each data-parallel rank has one."""


def job_of(
    groups: ParallelGroups, way: Way, factor: str | None, options: Mapping[str, str] = {}
) -> Job:
    pattern = {"hybrid_layer_pattern": "E*E/E"}
    return build_job(config_of(way, **{FACTOR: factor, **pattern, **options}), groups, VOCAB)


def results_of(
    groups: ParallelGroups, way: Way, job: Job, bounds: Load | None, exact: bool = False
) -> tuple[list[Tensor], float]:
    """Return losses, counts and all gradients of some packs, and the number of overflows."""
    found, overflow, room = [], 0.0, job.model.expert_room
    room.bounds, room.exact = bounds, exact
    job.buffers.zero_grad()
    for micro_batch in step_of(way, groups, 0, PACKS):
        output = job.model.forward_backward(micro_batch)
        found += [output.loss, output.per_token_loss_T.clone(), output.tokens_per_expert]
        overflow += float(output.expert_overflow)
    gradients = [parameter.main_grad for parameter in job.buffers.parameters.values()]
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    return [*found, *(gradient.clone() for gradient in gradients)], overflow


def needed_by(groups: ParallelGroups, way: Way, job: Job) -> Load:
    """Let all ranks observe the packs, and return the smallest bounds that fit them."""
    observed = ExpertBounds(job.step, groups, packs_per_step=4, say=lambda line: None)
    observed.observe(step_of(way, groups, 0, PACKS))
    assert observed.room.bounds is not None
    return Load(*(factor / HEAD_ROOM for factor in observed.room.bounds))


def compared_bounds(
    groups: ParallelGroups, way: Way, options: Mapping[str, str]
) -> tuple[Load, dict[str, tuple[bool, bool]]]:
    """Compare runs with bounds with the run without bounds, bit for bit.

    Returns:
        The smallest bounds that fit, and for each run: it has the same bits, and its rows fit.
    """
    wanted, _ = results_of(groups, way, job_of(groups, way, None, options), None)
    job = job_of(groups, way, "auto", options)
    needed, even = needed_by(groups, way, job), job.model.expert_room.even
    parts = job.model.moe_layers[0].mixer.dispatcher.parts

    def less(of_rank: float, of_peer: float) -> Load:
        """Return bounds for ``of_rank`` and ``of_peer`` rows less in each part."""
        return Load(
            needed.rank - parts * of_rank / even.rank, needed.peer - parts * of_peer / even.peer
        )

    size = float(way.ep_size)
    runs = {
        # Bounds are rounded up to whole rows.
        "enough": results_of(groups, way, job, less(0.5, 0.5)),
        "a row of a rank less": results_of(groups, way, job, less(1.5, 0.5)),
        "a row of a peer less": results_of(groups, way, job, less(0.5, 1.5)),
        "half": results_of(groups, way, job, Load(0.5, 0.5)),
        "worst case": results_of(groups, way, job, Load(size, size)),
        "exact": results_of(groups, way, job, Load(0.1, 0.1), exact=True),
    }
    return needed, {
        name: (all(map(torch.equal, results, wanted)), overflow == 0)
        for name, (results, overflow) in runs.items()
    }


@pytest.mark.shows("eager", "EP alltoall", of=lambda way: (way.world_size, config_of(way)))
@pytest.mark.parametrize(
    "way",
    [
        Way(2, ep_size=2),
        Way(4, 2, True, ep_size=4, expert_tp_size=1),
        Way(4, ep_size=2, cp_size=2),
    ],
    ids=str,
)
def test_no_bound_changes_a_bit(way: Way, pools: WorkerPools) -> None:
    """Check that a bound changes no bit, and that one row too few is reported.

    Only `alltoall` bounds the rows of a peer.
    """
    for dispatcher, options in (
        ("alltoall", {"moe_dispatch": "rows"}),
        ("allgather", {}),
        ("alltoall", {"moe_dispatch": "tokens"}),
        ("alltoall", {"moe_dispatch": "rows", "moe_comm_overlap_parts": 3}),
        ("alltoall", {"moe_dispatch": "tokens", "moe_comm_overlap_parts": 2}),
    ):
        way = way._replace(dispatcher=dispatcher)
        ranks = pools.run(compared_bounds, way.world_size, way, options, layout=way.layout)
        assert all(needed == ranks[0][0] for needed, _ in ranks), "all ranks set the same bounds"
        short = {"a row of a rank less", "half"}
        short |= {"a row of a peer less"} if dispatcher != "allgather" else set()
        for name in ranks[0][1]:
            equal, fits = zip(*(runs[name] for _, runs in ranks))
            assert all(fits) == (name not in short), (dispatcher, name, fits)
            # Without an overflow a rank has correct results.
            assert all(same or not fit for same, fit in zip(equal, fits)), (dispatcher, name)
            assert name != "half" or not any(equal), (dispatcher, equal)
            for first in range(0, way.world_size, way.ep_size):
                assert len(set(fits[first : first + way.ep_size])) == 1, (dispatcher, name, fits)


def overflowing(
    groups: ParallelGroups, way: Way, impl: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Run a step whose routing exceeds the bounds, then steps after the bounds were raised."""
    job, graphs, backend = graphed(way, groups, options, impl)
    eager = build_job(config_of(way, **options), groups, VOCAB)
    said: list[str] = []
    bounds = ExpertBounds(job.step, groups, packs_per_step=4, say=said.append)
    room, steps = bounds.room, [step_of(way, groups, number, LENGTHS) for number in range(3)]
    with released(graphs):
        bounds.observe(steps[0])
        observed, room.bounds = room.bounds, Load(0.3, 0.3)
        capture_graphs(graphs, job.step, 4, groups)
        found = {"held": [], "equal": [], "fallbacks": []}
        for micro_batches in steps:
            wanted = eager.step(micro_batches, 1e-2).clone()
            values = job.step(micro_batches, 1e-2).clone()
            found["held"].append(step_values(values.tolist()).held)
            if found["held"][-1]:
                bounds.make_room()
                found["freed"] = all(graph.gone for graph in backend.graphs)
                values = job.step.redo(micro_batches, 1e-2).clone()
                bounds.raise_for(job.step.layout.counts_of(job.step.numbers.tolist()))
            found["equal"].append(torch.equal(values, wanted))
            found["fallbacks"].append(dict(graphs.counters.fallbacks))
        found["validated"] = validated(job, steps[0]) == validated(eager, steps[0])
    state = zip(everything(job), everything(eager), strict=True)
    found["state"] = all(same_bits(one[3], other[3]) for one, other in state)
    # The observed routing is that of the first step, so its bounds are those of the repeated step.
    used = 2 if way.dispatcher == "alltoall" else 1
    found["raised"] = room.bounds[:used] == observed[:used] and min(observed[:used]) > 0.3
    return found | {"said": said, "replays": graphs.counters.replays}


def validated(job: Job, micro_batches: list[MicroBatch]) -> tuple[float, float]:
    job.step.validation_loss.zero_()
    # Whole steps are captured here without validation.
    layers = isinstance(job.step.graphs, LayerGraphs | None)
    for micro_batch in micro_batches:
        (job.step.validate if layers else job.step.validation_micro_batch)(micro_batch)
    return float(job.step.validation_loss), float(job.step.validation_overflow)


IN_PARTS = {"moe_comm_overlap_parts": 2}
DISPATCHERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "local": [("allgather", {}), ("alltoall", {"moe_dispatch": "tokens", **IN_PARTS})],
    "full_iteration": [("alltoall", {}), ("alltoall", IN_PARTS)],
}


@pytest.mark.shows(
    lambda impl: f"graphs: {impl}",
    "EP alltoall",
    lambda impl: "EP allgather" if impl == "local" else "EP alltoall",
)
@pytest.mark.parametrize("impl", DISPATCHERS)
def test_an_overflow_is_repeated_and_raises_the_bounds(impl: str, pools: WorkerPools) -> None:
    for dispatcher, options in DISPATCHERS[impl]:
        way = Way(2, ep_size=2, dispatcher=dispatcher)
        for found in pools.run(overflowing, 2, way, impl, options, layout=way.layout):
            assert found["held"] == [True, False, False], found
            assert found["equal"] == [True] * 3 and found["state"] and found["validated"]
            # Only the repeated step ran eagerly; the steps after it were replayed.
            assert found["fallbacks"] == [{BYPASSED: 2}] * 3 and found["replays"] == (
                8 if impl == "local" else 6
            )
            assert found["freed"], "the repeated step needs the memory of the graphs"
            assert found["raised"] and "captured again" in found["said"][-1], found
