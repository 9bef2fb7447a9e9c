"""The checkpoint of the lowest validation loss, and the early stop of a run."""

import re
import shutil
from pathlib import Path

import pytest

from megatron_packed.checkpoint.errors import NoCheckpointError
from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.training import evaluation
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from megatron_packed.training.trainer import Trainer
from support.json_lines import write_texts

MODEL = "--hybrid-layer-pattern - --hidden-size 8 --no-isolation-self-test --seq-length 64"
LOSSES = [3.0, 2.0, float("nan"), 2.0, 2.5, 2.75, 1.5, 1.25]
"""Validation losses of the runs below: the best are of steps 2, 7 and 8."""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of a run of eight steps that validates after every step and keeps one checkpoint."""
    for name, word in (("train", "hello"), ("valid", "99 hello")):
        write_texts(tmp_path / f"{name}.jsonl", (f"{n:02d} {word}" for n in range(40)))
    folder = str(tmp_path / "run")
    data = f"--train-data-path {tmp_path}/train.jsonl --valid-data-path {tmp_path}/valid.jsonl"
    words = f"{MODEL} {data} --lr 1e-2 --train-iters 8 --eval-interval 1 --save {folder} --load {folder}"
    return f"{words} --save-retain 1 --save-interval 2 --save-best".split()


@pytest.fixture(autouse=True)
def losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the validation after step n return the n-th of `LOSSES`."""

    def loss_of_step(trainer: Trainer, stream: object) -> tuple[float, int]:
        return LOSSES[trainer.progress.iteration - 1], 1

    monkeypatch.setattr(evaluation, "sum_loss", loss_of_step)


def run(flags: list[str], *more: str) -> ExitCode:
    return train([*flags, *more])


def kept(tmp_path: Path) -> list[int]:
    """Return the steps of the checkpoints of the run."""
    return sorted(int(path.name[5:]) for path in (tmp_path / "run").glob("step_*"))


def test_the_lowest_finite_loss_is_the_best() -> None:
    """NaN and equal losses are not the best, and count as validations without improvement."""
    progress, improved = RunProgress(), []
    for progress.iteration, loss in enumerate([float("inf"), *LOSSES], start=1):
        improved.append(progress.count_validation(loss))
    assert improved == [False, True, True, False, False, False, False, True, True]
    assert (progress.best_at, progress.best_loss, progress.validations_since_best) == (9, 1.25, 0)


def test_the_best_checkpoint_outlives_newer_ones(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 is kept until step 7 is better, also by a resumed run, and it is loaded by name.

    The last lines of a run name both checkpoints.
    """
    assert run(flags, "--exit-interval", "3") is ExitCode.DONE
    assert kept(tmp_path) == [2, 3]
    folder = tmp_path / "run"
    trained, results = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(
        r"Trained steps 1 to 3 of 8 in \d+\.\d s: 18\d tokens, median .* tokens/s\.", trained
    )
    best = f"Lowest validation loss 2.0000 at step 2 ({folder}/step_00000002)"
    assert results == f"{best} | checkpoint: {folder}/step_00000003"
    assert run(flags, "--exit-interval", "6") is ExitCode.DONE
    assert kept(tmp_path) == [2, 6]
    best = TrainedModel.load(tmp_path / "run", step="best", device="cpu")
    named, newest = (TrainedModel.load(tmp_path / "run", step=at, device="cpu") for at in (2, None))
    assert best.model.embedding.weight.equal(named.model.embedding.weight)
    assert not best.model.embedding.weight.equal(newest.model.embedding.weight)
    assert run(flags, "--exit-interval", "7") is ExitCode.DONE
    assert kept(tmp_path) == [7]


def test_checkpoints_of_an_interval_are_kept(flags: list[str], tmp_path: Path) -> None:
    run(flags, "--save-retain-interval", "4")
    assert kept(tmp_path) == [4, 8]


def test_a_run_goes_back_to_its_best_checkpoint(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--ckpt-step best resumes from step 2, with the validations that were counted there."""
    run(flags, "--exit-interval", "5")
    capsys.readouterr()
    assert run(flags, "--ckpt-step", "best", "--exit-interval", "3") is ExitCode.DONE
    assert "step_00000002 (iteration 2)" in capsys.readouterr().out
    manifest = (tmp_path / "run" / "step_00000003" / "manifest.json").read_text()
    assert '"best_step": 2' in manifest and '"validations_since_best": 1' in manifest


def test_a_best_checkpoint_that_was_not_saved_is_named(flags: list[str], tmp_path: Path) -> None:
    """Without --save-best the best step is known, but it may have no checkpoint."""
    flags.remove("--save-best")
    run(flags, "--exit-interval", "5")
    with pytest.raises(NoCheckpointError, match="loss is of step 2, whose checkpoint is not there"):
        run(flags, "--ckpt-step", "best")
    place = str(tmp_path / "other")
    run(flags, "--eval-iters", "0", "--save", place, "--load", place, "--exit-interval", "1")
    with pytest.raises(NoCheckpointError, match="names a best validation; train with --save-best"):
        run(flags, "--save", place, "--load", place, "--ckpt-step", "best")
    with pytest.raises(NoCheckpointError, match="no checkpoint of the lowest validation loss"):
        TrainedModel.load(tmp_path / "other", step="best")


def test_a_run_stops_when_its_patience_ends(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends with code 0 at step 5, also when it is interrupted, and does not go on alone."""
    patience = ["--early-stopping-patience", "3"]
    run(flags, *patience, "--exit-interval", "4")
    capsys.readouterr()
    assert run(flags, *patience) is ExitCode.DONE
    sentence = (
        "early stop at step 5: no loss of the last 3 validations is lower than 2.0000 at step 2"
    )
    assert f"Stopping: {sentence} (--early-stopping-patience 3).\n" in capsys.readouterr().out
    assert kept(tmp_path) == [2, 5]
    assert run(flags, *patience) is ExitCode.DONE
    said = capsys.readouterr().out
    assert f"Nothing is trained, because the run had an {sentence}" in said
    assert kept(tmp_path) == [2, 5] and "step 6/8" not in said
    assert said.splitlines()[-1].endswith("/step_00000002) | nothing new was saved")
    assert run(flags, "--early-stopping-patience", "9") is ExitCode.DONE
    assert kept(tmp_path) == [8]


def test_losses_of_other_validation_data_are_not_compared(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lowest loss and the count of the early stop begin again with other data, and only then."""
    more = ("--early-stopping-patience", "3")
    run(flags, *more, "--exit-interval", "4")
    capsys.readouterr()
    (tmp_path / "run").rename(tmp_path / "four")
    lines = (tmp_path / "valid.jsonl").read_text().splitlines()[:30]
    (tmp_path / "fewer.jsonl").write_text("\n".join(lines))
    other = ("--valid-data-path", f"{tmp_path}/fewer.jsonl")
    cases = [(("--global-batch-size", "2"), 5, 2), (("--eval-iters", "1"), 8, 8), (other, 8, 8)]
    for changed, last, best in cases:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "four", tmp_path / "run")
        run(flags, *more, *changed)
        said = capsys.readouterr().out
        assert (f"early stop at step {last}:" in said) == (last < 8)
        assert f"Lowest validation loss {LOSSES[best - 1]:.4f} at step {best} " in said
        assert ("a validation reads other data than before step 5" in said) == (best == 8)
