"""Losses with packing, shared metadata, offload and graphs on and off, in several layouts.

Off means: one document per pack, tables that each layer computes itself, no offload, eager
execution.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import SharedTables
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import build_job
from support.layouts import VOCAB, Way, config_of, scales_of
from support.parallel_graphs import CAPTURE_SIZES, packs_of_rank
from support.process_pools import WorkerPools
from support.stand_in import RecordingBackend

FEATURES = ("packing", "metadata", "offload", "graphs")
WAYS = {
    "tp": Way(2, 2, True),
    "cp": Way(2, cp_size=2),
    "ep": Way(2, ep_size=2),
    "dp": Way(2, distributed_optimizer=True),
}
IMPLS = {"tp": "local", "cp": "full_iteration", "ep": "full_iteration", "dp": "local"}
OFFLOAD = MemoryConfig(
    recompute_granularity="full",
    recompute_method="block",
    recompute_num_layers=3,
    offload_layer_inputs=True,
    fine_grained_activation_offloading=True,
    offload_modules=("mlp_norm", "expert_fc1", "moe_act"),
    min_offloaded_tensor_size=1,
)
"""Offload of the inputs of three layers and of parts of the fourth layer."""
LENGTHS = ([12, 20], [5, 1, 3, 8])
"""Document lengths in the packs of a step; there is one pack for each capture size."""
EVERYTHING = frozenset(FEATURES)
LEFT_OUT = {
    "tp": ("metadata", "graphs"),
    "cp": ("packing", "offload"),
    "ep": ("packing", "graphs"),
    "dp": ("metadata", "offload"),
}
"""Features of which each layout has a run without that feature alone."""
STEPS = 2
"""Number of steps; the loss of the second step shows the gradients of the first."""


def step_of(way: Way, groups: ParallelGroups, packing: bool, number: int) -> list[MicroBatch]:
    """Return this rank's packs. Each has the smallest capture size that fits the packs of all
    ranks.
    """
    draw = np.random.default_rng(number)
    packs = [[(draw.integers(0, VOCAB, length), None) for length in pack] for pack in LENGTHS]
    if not packing:
        packs = [[document] for pack in packs for document in pack]
    main, aux, later = scales_of(LENGTHS)
    return packs_of_rank(way, groups, packs, (main, aux * len(LENGTHS) / len(packs), later))


def train(
    groups: ParallelGroups, way: Way, impl: str, on: frozenset[str]
) -> tuple[list[list[float]], int]:
    """Return loss and gradient norm of each step, and the number of replayed micro-batches."""
    # The load-balance loss is computed per pack, so it differs with other packs.
    options: dict[str, Any] = {"memory": OFFLOAD} if "offload" in on else {}
    if "graphs" in on:
        options["cuda_graph"] = CudaGraphConfig(cuda_graph_impl=impl, cuda_graph_warmup_steps=1)
    config = dataclasses.replace(config_of(way, moe_aux_loss_coeff=0.0), **options)
    job = build_job(config, groups, VOCAB)
    if "metadata" not in on:
        job.model.pack_tables.derive = lambda packed: SharedTables()  # type: ignore[method-assign]
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print, RecordingBackend())
    with nullcontext() if graphs is None else released(graphs):
        if graphs is not None:
            capture_graphs(graphs, job.step, len(LENGTHS), groups)
            job.step.graphs = graphs
        metrics = [
            job.step(step_of(way, groups, "packing" in on, n), 1e-2).tolist() for n in range(STEPS)
        ]
        return [
            [one[0], one[2]] for one in metrics
        ], 0 if graphs is None else graphs.counters.replays


@pytest.mark.shows("eager", of=lambda name: (2, config_of(WAYS[name])))
@pytest.mark.shows("offload", of=lambda name: (2, config_of(WAYS[name])))
@pytest.mark.shows(
    lambda name: f"graphs: {IMPLS[name]}", of=lambda name: (2, config_of(WAYS[name]))
)
@pytest.mark.shows(lambda name: f"graphs: {IMPLS[name]}", "offload")
@pytest.mark.parametrize("name", WAYS)
def test_each_on_and_off_has_the_same_losses(name: str, pools: WorkerPools) -> None:
    way = WAYS[name]
    combinations = [EVERYTHING, frozenset(), *(EVERYTHING - {one} for one in LEFT_OUT[name])]
    found = {
        on: pools.run(train, 2, way, IMPLS[name], on, layout=way.layout) for on in combinations
    }
    expected, _ = found[frozenset()][0]
    assert np.isfinite(expected).all() and expected[0] != expected[1]
    for on, ranks in found.items():
        packs = len(LENGTHS) if "packing" in on else sum(map(len, LENGTHS))
        for values, replays in ranks:
            np.testing.assert_allclose(values, expected, rtol=1e-5, err_msg=" ".join(sorted(on)))
            assert replays == ("graphs" in on) * STEPS * packs // way.dp_size
    # Each of these options leaves results equal bit for bit.
    for feature in {"metadata", "offload", "graphs"} & set(LEFT_OUT[name]):
        assert found[EVERYTHING - {feature}][0][0] == found[EVERYTHING][0][0], feature
