"""Loss spikes and steps without targets: effects on the run, messages, and resuming."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.faults import both, kill_at, spoil_steps
from support.runs import Data, assert_same_state, final_state, in_folder, run, steps, tiny_options

DONE, KILLED = 0, -9
LAST, SPIKES, WITHOUT_TARGETS = 12, (8, 10), 6
SPOILT = partial(spoil_steps, SPIKES, (WITHOUT_TARGETS,))


@pytest.fixture(scope="module")
def options(data: Data) -> dict[str, Any]:
    """Return options with a spike window of six steps.

    Spikes are detected after three recorded steps.
    """
    return tiny_options(
        data,
        train_iters=LAST,
        save_interval=3,
        loss_spike_policy="skip",
        loss_spike_window=6,
        loss_spike_factor=4,
    )


@pytest.fixture(scope="module")
def undisturbed(
    options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    finished = run(
        {**options, **in_folder(folder), "report": folder / "page.html"}, folder, 1, SPOILT
    )
    assert finished.exit_code == DONE, finished.console
    return folder, finished.console


def test_each_is_named_counted_and_not_applied(undisturbed: tuple[Path, str]) -> None:
    folder, console = undisturbed
    assert (
        f"WARNING: step {WITHOUT_TARGETS} had no target tokens; its update was not applied"
        in console
    )
    for number, step in enumerate(SPIKES, start=1):
        [line] = [
            line
            for line in console.splitlines()
            if line.startswith(f"WARNING: step {step} is a spike: loss ")
        ]
        assert (
            "(--loss-spike-factor 4) and gradient norm " in line
            and "(--grad-norm-spike-factor 10)" in line
        )
        assert line.endswith(
            f"its update was not applied, weights and moments are unchanged "
            f"(spikes so far: {number})."
        )
    lines = {line["iteration"]: line for line in steps(folder / "log.jsonl")}
    reasons = {
        iteration: line["skip_reason"] for iteration, line in lines.items() if line["skipped"]
    }
    assert reasons == {WITHOUT_TARGETS: "no targets", **dict.fromkeys(SPIKES, "spike")}
    assert sorted(step for step, line in lines.items() if "loss_median" in line) == [*SPIKES]
    assert lines[8]["lm_loss"] > 50 * lines[8]["loss_median"] > 0 and "grad_norm_median" in lines[8]
    tensors, metadata = final_state(folder / "checkpoints", LAST)
    progress = metadata["progress"]
    counts = ("iteration", "skipped_steps", "steps_without_targets", "spikes", "skipped_spikes")
    assert [progress[name] for name in counts] == [LAST, 0, 1, 2, 2]
    assert tensors["optimizer/step"].item() == LAST - 3
    assert (
        len(metadata["spike_window"]["loss"]) == 6 and max(metadata["spike_window"]["loss"]) > 100
    )
    page = (folder / "page.html").read_text()
    assert "<th>steps skipped without target tokens</th><td>1 (6)</td>" in page
    assert "<th>steps with a spike of loss or gradient norm</th><td>2 (8, 10)</td>" in page
    assert "<th>steps skipped for a spike</th><td>2 (8, 10)</td>" in page


def test_a_run_that_was_killed_takes_the_same_decisions(
    options: dict[str, Any], undisturbed: tuple[Path, str], tmp_path: Path
) -> None:
    """A run that is killed in step 11 and resumes after step 9 detects the same spikes.

    With an empty window, step 10 could not be detected as a spike.
    """
    killed = partial(both, SPOILT, partial(kill_at, "before a line of the log", 11, 0))
    assert run({**options, **in_folder(tmp_path)}, tmp_path, 1, killed).exit_code == KILLED
    finished = run({**options, **in_folder(tmp_path)}, tmp_path, 1, SPOILT)
    assert finished.exit_code == DONE and "iteration 9" in finished.console, finished.console
    assert "lacks" not in finished.console
    assert_same_state(tmp_path / "checkpoints", undisturbed[0] / "checkpoints", LAST)
    assert steps(tmp_path / "log.jsonl") == steps(undisturbed[0] / "log.jsonl")


def test_a_checkpoint_from_before_the_policy_goes_on_with_an_empty_window(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A checkpoint without a spike window resumes with an empty window.

    Two recorded steps are not enough to detect step 10 as a spike.
    """
    without = {
        **options,
        "loss_spike_policy": "off",
        "loss_spike_window": None,
        "loss_spike_factor": None,
    }
    assert (
        run({**without, **in_folder(tmp_path), "exit_interval": 9}, tmp_path, 1, SPOILT).exit_code
        == DONE
    )
    assert "spike_window" not in final_state(tmp_path / "checkpoints", 9)[1]
    more = {**in_folder(tmp_path), "exit_interval": 11, "loss_spike_policy": "warn"}
    finished = run({**options, **more}, tmp_path, 1, SPOILT)
    assert finished.exit_code == DONE and "is a spike" not in finished.console, finished.console
    tensors, metadata = final_state(tmp_path / "checkpoints", 11)
    assert len(metadata["spike_window"]["loss"]) == 2 and metadata["progress"]["spikes"] == 0
    assert tensors["optimizer/step"].item() == 10  # Only the step without targets was skipped.
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["iteration"] == 11
