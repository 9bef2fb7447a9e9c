"""Runs with ``--cuda-graph-impl full_iteration`` end bit for bit like eager runs.

The tests run the complete command on a CPU, from its flags to its exit code, with a stand-in for
capture.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.config.parser.parse import parse
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import build_data
from support.captured_runs import assert_same_run, run_captured
from support.captures import capture_on_cpu
from support.faults import poison_forward, stands_still, watched
from support.runs import (
    command_line,
    few_documents,
    final_state,
    in_folder,
    run,
    steps,
)

DONE, UNFORESEEN, NONFINITE = 0, 1, 20
STEPS, CAPACITIES = 8, (3, 5)
BUCKETS = {"ddp_bucket_size": 2000}
"""Option that divides the parameters into several buckets.

The number of buckets changes the rounding of the gradient norm.
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return few_documents(tmp_path_factory.mktemp("few"), train_iters=STEPS, eval_interval=4)


@pytest.fixture(scope="module")
def graphs(options: dict[str, Any]) -> dict[str, Any]:
    return {
        **options,
        "cuda_graph_impl": "full_iteration",
        "cuda_graph_max_packed_seqs": CAPACITIES,
        "cuda_graph_warmup_steps": 1,
    }


@pytest.fixture(scope="module")
def two_eager(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_captured(tmp_path_factory.mktemp("two_eager"), {**options, **BUCKETS}, 2)


def test_one_process(options: dict[str, Any], graphs: dict[str, Any], tmp_path: Path) -> None:
    """One process equals the eager run with four micro-batches a step, validations and audits.

    Some packs have more documents than the largest capacity.
    """
    eager = run_captured(tmp_path / "eager", options)
    more = {"cuda_graph_audit_interval": 4}
    graphed = run_captured(tmp_path / "graphed", {**graphs, **more}, diary=tmp_path / "diary")
    assert_same_run(graphed, eager, STEPS)
    data = build_data(
        parse(command_line({**graphs, **more}), 1), ParallelGroups.single(), lambda _: None
    )
    lines = [line for line in steps(graphed / "log.jsonl") if "lm_loss" in line]
    for line in lines:
        counts = [len(pieces) for pieces in data.train.plan.step(line["iteration"] - 1).packs[0]]
        beyond = sum(count > CAPACITIES[-1] for count in counts)
        assert (line["graph_replays"], line["graph_fallbacks"]) == (4 - beyond, beyond)
        assert (
            line["graph_captures"] == 2 * len(CAPACITIES) + 1
            # one graph per capacity for training, one for validation, and one for the end of a step
        )
    assert 0 < sum(line["graph_fallbacks"] for line in lines) < 2 * STEPS
    console = (graphed / "output_0.txt").read_text()
    assert "CUDA graphs: capturing whole steps (capacities: 3, 5 documents)" in console
    assert len(re.findall(r"captured whole steps for up to [35] documents in", console)) == 2
    audited = (
        r"audit at step [48]: whole steps \(micro-batch\) "
        r"replay what they compute \(largest difference 0\.0e\+00\)"
    )
    assert len(re.findall(audited, console)) == 2
    assert (tmp_path / "diary").read_text().splitlines() == [
        "first step, 5 graphs",
        "shutdown, 0 graphs",
    ]


@pytest.mark.parametrize(
    "layout",
    [
        {"use_distributed_optimizer": True},
        {"overlap_grad_reduce": True},
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ],
    ids=["zero", "overlap", "gather without effect"],
)
def test_two_processes(
    layout: dict[str, Any], graphs: dict[str, Any], two_eager: Path, tmp_path: Path
) -> None:
    """Two processes equal the eager run. Reductions, norm and weight gathering are in the graphs.

    Each rank may have packs with more documents than the largest capacity.
    """
    graphed = run_captured(tmp_path, {**graphs, **BUCKETS, **layout}, 2, diary=tmp_path / "diary")
    assert_same_run(graphed, two_eager, STEPS)
    parts = 3 if "overlap_grad_reduce" in layout else 2
    lines = [line for line in steps(graphed / "log.jsonl") if "lm_loss" in line]
    assert all(line["graph_captures"] == parts * len(CAPACITIES) + 1 for line in lines)
    assert sum(line["graph_replays"] for line in lines) > STEPS


def test_a_nan_on_one_rank_stops_all_with_clean_weights(
    graphs: dict[str, Any], tmp_path: Path
) -> None:
    """A NaN in the second micro-batch of rank 1 in step 4 stops the run without an update.

    The ranks report the NaN one step later.
    """
    # Forward passes of dummy micro-batches before the first step: tuning, first run and capture.
    captures = len(CAPACITIES) * (graphs["cuda_graph_warmup_steps"] + 1 + 1)
    options = {**graphs, "eval_interval": None, "valid_data_path": None, "save_interval": 1}
    bad = 4
    fault = partial(poison_forward, captures + 2 * bad, 1, float("nan"))
    finished = run({**options, **in_folder(tmp_path)}, tmp_path, 2, partial(capture_on_cpu, fault))
    assert finished.exit_code == NONFINITE, finished.console
    assert (
        finished.console.count(
            f"WARNING: step {bad} had a non-finite loss or gradient in micro-batch 1 of rank 1; its "
            "update was not applied"
        )
        == 1
    )
    assert steps(tmp_path / "log.jsonl")[-1]["iteration"] == bad
    found, before = (final_state(tmp_path / "checkpoints", step)[0] for step in (bad, bad - 1))
    kept = [name for name in found if name.startswith(("model/", "optimizer/"))]
    assert kept and all(found[name].equal(before[name]) for name in kept)


def test_a_device_that_stands_still_in_a_replay_ends_the_run(
    graphs: dict[str, Any], tmp_path: Path
) -> None:
    """A stalled replay on rank 1 ends the run.

    The replay is that of the last of two micro-batches in step 3, and the host waits for it in step
    4. The previous steps take longer than the timeout, but each completed micro-batch restarts the
    timeout.
    """
    options = {**graphs, "eval_interval": None, "valid_data_path": None}
    fault = partial(
        stands_still, 1.0, 0.5, 3 * 2 + 3, 1
    )  # each step has 3 marks: two micro-batches and the end of the step
    finished = run({**options, **in_folder(tmp_path)}, tmp_path, 2, partial(capture_on_cpu, fault))
    assert finished.exit_code == UNFORESEEN, finished.console
    reason = "another process was lost on rank 1 in step 4: the GPU has made no progress for 1 s. Rank 0 was in "
    assert reason in finished.console, finished.console
    assert "rank 1 was in training/late_metrics.py: _wait, in step 4." in finished.console, (
        finished.console
    )


@pytest.mark.parametrize(("site", "code"), [("tune", DONE), ("capture", UNFORESEEN)])
def test_from_the_first_capture_on_a_device_that_stands_still_ends_the_run(
    site: str, code: int, graphs: dict[str, Any], tmp_path: Path
) -> None:
    """A stall ends the run from the first capture on, but not while kernels are compiled and tuned.

    Compilation and tuning may take any time.
    """
    options = {**graphs, "eval_interval": None, "valid_data_path": None, "train_iters": 4}
    fault = partial(watched, 1.0, (FullIterationGraphs, site), 1, 2.0)
    finished = run(
        {**options, **in_folder(tmp_path)}, tmp_path, prepare=partial(capture_on_cpu, fault)
    )
    assert finished.exit_code == code, finished.console
    assert (
        "another process was lost: the GPU has made no progress for 1 s" in finished.console
    ) == (code != DONE)
