"""Real runs with tensor parallelism: log and checkpoints equal those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.cli.quickstart.command import answer_and_report
from megatron_packed.config.parser.parse import parse, parse_or_exit
from megatron_packed.inputs.open_documents import build_tokenizer
from megatron_packed.resume.load_for_inference import load_model
from support.json_lines import read_lines
from support.runs import (
    Data,
    assert_close_state,
    assert_same_log,
    assert_same_state,
    command_line,
    in_folder,
    steps,
    tiny_options,
    trained,
)

TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
SEQUENCE: dict[str, Any] = {**TENSOR, "sequence_parallel": True}
HALF, LAST = 3, 6


def operations(folder: Path, processes: int) -> list[float]:
    """Return the operations of each step on all processes, in 10^12, from logged rate and step
    time.
    """
    lines = read_lines(folder / "log.jsonl")
    return [
        e["tflops_per_gpu"] * processes * e["step_time_ms"] / 1e3 for e in lines if "lm_loss" in e
    ]


def test_a_run_that_changes_its_layout_is_the_run_of_one_process(
    data: Data, tmp_path: Path
) -> None:
    """A run that starts with TP2 on two processes and resumes on four equals a run of one process.

    The run with two processes includes the isolation self-test; the others do not.
    """
    options = tiny_options(
        data,
        train_iters=LAST,
        valid_data_path=data.valid,
        eval_interval=HALF,
    )
    alone, together = tmp_path / "alone", tmp_path / "together"
    said = trained(alone, 1, options)
    [model] = [line for line in said.splitlines() if "parameters" in line]
    tested = {**options, "no_isolation_self_test": None}
    said = trained(together, 2, tested, exit_interval=HALF, **SEQUENCE)
    assert model in said  # the whole model's parameters, not a rank's
    assert "2 process(es) on cpu (2 tensor-parallel, sequence too, x 1 data-parallel)" in said
    assert "isolation self-test: 12 checks passed" in said
    said = trained(together, 4, options, use_distributed_optimizer=True, **SEQUENCE)
    assert (
        f"(iteration {HALF})" in said
        and "(2 tensor-parallel, sequence too, x 2 data-parallel)" in said
    )
    assert_same_log(together, alone)
    counted = operations(together, 2)[:HALF] + operations(together, 4)[HALF:]
    assert counted == pytest.approx(operations(alone, 1))
    state = assert_close_state(together, alone, LAST, 2e-3)
    trained(together, 1, options)  # One process has no step left to do.
    assert_same_log(together, alone)
    config = parse(command_line({**options, **in_folder(together)}), 1)
    warned: list[str] = []
    # Text generation loads the model in this way.
    model = load_model(config, build_tokenizer(config.data, None), warn=warned.append)
    assert warned == []
    assert torch.equal(model.embedding.weight, state["model/embedding.weight"])


def test_stopped_and_resumed_with_dropout(data: Data, tmp_path: Path) -> None:
    """A run with dropout that stops and resumes equals the uninterrupted run bit for bit.

    Ranks without sequence parallelism drop the same values as one process.
    """
    options = tiny_options(data, train_iters=LAST, hidden_dropout=0.1)
    alone, whole, halves = (tmp_path / name for name in ("alone", "whole", "halves"))
    trained(alone, 1, options)
    trained(whole, 2, options, **TENSOR)
    assert_same_log(whole, alone)
    trained(halves, 2, options, exit_interval=HALF, **TENSOR)
    trained(halves, 2, options, **TENSOR)
    assert steps(halves / "log.jsonl") == steps(whole / "log.jsonl")
    assert_same_state(halves / "checkpoints", whole / "checkpoints", LAST)


def test_the_quickstart_ends_with_the_flags_of_any_layout(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The questions of the quickstart are answered in one process with the flags of the training run."""
    options = tiny_options(
        data,
        train_iters=HALF,
        valid_data_path=data.valid,
        eval_interval=HALF,
        max_position_embeddings=256,  # for prompts and their answers
        **SEQUENCE,
    )
    trained(tmp_path, 2, options)
    config = parse_or_exit(command_line({**options, **in_folder(tmp_path)}), launched=False)
    assert answer_and_report(config) == 1  # such a short run has learned nothing
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out
