"""Steps that are timed: which packs, by which graphs, and what is kept of it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_train_step import CONFIG, SLOTS, VOCAB

from megatron_packed.config.cuda_graph import CudaGraphConfig
from megatron_packed.config.data import DataConfig
from megatron_packed.config.optim import OptimizerConfig
from megatron_packed.config.packing import PackingConfig
from megatron_packed.config.parallel import ParallelConfig
from megatron_packed.config.run import RunConfig
from megatron_packed.config.training import TrainingConfig
from megatron_packed.data.step_cost import StepCosts
from megatron_packed.training import measure as measuring
from megatron_packed.training.measure import measure, shapes, signature

sys.path.append(str(Path(__file__).parents[1] / "cuda_graphs"))
from stand_in import RecordingEngine


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    return RunConfig(
        model=CONFIG, data=DataConfig(data_path=("a.jsonl",)), packing=PackingConfig(seq_length=SLOTS),
        optim=OptimizerConfig(lr=1e-3), training=TrainingConfig(train_iters=1, device="cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_every_pack_replays_the_graph_of_its_capacity(config, impl, tmp_path):
    engine = RecordingEngine()
    config = replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    costs = measure(config, VOCAB, [2, 5], engine=engine)
    assert costs.capacities == (2, 5) and costs.knows_eager and costs.tokens == SLOTS
    graphed = [pack for pack in costs.packs if pack.capacity is not None]
    assert [(pack.capacity, pack.documents) for pack in graphed] == [
        (capacity, len(lengths)) for capacity in (2, 5) for lengths in shapes(SLOTS, capacity)
    ]
    assert engine.graphs and all(graph.gone and graph.replays for graph in engine.graphs)
    assert all(pack.ms > 0 for pack in costs.packs)
    for pack, lengths in zip(graphed, [*shapes(SLOTS, 2), *shapes(SLOTS, 5)]):
        assert pack.squares == sum(length**2 for length in lengths)
    costs.save(tmp_path / "costs.json")
    assert StepCosts.load(tmp_path / "costs.json") == costs
    assert costs.model == json.loads(json.dumps(signature(config)))


def test_shapes_fill_a_pack():
    for tokens, capacity in ((512, 16), (64, 64), (7, 3), (64, 1)):
        found = shapes(tokens, capacity)
        assert all(sum(lengths) == tokens and min(lengths) >= 1 and len(lengths) <= capacity for lengths in found)
        assert [tokens] in found and max(map(len, found)) == capacity


def test_one_process_is_measured(config):
    with pytest.raises(ValueError, match="one process is measured"):
        measure(replace(config, parallel=ParallelConfig(tensor_model_parallel_size=2)), VOCAB, [2])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "another"}'])
def test_what_is_no_table_is_told(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"is no table of step costs that tune --measure wrote"):
        StepCosts.load(tmp_path / "costs.json")
