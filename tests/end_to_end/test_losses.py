"""The losses of a small run equal the values in this file, for any number of processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.config.parser.parse import parse
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import build_data
from megatron_packed.reporting.curves import read_jsonl
from support.runs import (
    LAST,
    Data,
    assert_same_state,
    command_line,
    final_state,
    in_folder,
    losses,
    run,
    steps,
    tiny_options,
)

GOLDEN = [
    5.559011,
    5.549754,
    5.441833,
    5.291362,
    5.16886,
    5.091563,
    4.974142,
    4.884655,
    4.750393,
    4.654714,
    4.559139,
    4.46635,
    4.378811,
    4.327759,
    4.252297,
    4.207748,
    4.179126,
    4.126392,
    4.127736,
    4.113127,
    4.102086,
    4.0995,
]
"""Loss of every step. A refactoring must not change these values.

When a deliberate change moves them, the failing test prints the new values. Paste the new values
here, and name the cause in CHANGELOG.md.
"""
GOLDEN_VALIDATION = [4.472784, 4.090633]
TOLERANCE = 3e-6
"""Relative tolerance of a loss.

float32 sums differ by 1e-7 between numbers of processes and between torch 2.11 and 2.13. A rotary
base of 20,000 instead of 10,000 moves a loss by 4.5e-6.
"""


def options_of(data: Data, folder: Path) -> dict[str, Any]:
    """Return the options of the run.

    One file names all data sets. Validation and test data are the same.
    """
    splits = {"train": [str(data.train)], "valid": str(data.valid), "test": [str(data.valid)]}
    (data.folder / "splits.json").write_text(json.dumps(splits))
    return tiny_options(
        data,
        train_iters=LAST,
        eval_interval=11,
        train_data_path=None,
        log_params_norm=True,
        log_num_zeros_in_grad=True,
        log_progress=True,
        per_split_data_args_path=data.folder / "splits.json",
        **in_folder(folder),
    )


@pytest.fixture(scope="module")
def folders(data: Data, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run without dropout, and return the folder of each run by its number of processes.

    Dropout masks would depend on the rank.
    """
    made = {}
    for processes in (1, 2, 4):
        folder = made[processes] = tmp_path_factory.mktemp(f"processes_{processes}")
        finished = run(options_of(data, folder), folder, processes)
        assert finished.exit_code == 0, finished.console
    return made


def validations(log: Path) -> list[float]:
    return [line["valid_loss"] for line in steps(log) if "valid_loss" in line]


def test_the_golden_losses(folders: dict[int, Path]) -> None:
    found, valid = losses(folders[1] / "log.jsonl"), validations(folders[1] / "log.jsonl")
    shown = f"GOLDEN = {[round(loss, 6) for loss in found]}\nGOLDEN_VALIDATION = {[round(loss, 6) for loss in valid]}"
    assert found == pytest.approx(GOLDEN, rel=TOLERANCE), shown
    assert valid == pytest.approx(GOLDEN_VALIDATION, rel=TOLERANCE), shown


def test_the_test_set_is_looked_at_once_at_the_end(folders: dict[int, Path]) -> None:
    """The test set is evaluated once, at the end, and gives the numbers of the last validation.

    Both use the same weights and the same packs.
    """
    *before, validation, test = steps(folders[2] / "log.jsonl")
    renamed = {name.replace("test_", "valid_"): value for name, value in test.items()}
    assert renamed == validation and "test_loss" in test and test["iteration"] == LAST
    assert not any("test_loss" in line for line in before)


def test_the_last_validation_step_leaves_ranks_without_a_document(data: Data) -> None:
    """In the last validation step some ranks have packs without documents.

    The tests of equal losses below therefore cover packs that contain only padding.
    """
    options = tiny_options(data, train_iters=LAST, valid_data_path=data.valid, eval_interval=11)
    valid = build_data(
        parse(command_line(options), 1), ParallelGroups.single(), lambda line: None
    ).valid
    assert valid is not None
    last = valid.plan.step(valid.plan.num_steps - 1)
    assert 0 < last.global_packs < 4 == len(last.packs[0])


def test_the_distributed_optimizer_changes_no_bit(
    data: Data, folders: dict[int, Path], tmp_path: Path
) -> None:
    """The distributed optimizer changes no bit of the log or of the last checkpoint.

    Two processes start with it (and with overlap) and resume without it.
    """
    options = options_of(data, tmp_path)
    overlap = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    for more in ({**overlap, "exit_interval": LAST // 2}, {}):
        finished = run({**options, **more}, tmp_path, 2)
        assert finished.exit_code == 0, finished.console
    assert steps(tmp_path / "log.jsonl") == steps(folders[2] / "log.jsonl")
    assert_same_state(tmp_path / "checkpoints", folders[2] / "checkpoints", LAST)
    told = [
        (folder / "checkpoints" / "progress.txt").read_text() for folder in (tmp_path, folders[2])
    ]
    assert [text.count("\tStarting job\n") for text in told] == [2, 1]
    # Totals of operations and tokens do not depend on the number of jobs.
    assert (
        len({text.rstrip().partition(f"Iteration: {LAST}\t")[2].split("\t", 2)[2] for text in told})
        == 1
    )


@pytest.mark.parametrize("processes", [2, 4])
def test_the_same_losses_with_any_number_of_processes(
    processes: int, folders: dict[int, Path]
) -> None:
    """Two and four processes train on the same packs in every step and reach the same losses.

    Only the order of sums differs.
    """
    alone, together = steps(folders[1] / "log.jsonl"), steps(folders[processes] / "log.jsonl")
    rounded = ("lm_loss", "aux_loss", "grad_norm", "valid_loss", "test_loss", "params_norm")
    assert len(alone) == len(together)
    assert all(
        line["params_norm"] > 1 and line["num_zeros"] > 100 for line in alone if "lm_loss" in line
    )
    for one, other in zip(alone, together):
        for name, value in one.items():
            assert other[name] == (
                pytest.approx(value, rel=TOLERANCE) if name in rounded else value
            ), name
    imbalances = [
        line["dp_imbalance"]
        for line in read_jsonl(folders[processes] / "log.jsonl")
        if "lm_loss" in line
    ]
    assert len(imbalances) == LAST and all(1 <= imbalance <= processes for imbalance in imbalances)
    state, other_state = (final_state(folders[n] / "checkpoints", LAST)[0] for n in (1, processes))
    for name, tensor in state.items():
        if name.startswith(("model/", "optimizer/exp_avg/")):
            scale = tensor.abs().max().item()
            assert (other_state[name] - tensor).abs().max().item() <= 2e-4 * scale, name
