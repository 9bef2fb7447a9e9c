"""Files that a run writes for its user: one JSON line per step, the report page and TensorBoard."""

import gzip
import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed.config.parser.parse import parse
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import build_data
from megatron_packed.models.flops import FlopCounter
from megatron_packed.reporting.metric_names import tracked_name
from megatron_packed.reporting.run_report import write_report
from support.faults import hide_package
from support.json_lines import read_lines
from support.runs import LAST, Data, command_line, in_folder, run, steps, tiny_options

USAGE = 2
SLOTS = 2 * 128


@pytest.fixture(scope="module")
def lines(uninterrupted: Callable[[int], Path]) -> list[dict[str, Any]]:
    """Return the records of steps and validations in the log of a run of two processes."""
    return [line for line in every_line(uninterrupted(2)) if "plan_hash" in line]


def every_line(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "log.jsonl")


@pytest.fixture(scope="module")
def trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "lm_loss" in line]


def test_one_line_for_every_step_and_validation_in_order(lines: list[dict[str, Any]]) -> None:
    kinds = [
        (line["iteration"], "lm_loss" if "lm_loss" in line else "valid_loss") for line in lines
    ]
    expected = [(iteration, "lm_loss") for iteration in range(1, LAST + 1)]
    expected += [(iteration, "valid_loss") for iteration in (4, 8, 12, 16, 20, LAST)]
    assert kinds == sorted(expected)


def test_the_numbers_of_a_step_add_up(trained: list[dict[str, Any]]) -> None:
    consumed = 0
    for line in trained:
        consumed += line["real_tokens"]
        assert line["consumed_tokens"] == consumed
        assert line["real_tokens"] + line["padded_tokens"] == SLOTS
        assert line["pack_fill"] == line["real_tokens"] / SLOTS
        assert 0 < line["target_tokens"] < line["real_tokens"]
        assert line["num_seqs"] == line["docs_per_pack"] * 2 >= 2
        assert line["tokens_per_second"] == pytest.approx(
            line["real_tokens"] / line["step_time_ms"] * 1e3
        )
        assert 0 < line["step_time_ms"] < 60_000 and line["memory_gib"] > 0.05
        assert line["tflops_per_gpu"] > 0 and line["mfu"] is None and line["skipped"] is False
        assert (
            line["data_wait_ms"] > 0
            and line["memory_reserved_gib"] is None
            and line["host_memory_gib"] > 0.05
        )
        for load in line["expert_load"]:
            assert sum(load) == pytest.approx(len(load), abs=0.01) and len(load) > 1
        assert line["expert_load_max"] == pytest.approx(
            max(map(max, line["expert_load"])), abs=1e-3
        )
        assert math.isfinite(line["lm_loss"]) and line["grad_norm"] > 0 and line["aux_loss"] > 0
    assert len({line["plan_hash"] for line in trained}) == 1 and len(trained[0]["plan_hash"]) == 64


def test_operations_are_those_of_the_real_documents(
    trained: list[dict[str, Any]], dropout_options: dict[str, Any]
) -> None:
    """The logged TFLOP/s count the operations of the real documents, divided among all ranks.

    A pack counted as one document would have a few percent more operations.
    """
    config = parse(command_line({**dropout_options, "save_interval": None}), 1)
    data = build_data(config, ParallelGroups.single(), lambda line: None)
    stream = data.train
    counter = FlopCounter(config.model, data.vocab_size)
    for number, line in enumerate(trained):
        counted = line["tflops_per_gpu"] * 1e12 * line["step_time_ms"] / 1e3 * 2
        assert counted == pytest.approx(
            counter.training(stream.plan.lengths_of(stream.plan.step(number))).total
        )
        assert counted < 0.99 * counter.training([SLOTS // 2] * 2).total


def test_the_learning_rate_follows_the_schedule(trained: list[dict[str, Any]]) -> None:
    """The learning rate rises from zero for two steps, then follows half a cosine down to zero."""
    assert [line["learning_rate"] for line in trained[:3]] == pytest.approx([0, 1.5e-3, 3e-3])
    left = [1 + math.cos(math.pi * (step - 2) / (LAST - 2)) for step in range(2, LAST)]
    assert [line["learning_rate"] for line in trained[2:]] == pytest.approx(
        [1.5e-3 * share for share in left]
    )


def test_targets_are_the_answers(
    trained: list[dict[str, Any]], data: Data, dropout_options: dict[str, Any]
) -> None:
    """Every step trains on all its answers: their bytes and the end of the turn.

    Documents that were too long keep their short question, which leaves less room for the answer.
    """
    lines = [json.loads(line)["messages"] for line in data.train.read_text().splitlines()]
    config = parse(command_line({**dropout_options, "save_interval": None}), 1)
    stream = build_data(config, ParallelGroups.single(), lambda line: None).train
    dataset = stream.dataset
    whole = dataset.source_lengths == dataset.lengths
    assert len(dataset) == len(lines) and (~whole).sum() > 10
    answers = np.array([len(messages[1]["content"]) + 1 for messages in lines])
    kept = np.array([dataset.document(number)[1].sum() for number in range(len(lines))])
    assert (kept[whole] == answers[whole]).all()
    assert (kept > 0).all() and (kept <= answers).all()
    for number, line in enumerate(trained):
        numbers = np.concatenate(
            [numbers for rank in stream.plan.step(number).packs for numbers in rank]
        )
        assert line["target_tokens"] == kept[stream.plan.pieces.document[numbers]].sum()


def test_the_log_describes_the_run_its_checkpoints_and_its_end(
    uninterrupted: Callable[[int], Path], lines: list[dict[str, Any]]
) -> None:
    run = lines[0]["run"]
    assert run["last_iteration"] == LAST and run["layout"]["processes"] == 2
    assert run["model"]["parameters"] > run["model"]["active_parameters"] > 0
    assert f"--train-iters {LAST}" in run["flags"] and "--sft" in run["flags"]
    assert run["machine"]["hosts"] == 1 and {"torch", "Python"} < run["versions"].keys()
    [start] = lines[0]["starts"]
    *_, last = others = [line for line in every_line(uninterrupted(2)) if "plan_hash" not in line]
    assert last["iteration"] == LAST and last["end"]["exit_code"] == 0
    assert datetime.fromisoformat(start["time"]) <= datetime.fromisoformat(last["end"]["time"])
    saved = [line["iteration"] for line in others if "checkpoint" in line]
    assert saved[-1] == LAST and len(saved) == len(others) - 1


def test_the_first_line_accounts_for_tokens_and_targets(
    lines: list[dict[str, Any]], data: Data
) -> None:
    for name in ("data", "kernels", "run", "starts"):
        assert [name in line for line in lines] == [True] + [False] * (len(lines) - 1)
    assert (
        lines[0]["kernels"]["attention"] == "reference"
        and lines[0]["kernels"]["optimizer"] == "torch"
    )
    for name, documents in (("training", 240), ("validation", 24)):
        of = lines[0]["data"][name]
        assert of["documents_in"] == documents and of["targets_in"] > 0
        lost = ("kept", "truncated", "split", "dropped")
        assert of["targets_in"] == sum(of[f"targets_{part}"] for part in lost)
    [validated] = {line["valid_target_tokens"] for line in lines if "valid_loss" in line}
    assert (
        0 < validated <= lines[0]["data"]["validation"]["targets_kept"]
    )  # --eval-iters may end a validation before the last document


def test_validations_look_at_the_same_tokens_with_better_and_better_weights(
    lines: list[dict[str, Any]],
) -> None:
    validations = [line for line in lines if "valid_loss" in line]
    assert len({(line["valid_target_tokens"], line["plan_hash"]) for line in validations}) == 1
    losses = [line["valid_loss"] for line in validations]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5


def test_two_processes_write_one_log(
    uninterrupted: Callable[[int], Path], lines: list[dict[str, Any]]
) -> None:
    """Two processes write one log with the same names and the same plan as one process."""
    alone = steps(uninterrupted(1) / "log.jsonl")
    for line, other in zip(lines, alone, strict=True):
        assert other.keys() <= line.keys()
        for name in ("iteration", "real_tokens", "target_tokens", "num_seqs", "plan_hash"):
            assert line.get(name) == other.get(name)


def test_the_console_of_rank_0_tells_the_same(
    uninterrupted: Callable[[int], Path], trained: list[dict[str, Any]]
) -> None:
    folder = uninterrupted(2)
    console = (folder / "output_0.txt").read_text()
    assert (folder / "output_1.txt").read_text() == ""
    for line in trained:
        start = f"step {line['iteration']:>2}/{LAST} | ETA "
        [shown] = [text for text in console.splitlines() if text.startswith(start)]
        parts = (
            f"loss {line['lm_loss']:.4f}",
            f"lr {line['learning_rate']:.2e}",
            f"{line['step_time_ms']:,.0f} ms",
            f"{line['tokens_per_second']:,.0f} tok/s",
            f"fill {100 * line['pack_fill']:.1f} %",
        )
        assert [part for part in parts if part not in shown] == []


def test_the_report_holds_the_numbers_of_the_run(data: Data, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    options = tiny_options(
        data,
        train_iters=6,
        global_batch_size=2,
        valid_data_path=data.valid,
        eval_interval=3,
        log_jsonl=tmp_path / "log.jsonl",
        report=page,
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=2,
        profile_step_end=4,
        profile_ranks=(0, 1),
    )
    finished = run(options, tmp_path, 2)
    assert finished.exit_code == 0 and f"report: {page}" in finished.console, finished.console
    log, text = steps(tmp_path / "log.jsonl"), page.read_text()
    trained = [line for line in log if "lm_loss" in line]
    validations = [line["valid_loss"] for line in log if "valid_loss" in line]
    rows = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", text))
    assert rows["steps"] == "6"
    assert (
        rows["training targets"].endswith("0 of 240 documents have none left")
        and "validation targets" in rows
    )
    assert (
        rows["first and last training loss"]
        == f"{trained[0]['lm_loss']:.4f} → {trained[-1]['lm_loss']:.4f}"
    )
    assert rows["first and last validation loss"] == f"{validations[0]:.4f} → {validations[-1]:.4f}"
    assert rows["tokens consumed"] == f"{trained[-1]['consumed_tokens']:,}"
    assert trained[-1]["plan_hash"] in rows["plan hash"]
    assert rows["kernels"].startswith(
        "attention reference · rope reference · convolution reference · scan reference"
    )
    assert finished.console.count("kernels: attention reference · rope reference · ") == 1
    table = (tmp_path / "profile" / "kernels_rank0.txt").read_text()
    title = "<summary>Kernels of steps 3 to 4 on rank 0</summary><div class='wide'><pre>"
    assert f"{title}{table.rstrip()}" in text
    # On a busy machine other operations are among the longest ones.
    assert len(re.findall(r"\n +[\d.]+% +[\d.]+ +[\d,.]+  aten::\w+", table)) >= 5
    for rank in (0, 1):
        trace = json.loads(
            gzip.decompress((tmp_path / "profile" / f"trace_rank{rank}.json.gz").read_bytes())
        )
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("optim::step") == 2  # steps 3 and 4
        assert (
            (tmp_path / "profile" / f"kernels_rank{rank}.txt")
            .read_text()
            .startswith("operations: ")
        )
    for title in (
        "Loss",
        "Throughput",
        "Memory",
        "Load of experts",
        "Load of each expert",
        "Waiting for data",
    ):
        assert text.count(f'aria-label="{title}"') == 1
    assert (
        re.findall(r"""(?:src|href|url)\W{1,2}\s*(?:https?:)?//""", text) == []
    )  # The page loads nothing from the network.
    again = write_report(tmp_path / "log.jsonl", tmp_path / "again.html")
    assert again.read_text() == text  # the log has everything that the page shows


def test_what_needs_a_missing_package_is_refused_at_the_start(data: Data, tmp_path: Path) -> None:
    options = tiny_options(
        data, train_iters=6, **in_folder(tmp_path), tensorboard_dir=tmp_path / "board"
    )
    finished = run(options, tmp_path, 2, partial(hide_package, "tensorboard"))
    assert finished.exit_code == USAGE and "Traceback" not in finished.console
    assert finished.console.count("needs tensorboard, which is not installed") == 1
    assert "pip install 'megatron-packed[log]'" in finished.console
    assert not (tmp_path / "log.jsonl").exists()


def test_tensorboard_shows_every_number(data: Data, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = tiny_options(
        data,
        train_iters=5,
        log_jsonl=tmp_path / "log.jsonl",
        tensorboard_dir=tmp_path / "board",
        valid_data_path=data.valid,
        eval_interval=5,
        eval_iters=1,
        manual_gc=True,
        manual_gc_interval=2,
        check_weight_hash_across_dp_replicas_interval=2,
        log_params_norm=True,
        log_num_zeros_in_grad=True,
    )
    assert run(options, tmp_path, 2).exit_code == 0
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    log = steps(tmp_path / "log.jsonl")
    for name in (
        "lm_loss",
        "grad_norm",
        "params_norm",
        "num_zeros",
        "learning_rate",
        "real_tokens",
        "pack_fill",
    ):
        shown = [(event.step, event.value) for event in board.Scalars(tracked_name(name))]
        assert shown == [
            (line["iteration"], pytest.approx(line[name])) for line in log if name in line
        ]
    [text] = board.Tensors("flags/text_summary")
    assert b"    --train-iters 5\n" in text.tensor_proto.string_val[0]
    [perplexity] = board.Scalars("valid/perplexity")
    assert (
        perplexity.value == pytest.approx(math.exp(log[-1]["valid_loss"])) and perplexity.step == 5
    )
