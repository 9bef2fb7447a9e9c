"""Assignments dropped by an expert's capacity are counted by layer in every mode, and printed."""

import dataclasses

import pytest
import torch

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.layers.moe.capacity import expert_capacity
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.run_report import write_report
from megatron_packed.reporting.step_record import ExpertFigures
from megatron_packed.training.build_graphs import build_graphs, capture_graphs
from megatron_packed.training.build_job import build_job
from megatron_packed.training.isolation_self_test import self_test
from support.json_lines import write_lines
from support.recomputed_steps import PARTS, TRAVELLERS
from support.stand_in import RecordingBackend
from support.step_jobs import CAPTURE_SIZES, GROUPS, config_of, micro_batch
from support.step_records import record

VOCAB, FACTOR = 211, 0.4
STEP = [[48], [20, 9, 3], []]
"""Document lengths of a full pack, a pack with a tail, and a pack that is all tail."""


def with_capacity(config):
    model = dataclasses.replace(
        config.model, hybrid_layer_pattern="EM*-/*E", moe_expert_capacity_factor=FACTOR
    )
    return dataclasses.replace(config, model=model)


def batches():
    return [micro_batch(lengths, seed) for seed, lengths in enumerate(STEP)]


@pytest.fixture(scope="module")
def expected():
    """Return the assignments of each layer that exceed the capacity of their expert."""
    model = build_job(with_capacity(config_of(cuda_graph_impl="none")), GROUPS, VOCAB).model
    dropped = torch.zeros(2)
    for batch in batches():
        counts = model(batch).tokens_per_expert
        room = expert_capacity(
            batch.tokens.numel(), model.config.moe_router_topk, counts.shape[1], FACTOR
        )
        dropped += (counts - room).clamp(min=0).sum(1)
    assert dropped.min() > 10 and dropped[0] != dropped[1]
    return dropped.tolist()


@pytest.mark.parametrize("impl", ["none", "local", "full_iteration"])
@pytest.mark.parametrize(
    "memory", [MemoryConfig(), PARTS, TRAVELLERS], ids=["kept", "recomputed", "offloaded"]
)
def test_a_step_counts_what_was_beyond_the_room_of_experts(impl, memory, expected):
    config = dataclasses.replace(with_capacity(config_of(cuda_graph_impl=impl)), memory=memory)
    job = build_job(config, GROUPS, VOCAB)
    if impl != "none":
        backend = RecordingBackend()
        graphs = job.step.graphs = build_graphs(
            config, job, CAPTURE_SIZES, GROUPS, lambda line: None, backend
        )
        capture_graphs(graphs, job.step, len(STEP), GROUPS, first=True)
    job.step(batches(), 1e-2)
    counts = job.step.layout.counts_of(job.step.numbers.tolist())
    assert counts["dropped_assignments"] == expected
    assert len(counts["expert_counts"]) == 2 * config.model.num_experts
    assert impl == "none" or graphs.counters.replays == len(STEP)


def test_without_a_capacity_there_is_nothing_to_count():
    config = config_of(cuda_graph_impl="none")
    job = build_job(config, GROUPS, VOCAB)
    assert list(job.step.layout.counts_of(job.step.numbers.tolist())) == ["expert_counts"]
    figures = ExpertFigures.from_counts([3.0, 1.0], 1, iteration=7)
    assert not any("dropped" in name for name in record(7, experts=figures).as_dict())


def test_shares_are_shown_in_log_console_and_report(tmp_path, capsys):
    figures = [
        ExpertFigures.from_counts([30.0, 10.0, 20.0, 20.0], 2, 7, dropped)
        for dropped in ([8.0, 2.0], [0.0, 0.0])
    ]
    lines = [record(number, experts=one).as_dict() for number, one in enumerate(figures, start=1)]
    assert (lines[0]["expert_dropped"], lines[0]["expert_dropped_share"]) == (10, 0.125)
    assert lines[0]["expert_dropped_by_layer"] == [0.2, 0.05]
    assert (lines[1]["expert_dropped"], lines[1]["expert_dropped_share"]) == (0, 0.0)
    for one, shown in zip(figures, (True, False)):
        Console(rank=0, total_steps=10).step(record(3, experts=one))
        assert ("| expert assignments dropped 12.5 %" in capsys.readouterr().out) == shown
    log = tmp_path / "log.jsonl"
    write_lines(log, lines)
    page = write_report(log, tmp_path / "page.html").read_text()
    assert "Expert assignments dropped" in page and "6.25 % (10); most in E layer 0: 10 %" in page
    write_lines(log, [record(1).as_dict()])
    assert "dropped" not in write_report(log, tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["--moe-expert-capacity-factor 0.4 (", "--moe-aux-loss-coeff 0.01 ("]),
        ({"moe_expert_capacity_factor": None, "moe_aux_loss_coeff": 0.0}, []),
        ({"moe_expert_capacity_factor": None}, ["--moe-aux-loss-coeff 0.01 ("]),
    ],
)
def test_the_self_test_says_what_couples_documents_by_design(changes, said, capsys):
    config = with_capacity(config_of(cuda_graph_impl="none"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    self_test(
        config, GROUPS, build_job(config, GROUPS, VOCAB).model, Console(rank=0, total_steps=1)
    )
    line = capsys.readouterr().out
    assert "checks passed" in line and (
        "couples the documents of a pack by design" in line
    ) == bool(said)
    assert all(option in line for option in said)
