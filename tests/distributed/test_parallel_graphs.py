"""CUDA graphs in parallel layouts with a stand-in for capture: replay equals eager bit for bit.

The captured code contains the collectives of the layers. The stand-in runs these collectives again
at every replay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_packed.cuda_graphs.audit import AuditMismatchError
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_graphs import (
    audit_graphs,
    capture_graphs,
    released,
)
from megatron_packed.training.build_job import build_job
from megatron_packed.training.train_step import LAST_MICRO_BATCH
from support.layouts import VOCAB, Way, config_of, step_values
from support.parallel_graphs import LENGTHS, graphed, step_of
from support.process_pools import WorkerPools
from support.shared_file_rows import stand_in_memory
from support.whole_state import everything, same_bits

TOO_MANY = [2] * 7
GLOBAL_LOADS = {"moe_router_load_balancing_type": "global_aux_loss"}
"""Options with which a pass sums the loads of experts over ranks with other packs."""
EQUAL = "replay what they compute (largest difference 0.0e+00)"


def compare(
    groups: ParallelGroups,
    way: Way,
    model: dict[str, Any],
    impl: str = "local",
    fails: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Run some steps eagerly and by replay, compare them, and run an audit.

    Each rank has a pack for each capture size in a step. In the first step the first data-parallel
    rank has a pack beyond the capture sizes. ``fails`` has the numbers of the captures that fail,
    on the last rank only.
    """
    mine = fails if groups.rank == groups.world_size - 1 else ()
    with stand_in_memory():  # for layouts with fused products
        eager = build_job(config_of(way, **model), groups, VOCAB)
        job, graphs, backend = graphed(way, groups, model, impl, mine)
    assert way.tp_overlap == (
        job.model.tp.products is not None and job.model.tp.products.memory is not None
    )
    packs = LENGTHS[: 2 * groups.dp.size]
    steps = [
        step_of(way, groups, number, lengths)
        for number, lengths in enumerate(((TOO_MANY, *packs[1:]), packs[::-1]))
    ]
    equal = []
    with released(graphs):
        for micro_batches in steps:
            backend.scramble()
            found, wanted = (one.step(micro_batches, 1e-2).clone() for one in (job, eager))
            equal.append(torch.equal(found, wanted))
        audited = audit_graphs(graphs, job.step, steps[1][-1], deterministic=True, seed=1)
        counters = graphs.counters
        return {
            "metrics": equal,
            "state": all(
                same_bits(one[3], other[3])
                for one, other in zip(everything(job), everything(eager))
            ),
            "replays": counters.replays,
            "fallbacks": dict(counters.fallbacks),
            "module_fallbacks": dict(counters.module_fallbacks),
            "audited": audited,
            "graphs_replayed": len(backend.log),
        }


TP2, RING, EP2 = (
    Way(2, 2, True, tp_overlap=True),
    Way(2, cp_size=2, comm_type="p2p"),
    Way(2, ep_size=2, distributed_optimizer=True),
)
HEADS = Way(2, cp_size=2, mamba="heads", linear="headwise")
IN_ORDER = Way(2, cp_size=2, comm_type="all_gather", partition="contiguous")
REPLAYED = {
    "local": [
        TP2,
        Way(2, cp_size=2),
        HEADS,
        RING._replace(linear="headwise"),
        Way(2, cp_size=2, comm_type="all_gather", mamba="heads"),
        IN_ORDER,
        EP2,
        Way(4, 2, True, ep_size=2, expert_tp_size=1),
    ],
    "full_iteration": [
        TP2,
        Way(2, cp_size=2),
        RING,
        RING._replace(mamba="heads", linear="headwise"),
        IN_ORDER._replace(comm_type="p2p"),
        EP2,
    ],
    # These layers run a forward pass before their captures, in which the ranks wait for each other.
    "transformer_engine": [
        Way(2, 2, True),
        Way(2, cp_size=2),
        HEADS,
        EP2,
    ],
}
"""Layouts of each kind of graphs."""


@pytest.mark.shows(lambda impl: f"graphs: {impl}", of=lambda way: (way.world_size, config_of(way)))
@pytest.mark.parametrize(
    "impl, way", [(impl, way) for impl, ways in REPLAYED.items() for way in ways], ids=str
)
def test_replayed_steps_are_the_eager_ones(impl: str, way: Way, pools: WorkerPools) -> None:
    model = GLOBAL_LOADS if way.ep_size > 1 and impl != "transformer_engine" else {}
    found = pools.run(compare, way.world_size, way, model, impl, layout=way.layout)
    modules = "whole steps (micro-batch)" if impl == "full_iteration" else "6 modules"
    for rank, result in enumerate(found):
        assert all(result["metrics"]) and result["state"], result
        assert result["audited"] == f"{modules} {EQUAL}" and not result["module_fallbacks"], result
        replays = 2 * 2 - 1
        assert result["replays"] == replays and sum(result["fallbacks"].values()) == 1, result
        if impl == "full_iteration":
            # 2 ends of steps, and 1 replay in the audit.
            assert result["graphs_replayed"] == replays + 2 + 1
        elif impl == "local":
            where = (
                ""
                if rank < way.world_size // way.dp_size
                else " on another rank that runs the same captured collectives"
            )
            assert result["fallbacks"] == {f"more than 6 documents{where}": 1}


PADDED = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.5,
    "moe_pad_expert_input_to_capacity": True,
}


@pytest.mark.shows("graphs: local", "EP alltoall")
def test_experts_padded_to_a_capacity(pools: WorkerPools) -> None:
    way = Way(2, ep_size=2)
    for result in pools.run(compare, 2, way, PADDED, layout=way.layout):
        assert (
            all(result["metrics"]) and result["state"] and result["audited"] == f"6 modules {EQUAL}"
        ), result


def other_words(reason: str) -> str:
    """Return the reason on a rank that could capture a module that the last rank could not."""
    return f"rank 1 cannot capture it ({reason}), so all ranks run it eagerly"


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_what_one_rank_cannot_capture_none_does(impl: str, pools: WorkerPools) -> None:
    """Check that all ranks run a module eagerly if one rank fails to capture the module.

    First the tables of the largest capture size fail, then a layer. No rank is left waiting, and
    each rank reports the reason.
    """
    way = Way(2, 2, True)
    results = pools.run(compare, 2, way, {}, impl, (0, 4), layout=way.layout)
    why = "OutOfMemoryError: capture 4 has no memory"
    for result, reason in zip(results, (other_words(why), why), strict=True):
        assert all(result["metrics"]) and result["state"], result
        assert result["audited"] == f"5 modules {EQUAL}"
        assert result["fallbacks"] == {"no graphs for this capacity": 2, "more than 6 documents": 1}
        assert result["module_fallbacks"] == {f"layers.2: {reason}": 1}


@pytest.mark.parametrize(
    "fails, replays, part",
    [((0,), 0, ""), ((1,), 1, "micro-batch: ")],
    ids=["the end of a step", "a micro-batch"],
)
def test_a_part_of_a_step_that_one_rank_cannot_capture_runs_eagerly_on_all(
    fails: tuple[int, ...], replays: int, part: str, pools: WorkerPools
) -> None:
    way = Way(2, 2, True)
    results = pools.run(compare, 2, way, {}, "full_iteration", fails, layout=way.layout)
    reason = f"OutOfMemoryError: capture {fails[0]} has no memory"
    for result, said in zip(results, (other_words(reason), reason), strict=True):
        assert all(result["metrics"]) and result["state"] and result["replays"] == replays, result
        assert result["fallbacks"] == {
            f"no graphs for this capacity ({part}{said})": 3 - replays,
            "more than 6 documents": 1,
        }


def moves(groups: ParallelGroups, way: Way, impl: str) -> list[tuple[bool, bool, int]]:
    """Run four steps; in the second, a weight of the last rank moves to another address.

    The fourth step runs after a new capture. A step has a pack for each capture size.
    """
    eager = build_job(config_of(way), groups, VOCAB)
    job, graphs, _ = graphed(way, groups, {}, impl)
    found = []
    with released(graphs):
        for number in range(4):
            if number == 1 and groups.rank == groups.world_size - 1:
                router = job.model.moe_layers[0].mixer.router
                router.expert_bias = router.expert_bias.clone()
            if number == 3:
                capture_graphs(graphs, job.step, 4, groups)
            replays, micro_batches = (
                graphs.counters.replays,
                step_of(way, groups, number, LENGTHS[:2]),
            )
            values, wanted = (one.step(micro_batches, 1e-2).tolist() for one in (job, eager))
            moved = step_values(values).weights_moved
            same = step_values(values)._replace(weights_moved=False) == step_values(wanted)
            found.append((same, moved, graphs.counters.replays - replays))
    return found


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_weights_that_moved_on_one_rank_are_known_to_all(impl: str, pools: WorkerPools) -> None:
    """Check that the rank with the moved weight runs eagerly while the other rank replays.

    Both replay again after the next capture.
    """
    first, last = pools.run(moves, 2, Way(2, 2, True), impl, layout={"tp_size": 2})
    assert first == [(True, False, 2), (True, True, 2), (True, True, 2), (True, False, 2)]
    assert last == [(True, False, 2), (True, True, 0), (True, True, 0), (True, False, 2)]


def audited_with_overlap(groups: ParallelGroups, way: Way) -> tuple[str | None, str]:
    """Return the audit's report for a sound run, and for a wrong replay on one rank.

    The wrong replay changes the gradients of the last micro-batch.
    """
    job, graphs, _ = graphed(way, groups, {}, "full_iteration", overlap=True)
    micro_batch = step_of(way, groups, 0, LENGTHS)[0]
    overlapped, replay = job.step.overlapped, graphs.replay
    assert overlapped is not None
    with released(graphs):
        sound = audit_graphs(graphs, job.step, micro_batch, deterministic=True, seed=1)
        assert 0 < overlapped.begun_in_backward < len(job.buffers.layout.buckets)

        def spoiled(name: str, *args: Any) -> None:
            replay(name, *args)
            if name == LAST_MICRO_BATCH and groups.rank == 0:
                first = overlapped._queue[0][1]
                job.buffers.grads[job.buffers.owned_span(first)[0]] += 1

        graphs.replay = spoiled
        try:
            audit_graphs(graphs, job.step, micro_batch, deterministic=True, seed=1)
        except AuditMismatchError as error:
            return sound, str(error)
    return sound, ""


@pytest.mark.shows(
    "graphs: full_iteration", "overlapped sums", of=lambda way: (way.world_size, config_of(way))
)
@pytest.mark.parametrize("way", [Way(2), Way(2, distributed_optimizer=True)], ids=str)
def test_last_micro_batches_are_audited_with_the_sums_that_they_begin(
    way: Way, pools: WorkerPools
) -> None:
    (sound, spoiled), (other, unspoiled) = pools.run(audited_with_overlap, 2, way)
    assert sound == other == f"whole steps (micro-batch, last micro-batch) {EQUAL}"
    assert spoiled.startswith(
        "the replay of the last micro-batch differs from its eager pass: gradients of "
    )
    assert unspoiled == ""
