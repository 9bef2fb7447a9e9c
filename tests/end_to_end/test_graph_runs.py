"""A run that replays graphs ends bit for bit like the eager run and reports how much it replayed.

The tests run the complete command on a CPU, from its flags to its exit code, with a stand-in for
capture.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.cli.main import main
from megatron_packed.config.parser.parse import parse
from megatron_packed.cuda_graphs.slot_graphs import SlotGraphs
from megatron_packed.distributed.groups import Axis, ParallelGroups
from megatron_packed.inputs.run_data import RunData, build_data
from megatron_packed.training.train_step import TrainStep
from support.captured_runs import assert_same_run, run_captured, without_graphs
from support.captures import capture_on_cpu, forget_to_accumulate, move_a_buffer, while_moving
from support.faults import defect, signal_at, watched
from support.runs import (
    assert_same_state,
    command_line,
    few_documents,
    in_folder,
    run,
    steps,
)

DONE, UNFORESEEN, FALLBACK, AUDIT, PREEMPTED = 0, 1, 23, 24, 75
STEPS, SOME_STEPS = 18, 9
"""Steps of the run that is compared with others, and of most of the others."""
CAPACITIES = (3, 5)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the options of a run of more than two epochs with four micro-batches per step.

    The learning rate changes, and there are validations and checkpoints.
    """
    return few_documents(tmp_path_factory.mktemp("few"), train_iters=STEPS, eval_interval=7)


@pytest.fixture(scope="module")
def graphs(options: dict[str, Any]) -> dict[str, Any]:
    chosen = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": CAPACITIES}
    return {**options, **chosen, "cuda_graph_warmup_steps": 1}


def saving(folder: Path) -> dict[str, Any]:
    return {**in_folder(folder), "save_interval": 9}


def folder_of_run(folder: Path, options: dict[str, Any], processes: int = 1, **how: Any) -> Path:
    return run_captured(folder, {**options, "save_interval": 9}, processes, **how)


@pytest.fixture(scope="module")
def eager(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_run(tmp_path_factory.mktemp("eager"), options)


@pytest.fixture(scope="module")
def graphed(graphs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphed")
    report = {"report": folder / "report.html"}
    return folder_of_run(folder, {**graphs, **report}, diary=folder / "diary")


def prepared(options: dict[str, Any]) -> RunData:
    return build_data(parse(command_line(options), 1), ParallelGroups.single(), lambda line: None)


def documents_per_pack(data: RunData, iteration: int) -> list[int]:
    """Return the documents of each micro-batch of a step in one process, read from the pack plan."""
    return [len(pieces) for pieces in data.train.plan.step(iteration - 1).packs[0]]


def test_losses_weights_and_everything_else_are_those_of_the_eager_run(
    eager: Path, graphed: Path
) -> None:
    """Losses, weights and all saved state equal the eager run over more than two epochs.

    The run has gradient accumulation, validations, checkpoints, and packs with more documents than
    the largest capacity.
    """
    assert_same_run(graphed, eager, STEPS)
    lines = [line for line in steps(graphed / "log.jsonl") if "lm_loss" in line]
    assert lines[-1]["epoch"] >= 2 and len({line["learning_rate"] for line in lines}) > STEPS / 2
    assert sum(line["graph_replays"] for line in lines) > STEPS
    assert sum(line["graph_fallbacks"] for line in lines) > STEPS / 4
    assert sum("valid_loss" in line for line in steps(graphed / "log.jsonl")) == 3


def test_the_comparison_sees_a_lost_gradient(
    graphs: dict[str, Any], eager: Path, tmp_path: Path
) -> None:
    broken = folder_of_run(tmp_path, {**graphs, "train_iters": 4}, fault=forget_to_accumulate)
    losses = [
        [line["lm_loss"] for line in without_graphs(path / "log.jsonl") if "lm_loss" in line][:4]
        for path in (broken, eager)
    ]
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]


def test_counters_of_every_step_are_those_that_the_plan_foretells(
    graphs: dict[str, Any], graphed: Path
) -> None:
    data = prepared(graphs)
    modules = 4  # M*-E
    for line in steps(graphed / "log.jsonl"):
        if "lm_loss" not in line:
            assert not any(name.startswith("graph_") for name in line)
            continue
        beyond = sum(
            count > CAPACITIES[-1] for count in documents_per_pack(data, line["iteration"])
        )
        assert (line["graph_replays"], line["graph_fallbacks"]) == (4 - beyond, beyond), line[
            "iteration"
        ]
        assert line["graph_hit_rate"] == (4 - beyond) / 4
        assert line["graph_captures"] == len(CAPACITIES) * (1 + 2 * modules)
        assert line["graph_memory_mib"] == len(CAPACITIES) * (
            1 + 2 * modules
        )  # A graph of the stand-in counts as one MiB.


def test_the_end_of_the_run_and_the_report_reconcile_with_the_plan(
    graphs: dict[str, Any], graphed: Path
) -> None:
    data = prepared(graphs)
    assert data.valid is not None
    counts = [count for step in range(1, STEPS + 1) for count in documents_per_pack(data, step)]
    validated = [
        len(pieces)
        for step in range(data.valid.plan.num_steps)
        for pieces in data.valid.plan.step(step).packs[0]
    ] * 3
    beyond = sum(count > CAPACITIES[-1] for count in counts + validated)
    total = len(counts) + len(validated)
    sentences = (
        f"CUDA graphs: {total - beyond:,} micro-batches replayed, {beyond:,} run eagerly",
        f"{beyond:,} x eager: more than {CAPACITIES[-1]} documents",
    )
    for place in ("output_0.txt", "report.html"):
        for sentence in sentences:
            assert (graphed / place).read_text().count(sentence) == 1, (place, sentence)
    page = (graphed / "report.html").read_text()
    eager = sum(count > CAPACITIES[-1] for count in counts)
    assert f"{len(counts) - eager} micro-batches replayed, {eager} eager" in page


def test_the_console_shows_captures_replays_and_the_first_fallback(graphed: Path) -> None:
    console = (graphed / "output_0.txt").read_text()
    assert "CUDA graphs: capturing 4 modules (capacities: 3, 5 documents)" in console
    assert len(re.findall(r"captured 4 of 4 modules for up to [35] documents in", console)) == 2
    assert (
        console.count("a micro-batch ran eagerly, with the same result: more than 5 documents") == 1
    )
    lines = [line for line in steps(graphed / "log.jsonl") if "lm_loss" in line]
    shown = re.findall(r"replayed (\d)/4", console)
    assert [int(number) for number in shown] == [line["graph_replays"] for line in lines]


def test_graphs_are_captured_before_the_first_step_and_given_up_before_the_process_group(
    graphed: Path,
) -> None:
    assert (graphed / "diary").read_text().splitlines() == [
        "first step, 18 graphs",
        "shutdown, 0 graphs",
    ]


def test_stopped_and_resumed(graphs: dict[str, Any], graphed: Path, tmp_path: Path) -> None:
    folder_of_run(tmp_path, {**graphs, "exit_interval": 11})
    finished = run({**graphs, **saving(tmp_path)}, tmp_path, prepare=capture_on_cpu)
    assert finished.exit_code == DONE and "(iteration 11)" in finished.console, finished.console
    assert_same_run(tmp_path, graphed, STEPS)
    assert [
        line["graph_replays"] for line in steps(tmp_path / "log.jsonl") if "lm_loss" in line
    ] == [line["graph_replays"] for line in steps(graphed / "log.jsonl") if "lm_loss" in line]


def test_two_processes_count_for_themselves(
    graphs: dict[str, Any], eager: Path, tmp_path: Path
) -> None:
    """Each of two processes counts its own replays. The log contains the counts of rank 0."""
    folder_of_run(tmp_path / "graphs", {**graphs, "train_iters": 9}, 2)
    without = {name: None for name in graphs if name.startswith("cuda_graph_")}
    folder_of_run(tmp_path / "eager", {**graphs, "train_iters": 9, **without}, 2)
    assert_same_state(tmp_path / "graphs" / "checkpoints", tmp_path / "eager" / "checkpoints", 9)
    assert without_graphs(tmp_path / "graphs" / "log.jsonl") == without_graphs(
        tmp_path / "eager" / "log.jsonl"
    )
    plan = build_data(parse(command_line(graphs), 1), _first_of_two(), lambda line: None).train.plan
    for line in steps(tmp_path / "graphs" / "log.jsonl"):
        if "lm_loss" in line:
            counts = [len(pieces) for pieces in plan.step(line["iteration"] - 1).packs[0]]
            assert len(counts) == 2
            assert line["graph_fallbacks"] == sum(count > CAPACITIES[-1] for count in counts)
            assert line["graph_replays"] == 2 - line["graph_fallbacks"]


def test_what_another_rank_cannot_capture_no_rank_does_and_it_is_said(
    graphs: dict[str, Any], tmp_path: Path
) -> None:
    """A module that rank 1 cannot capture runs eagerly on both ranks, and the console explains it.

    The console also shows the sums over all ranks.
    """
    folder_of_run(tmp_path, {**graphs, "train_iters": 3}, 2, fail_at=(3,), rank=1)
    console = (tmp_path / "output_0.txt").read_text()
    reason = "rank 1 cannot capture it (OutOfMemoryError: capture 3 has no memory), so all ranks run it eagerly"
    assert (
        console.count(f"layers.2 not captured for up to 5 documents: {reason}; it runs eagerly")
        == 1
    )
    assert (
        f"x one module eager: layers.2: {reason}" in console
        and (tmp_path / "output_1.txt").read_text() == ""
    )
    data = prepared(graphs)
    assert data.valid is not None
    packs = [data.train.plan.step(step) for step in range(3)]
    packs += [data.valid.plan.step(step) for step in range(data.valid.plan.num_steps)]
    counts = [len(pieces) for step in packs for pieces in step.packs[0]]
    beyond = sum(count > CAPACITIES[-1] for count in counts)
    total = f"all 2 ranks together: {len(counts) - beyond} micro-batches replayed, {beyond} run eagerly, 32 graphs"
    assert console.count(total) == 1, console


def _first_of_two() -> ParallelGroups:
    return dataclasses.replace(ParallelGroups.single(), dp=Axis(size=2))


@pytest.mark.parametrize("modules", [("attn", "moe_router"), ("mamba", "mlp"), ("moe",)])
def test_parts_of_the_model(
    modules: tuple[str, ...], graphs: dict[str, Any], eager: Path, tmp_path: Path
) -> None:
    options = {**graphs, "cuda_graph_modules": modules, "exit_interval": SOME_STEPS}
    folder_of_run(tmp_path, options)
    assert_same_run(tmp_path, eager, SOME_STEPS)
    console = (tmp_path / "output_0.txt").read_text()
    assert f"captured {len(modules)} of {len(modules)} modules for up to 3 documents" in console
    assert "one module eager" not in console


def test_a_capture_that_finds_no_memory_costs_a_module_its_graph_and_nothing_else(
    graphs: dict[str, Any], eager: Path, tmp_path: Path
) -> None:
    folder_of_run(tmp_path, {**graphs, "exit_interval": SOME_STEPS}, fail_at=(3,))
    console = (tmp_path / "output_0.txt").read_text()
    assert (
        "layers.2 not captured for up to 5 documents: OutOfMemoryError: capture 3 has no memory"
        in console
    )
    assert re.search(r"\d x one module eager: layers.2", console)
    assert_same_run(tmp_path, eager, SOME_STEPS)


def test_storage_that_moved_is_captured_again(
    graphs: dict[str, Any], eager: Path, tmp_path: Path
) -> None:
    options = {**graphs, "exit_interval": SOME_STEPS}
    folder_of_run(tmp_path, options, fault=partial(move_a_buffer, 5))
    assert_same_run(tmp_path, eager, SOME_STEPS)
    console = (tmp_path / "output_0.txt").read_text()
    assert console.count("CUDA graphs are captured again") == 1
    lines = [line for line in steps(tmp_path / "log.jsonl") if "lm_loss" in line]
    assert [line["graph_replays"] for line in lines[4:6]] == [
        0,
        0,
    ]  # zero until all ranks know about the move
    assert [line["graph_captures"] for line in lines[3:8]] == [18, 18, 18, 36, 36]


@pytest.mark.parametrize(
    ("call", "where"), [(1, ""), (len(CAPACITIES) + 1, " in step 6")], ids=["first", "again"]
)
def test_a_device_that_stands_still_in_a_capture_ends_the_run(
    call: int, where: str, graphs: dict[str, Any], tmp_path: Path
) -> None:
    """A stall at the end of a capture ends the run, at the first capture and at a recapture.

    At that point TransformerEngine's graphs are replayed for the first time. The recapture happens
    because weights have moved.
    """
    fault = partial(while_moving, 5, partial(watched, 1.0, (SlotGraphs, "_adopt"), call, 2.0))
    finished = run({**graphs, "train_iters": 8}, tmp_path, prepare=partial(capture_on_cpu, fault))
    assert finished.exit_code == UNFORESEEN, finished.console
    assert (
        f"another process was lost{where}: the GPU has made no progress for 1 s" in finished.console
    )
    assert finished.console.count("CUDA graphs are captured again") == (call > 1), finished.console


def test_without_a_gpu_the_run_is_eager_and_says_why(
    graphs: dict[str, Any], eager: Path, tmp_path: Path
) -> None:
    options = {**graphs, **saving(tmp_path), "exit_interval": SOME_STEPS}
    finished = run(options, tmp_path)
    assert finished.exit_code == DONE, finished.console
    assert finished.console.count("CUDA graphs need a GPU, and this run is on cpu") == 1
    assert not any(
        name.startswith("graph_") for line in steps(tmp_path / "log.jsonl") for name in line
    )
    assert_same_run(tmp_path, eager, SOME_STEPS)


def test_strict_ends_the_run_by_a_sentence_before_anything_is_captured(
    graphs: dict[str, Any], tmp_path: Path
) -> None:
    prepare = partial(capture_on_cpu, diary=tmp_path / "diary")
    finished = run(
        {**graphs, "cuda_graph_strict": True, **saving(tmp_path)}, tmp_path, prepare=prepare
    )
    assert finished.exit_code == FALLBACK, finished.console
    assert "Traceback" not in finished.console and "capturing" not in finished.console
    assert (
        finished.console.count("hold more than 5 documents, the largest capacity") == 2
    )  # once by the report on the data, and once at the end
    status = json.loads((tmp_path / "checkpoints" / "STATUS.json").read_text())
    assert status["exit_code"] == FALLBACK and status["reason"].startswith("CUDA graph fallback")


def test_what_tune_recommends_never_runs_eagerly(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the capacities that `tune` recommends, no micro-batch runs eagerly.

    The run is longer than one epoch, includes a validation, uses --cuda-graph-strict, and uses the
    packer with the most variable number of documents.
    """
    tuned = (
        "train_data_path",
        "data_cache_path",
        "sft",
        "seq_length",
        "global_batch_size",
        "packing_method",
    )
    assert main(["tune", *command_line({name: options[name] for name in tuned}), "--json"]) == 0
    flags = json.loads(capsys.readouterr().out)["recommended"]["flags"]
    words = " ".join(flags).split("--")[1:]
    chosen = {name.replace("-", "_"): tuple(values) for name, *values in map(str.split, words)}
    assert (
        chosen["cuda_graph_impl"] == ("local",)
        and max(map(int, chosen["cuda_graph_max_packed_seqs"])) > 5
    )
    run_options = {
        **options,
        **chosen,
        "cuda_graph_strict": True,
        "train_iters": 12,
        **in_folder(tmp_path),
    }
    finished = run(run_options, tmp_path, prepare=capture_on_cpu)
    assert finished.exit_code == DONE, finished.console
    lines = [line for line in steps(tmp_path / "log.jsonl") if "lm_loss" in line]
    assert len(lines) == 12 and sum(line["graph_fallbacks"] for line in lines) == 0


STRICT = {"cuda_graph_strict": True, "cuda_graph_max_packed_seqs": 128}


def ended_by(code: int, sentence: str, options: dict[str, Any], folder: Path, **more: Any) -> str:
    """Check that a run ends with an exit code and one sentence, and return its console."""
    finished = run({**options, **saving(folder)}, folder, **more)
    assert finished.exit_code == code and "Traceback" not in finished.console, finished.console
    assert finished.console.count(sentence) == 1
    return finished.console


def test_strict_on_a_cpu_is_refused_before_data_is_read(
    graphs: dict[str, Any], tmp_path: Path
) -> None:
    options = {**graphs, **STRICT, "data_cache_path": tmp_path / "cache"}
    sentence = "--cuda-graph-strict forbids eager runs; leave it out on a CPU"
    console = ended_by(FALLBACK, sentence, options, tmp_path)
    assert "documents, " not in console and not (tmp_path / "cache").exists()


def test_strict_ends_a_run_whose_capture_fails(graphs: dict[str, Any], tmp_path: Path) -> None:
    prepare = partial(capture_on_cpu, fail_at=(3,), diary=tmp_path / "diary")
    sentence = "CUDA graph fallback: layers.2 not captured for up to 128 documents"
    ended_by(FALLBACK, sentence, {**graphs, **STRICT}, tmp_path, prepare=prepare)
    assert (tmp_path / "diary").read_text().splitlines() == ["report, 0 graphs"]


def test_audits_change_nothing_and_cost_no_replay(
    graphs: dict[str, Any], graphed: Path, tmp_path: Path
) -> None:
    audits = {"cuda_graph_audit_interval": 4, "exit_interval": SOME_STEPS}
    folder_of_run(tmp_path, {**graphs, **audits})
    lines = steps(graphed / "log.jsonl")
    wanted = [line for line in lines if line["iteration"] <= SOME_STEPS]
    assert steps(tmp_path / "log.jsonl") == wanted
    assert_same_run(tmp_path, graphed, SOME_STEPS)
    console = (tmp_path / "output_0.txt").read_text()
    found = re.findall(
        r"audit at step (\d+): 4 modules replay what they compute \(.* 0.0e\+00\)", console
    )
    assert [int(step) for step in found] == list(range(4, SOME_STEPS + 1, 4))


def test_an_audit_that_finds_something_ends_the_run_by_a_sentence(
    graphs: dict[str, Any], tmp_path: Path
) -> None:
    prepare = partial(capture_on_cpu, forget_to_accumulate, diary=tmp_path / "diary")
    sentence = "audit in step 4: the replay of layers.0 differs from its eager pass"
    options = {**graphs, "cuda_graph_audit_interval": 4}
    ended_by(AUDIT, sentence, options, tmp_path, prepare=prepare)
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "report, 0 graphs"


def test_graphs_are_given_up_when_a_run_fails_or_is_stopped(
    graphs: dict[str, Any], tmp_path: Path
) -> None:
    failing = partial(defect, "between backward and all-reduce", 3, 0)
    finished = run(
        graphs, tmp_path, prepare=partial(capture_on_cpu, failing, diary=tmp_path / "failed")
    )
    assert finished.exit_code == 1 and "the sum is 3" in finished.console, finished.console
    assert (tmp_path / "failed").read_text().splitlines()[-1] == "report, 0 graphs"
    stopping = partial(signal_at, TrainStep, "__call__", 3, 0, int(signal.SIGTERM))
    finished = run(
        graphs, tmp_path, prepare=partial(capture_on_cpu, stopping, diary=tmp_path / "stopped")
    )
    assert finished.exit_code == PREEMPTED, finished.console
    assert (tmp_path / "stopped").read_text().splitlines()[-1] == "shutdown, 0 graphs"
