"""Measurement of step times: packs, graphs, and the stored table."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_packed.cli import measure_capacities as measuring
from megatron_packed.cli.measure_capacities import measure, shapes, signature
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
from megatron_packed.data.packing.step_cost import StepCosts
from megatron_packed.packed.micro_batch import Document, MicroBatch
from support.stand_in import RecordingBackend
from support.step_jobs import CONFIG, SLOTS, VOCAB


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    return RunConfig(
        model=CONFIG,
        data=DataConfig(data_path=("a.jsonl",)),
        packing=PackingConfig(seq_length=SLOTS),
        optim=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(train_iters=1, device="cpu"),
    )


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_every_pack_replays_the_graph_of_its_capacity(config, impl, tmp_path):
    backend = RecordingBackend()
    config = replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    costs = measure(config, VOCAB, [2, 5], backend=backend)
    assert costs.capacities == (2, 5) and costs.knows_eager and costs.tokens == SLOTS
    graphed = [pack for pack in costs.packs if pack.capacity is not None]
    assert [(pack.capacity, pack.documents) for pack in graphed] == [
        (capacity, len(lengths))
        for capacity in (2, 5)
        for lengths in shapes(SLOTS, capacity, SLOTS)
    ]
    assert backend.graphs and all(graph.gone and graph.replays for graph in backend.graphs)
    assert all(pack.ms > 0 for pack in costs.packs)
    for pack, lengths in zip(graphed, [*shapes(SLOTS, 2, SLOTS), *shapes(SLOTS, 5, SLOTS)]):
        assert pack.squares == sum(length**2 for length in lengths)
    costs.save(tmp_path / "costs.json")
    assert StepCosts.load(tmp_path / "costs.json") == costs
    assert costs.model == json.loads(json.dumps(signature(config)))


def test_shapes_fill_a_pack():
    for tokens, capacity in ((512, 16), (64, 64), (7, 3), (64, 1)):
        found = shapes(tokens, capacity, tokens)
        assert all(
            sum(lengths) == tokens and min(lengths) >= 1 and len(lengths) <= capacity
            for lengths in found
        )
        assert [tokens] in found and max(map(len, found)) == capacity


def test_shapes_keep_to_the_longest_document():
    """If the capacity and the longest document do not allow to fill a pack, the rest is tail."""
    for capacity, filled in ((16, 512), (4, 512), (3, 384), (1, 128)):
        found = shapes(512, capacity, 128)
        assert all(max(lengths) <= 128 and len(lengths) <= capacity for lengths in found)
        assert max(map(sum, found)) == filled


def test_one_process_is_measured(config):
    with pytest.raises(ValueError, match="the measurement runs in one process"):
        measure(replace(config, parallel=ParallelConfig(tensor_model_parallel_size=2)), VOCAB, [2])


def test_strict_without_a_gpu_is_refused_before_a_model_is_built(config, monkeypatch):
    monkeypatch.setattr(measuring, "build_job", lambda *_: pytest.fail("work is lost"))
    graphs = CudaGraphConfig(cuda_graph_impl="local", cuda_graph_strict=True)
    with pytest.raises(GraphFallbackError, match=r"need a GPU.*leave it out on a CPU"):
        measure(replace(config, cuda_graph=graphs), VOCAB, [2])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "another"}'])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"is not a table of step costs written by `tune --measure`"
    ):
        StepCosts.load(tmp_path / "costs.json")


def test_a_micro_batch_and_the_rest_of_a_step_are_measured_apart(monkeypatch):
    """The times of a step (3 ms) and of its micro-batches (2 or 5 ms) are separated correctly."""
    packs = [
        MicroBatch.build([Document(np.zeros(length, np.int64)) for length in lengths], SLOTS)
        for lengths in ([SLOTS], [3, 4])
    ]
    took = {id(pack): seconds for pack, seconds in zip(packs, (2e-3, 5e-3))}
    timer = measuring._Timer(SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(
        timer, "_row", lambda row, steps: 3e-3 + sum(took[id(pack)] for pack in row)
    )
    timed, update = timer.times([(2, packs[0]), (None, packs[1])], lambda line: None)
    assert update == pytest.approx(3.0) and [one.ms for one in timed] == pytest.approx([2.0, 5.0])
    assert [(one.capacity, one.documents) for one in timed] == [(2, 1), (None, 2)]
    assert [one.squares for one in timed] == [SLOTS**2, 3**2 + 4**2 + (SLOTS - 7) ** 2]
