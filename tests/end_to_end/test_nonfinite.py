"""A step with a non-finite value changes no weight, names its micro-batch, and stops or continues.

--on-nonfinite decides whether the run stops.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.faults import forget_step, poison_forward
from support.runs import assert_same_tensors, final_state, in_folder, run, steps

DONE, NONFINITE = 0, 20
BAD = 7
"""Step with a non-finite value, in the second of two micro-batches of rank 1.

The other micro-batches of the step are fine.
"""
NAN, INFINITY = float("nan"), float("inf")
WARNING = (
    f"WARNING: step {BAD} had a non-finite loss or gradient in micro-batch 1 of rank 1; its update was not applied, "
    "weights and moments are unchanged."
)


@pytest.fixture(scope="module")
def options(dropout_options: dict[str, Any]) -> dict[str, Any]:
    """Return options of runs whose only forward passes are those of training.

    Each rank runs two forward passes per step.
    """
    changes = {"global_batch_size": 4, "eval_interval": None, "valid_data_path": None}
    return {**dropout_options, **changes, "save_interval": 1}


def poisoned(value: float, step: int = BAD) -> Callable[[], None]:
    return partial(poison_forward, 2 * step, 1, value)


def line_of(log: Path, iteration: int) -> dict[str, Any]:
    [line] = [line for line in steps(log) if line["iteration"] == iteration]
    return line


@pytest.fixture(scope="module")
def clean(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without a fault."""
    folder = tmp_path_factory.mktemp("clean")
    assert run({**options, **in_folder(folder), "exit_interval": BAD}, folder, 2).exit_code == DONE
    return folder


@pytest.mark.parametrize("value", [NAN, INFINITY], ids=str)
def test_stop(value: float, options: dict[str, Any], tmp_path: Path) -> None:
    """The run stops after the next step, which is complete, and its last checkpoint is clean.

    The non-finite value is known only while the next step runs.
    """
    finished = run(
        {**options, "save_interval": 5, **in_folder(tmp_path)}, tmp_path, 2, poisoned(value)
    )
    assert finished.exit_code == NONFINITE, finished.console
    assert finished.console.count(WARNING) == finished.console.count("non-finite loss") == 1
    lines = finished.console.splitlines()
    assert lines.index(WARNING) == 1 + next(
        i for i, line in enumerate(lines) if line.startswith(f"step  {BAD}/")
    )
    assert json.loads((tmp_path / "checkpoints" / "STATUS.json").read_text()) == {
        "exit_code": NONFINITE
    }
    assert steps(tmp_path / "log.jsonl")[-1]["iteration"] == BAD + 1
    tensors, metadata = final_state(tmp_path / "checkpoints", BAD + 1)
    assert (
        metadata["progress"]["skipped_steps"] == 1 and metadata["progress"]["iteration"] == BAD + 1
    )
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert tensors["optimizer/step"].item() == BAD


@pytest.mark.parametrize("value", [NAN, INFINITY], ids=str)
def test_weights_moments_and_expert_biases_are_those_of_the_step_before(
    value: float, options: dict[str, Any], clean: Path, tmp_path: Path
) -> None:
    changes = {"on_nonfinite": "skip", "exit_interval": BAD}
    finished = run({**options, **changes, **in_folder(tmp_path)}, tmp_path, 2, poisoned(value))
    assert finished.exit_code == DONE and WARNING in finished.console, finished.console
    found, _ = final_state(tmp_path / "checkpoints", BAD)
    before, _ = final_state(clean / "checkpoints", BAD - 1)
    after, _ = final_state(clean / "checkpoints", BAD)
    kept = [name for name in found if name.startswith(("model/", "optimizer/"))]
    assert any(name.endswith("expert_bias") for name in kept)
    assert_same_tensors({name: found[name] for name in kept}, {name: before[name] for name in kept})
    # A normal step changes every one of these tensors, so the comparison above can fail.
    assert [name for name in kept if before[name].equal(after[name])] == []
    assert found["rng/rank_0/torch"].equal(after["rng/rank_0/torch"])
    bad, good = line_of(tmp_path / "log.jsonl", BAD), line_of(clean / "log.jsonl", BAD)
    assert bad["skipped"] and not good["skipped"] and not math.isfinite(float(bad["lm_loss"]))
    same = ("consumed_tokens", "learning_rate", "num_seqs")
    assert [bad[name] for name in same] == [good[name] for name in same]


def test_skip_goes_on_as_if_the_update_had_been_forgotten(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """After a skipped step 7 the run equals, bit for bit, a run that undoes the update of step 7."""
    found, expected = tmp_path / "poisoned", tmp_path / "forgotten"
    changes = {"on_nonfinite": "skip", "exit_interval": 12}
    finished = run({**options, **changes, **in_folder(found)}, found, 2, poisoned(NAN))
    assert finished.exit_code == DONE and finished.console.count(WARNING) == 1, finished.console
    assert (
        run(
            {**options, **changes, **in_folder(expected)}, expected, 2, partial(forget_step, BAD)
        ).exit_code
        == DONE
    )
    tensors, metadata = final_state(found / "checkpoints", 12)
    assert_same_tensors(tensors, final_state(expected / "checkpoints", 12)[0])
    assert metadata["progress"]["skipped_steps"] == 1
    for iteration in range(BAD + 1, 13):
        assert line_of(found / "log.jsonl", iteration) == line_of(expected / "log.jsonl", iteration)


def test_a_stop_is_not_lost_when_a_validation_or_a_save_is_due(
    dropout_options: dict[str, Any], tmp_path: Path
) -> None:
    """A run also stops if a validation or a save is due, which first read the last step's metrics.

    The run has one process and two micro-batches per step; the second has the non-finite value.
    """
    for name, bad in (("validation", 4), ("save", 3)):
        folder = tmp_path / name
        fault = partial(poison_forward, 2 * bad, 0, NAN)
        finished = run({**dropout_options, **in_folder(folder)}, folder, 1, fault)
        assert finished.exit_code == NONFINITE, finished.console
        assert (
            f"step {bad} had a non-finite loss or gradient in micro-batch 1 of rank 0"
            in finished.console
        )
        assert [line["iteration"] for line in steps(folder / "log.jsonl")] == list(
            range(1, bad + 1)
        )
        tensors, _ = final_state(folder / "checkpoints", bad)
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_last_step(options: dict[str, Any], tmp_path: Path) -> None:
    """A non-finite value in the last step is also noticed, although no step follows."""
    finished = run(
        {**options, "train_iters": BAD, **in_folder(tmp_path)}, tmp_path, 2, poisoned(NAN)
    )
    assert finished.exit_code == NONFINITE and WARNING in finished.console, finished.console
    assert final_state(tmp_path / "checkpoints", BAD)[1]["progress"]["skipped_steps"] == 1
