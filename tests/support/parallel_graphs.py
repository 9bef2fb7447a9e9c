"""Captured jobs in parallel layouts, and the micro-batches of their steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.cuda_graphs.step_graphs import StepGraphs
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from support.layouts import SLOTS, VOCAB, Way, config_of, scales_of
from support.stand_in import RecordingBackend
from support.te_stand_in import stand_in
from support.whole_state import everything, same_bits

CAPTURE_SIZES = CaptureSizes.from_capacities([2, 6], SLOTS)
LENGTHS = ([12, 20], [5, 1, 3, 8, 2, 9], [40], [4, 4, 1, 1, 6])
"""Lengths of the documents in each pack of a step; all packs fit in the capture sizes."""


def step_of(way: Way, groups: ParallelGroups, number: int, lengths: Any) -> list[MicroBatch]:
    """Return this rank's packs of a step.

    Micro-batch i has the same capture size on all ranks, or none has a capture size for it.
    """
    draw = np.random.default_rng(number)
    packs = [[(draw.integers(0, VOCAB, length), None) for length in pack] for pack in lengths]
    return packs_of_rank(way, groups, packs, scales_of(lengths))


def packs_of_rank(
    way: Way, groups: ParallelGroups, packs: list[list[Any]], scales: tuple[float, ...]
) -> list[MicroBatch]:
    """Return this rank's packs, each with the smallest capture size for the packs of all ranks."""
    alignment, made = config_of(way).document_alignment, []
    for first in range(0, len(packs), groups.dp.size):
        together = packs[first : first + groups.dp.size]
        documents = max(map(len, together))
        size = CAPTURE_SIZES.smallest_for(documents, SLOTS)
        room = (documents, None) if size is None else (size.capacity, size.max_seqlen)
        made.append(
            MicroBatch.build(together[groups.dp.rank], SLOTS, room[0], scales, room[1], alignment)
        )
    return made


def graphed(
    way: Way,
    groups: ParallelGroups,
    model: dict[str, Any],
    impl: str = "local",
    fail_at: tuple[int, ...] = (),
    overlap: bool = False,
) -> tuple[Job, StepGraphs, RecordingBackend]:
    config = config_of(way, **model)
    if overlap:
        parallel = dataclasses.replace(
            config.parallel, overlap_grad_reduce=True, ddp_bucket_size=3000
        )
        config = dataclasses.replace(config, parallel=parallel)
    # Set it without validation: TransformerEngine needs GPUs, but its stand-in captures here.
    graph_options = CudaGraphConfig(cuda_graph_impl=impl, cuda_graph_warmup_steps=1)
    object.__setattr__(config, "cuda_graph", graph_options)
    job, backend = build_job(config, groups, VOCAB), RecordingBackend(fail_at)
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print, backend, stand_in()[0])
    assert graphs is not None
    capture_graphs(graphs, job.step, 4, groups)
    job.step.graphs = graphs
    return job, graphs, backend


REPLAYED = {"different": [], "module_fallbacks": {}, "replays": 4}
"""Result of `replay` if both micro-batches of both steps are replayed and nothing differs."""


def replay(groups: ParallelGroups, way: Way, model: dict[str, Any], impl: str) -> dict[str, Any]:
    """Run steps eagerly and by replay; return what differs, and the modules that ran eagerly."""
    eager = build_job(config_of(way, **model), groups, VOCAB)
    job, graphs, backend = graphed(way, groups, model, impl)
    with released(graphs):
        for number in range(2):
            micro_batches = step_of(way, groups, number, LENGTHS[: 2 * groups.dp.size])
            backend.scramble()
            metrics = [one.step(micro_batches, 1e-2).clone() for one in (job, eager)]
            assert torch.equal(*metrics)
        pairs = zip(everything(job), everything(eager))
        return {
            "different": [one[0] for one, other in pairs if not same_bits(one[3], other[3])],
            "module_fallbacks": dict(graphs.counters.module_fallbacks),
            "replays": graphs.counters.replays,
        }
