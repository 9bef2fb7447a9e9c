"""Phases of a run that starts from other weights, and phases without a step."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.training.from_python import train
from support.json_lines import write_texts

MODEL = (
    "--hybrid-layer-pattern - --hidden-size 8 --seq-length 64 --lr 1e-2 --no-isolation-self-test"
)


def trained(folder: Path, words: str, text: str = "hello") -> list[dict]:
    """Train a tiny model and return the metadata of its checkpoints, the newest last."""
    data = folder / "documents.jsonl"
    write_texts(data, (f"{n} {text}" for n in range(40)))
    argv = f"{MODEL} --data-path {data} {words}".split()
    assert train(RunConfig.from_args(argv)) is ExitCode.DONE
    saved = sorted(folder.glob("own/step_*/manifest.json"))
    return [json.loads(path.read_text())["metadata"] for path in saved]


def test_a_run_may_begin_its_first_phase_with_pretrained_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, f"--train-iters 2 --save {tmp_path}/base")
    own = f"--save {tmp_path}/own --load {tmp_path}/own"
    words = f"{own} --pretrained-checkpoint {tmp_path}/base"
    (first,) = trained(tmp_path, f"{words} --begin-phase one --train-iters 2")
    assert "weights of" in capsys.readouterr().out
    assert first["phases"] == [{"name": "one", "iteration": 0}]
    # The own checkpoint counts from now on, and its steps are part of the length.
    trained(tmp_path, f"{words} --begin-phase two --train-iters 2")
    said = capsys.readouterr().out
    assert "phase two begins at step 3 after phase one" in said
    assert "nothing left to train. The length of a run includes its earlier phases.\n" in said
    *_, second = trained(tmp_path, f"{words} --begin-phase two --train-iters 3")
    assert second["phases"] == [*first["phases"], {"name": "two", "iteration": 2}]


def test_epochs_of_a_phase_are_those_of_its_own_data(tmp_path: Path) -> None:
    own = f"--save {tmp_path}/own --load {tmp_path}/own"
    epoch = "--train-epochs 1 --seq-length 128 --global-batch-size 2"
    trained(tmp_path, f"{own} --begin-phase one --train-iters 3")
    *_, last = trained(tmp_path, f"{own} --begin-phase two {epoch}")
    (tmp_path / "own").rename(tmp_path / "phases")
    (alone,) = trained(tmp_path, f"{own} {epoch}")
    assert last["progress"]["iteration"] == 3 + alone["progress"]["iteration"]


@pytest.mark.parametrize(("text", "earlier_packs"), [("hello", 0), ("other", 2)])
def test_a_phase_on_other_data_of_equal_lengths_begins_at_its_first_pack(
    text: str, earlier_packs: int, tmp_path: Path
) -> None:
    """Equal lengths give an equal plan; a phase continues it only if its tokens are the same."""
    own = f"--save {tmp_path}/own --load {tmp_path}/own --global-batch-size 1"
    trained(tmp_path, f"{own} --train-iters 2")
    first, second = trained(tmp_path, f"{own} --begin-phase two --train-iters 3", text)
    assert first["plan_hash"] == second["plan_hash"]
    assert (first["data_hash"] == second["data_hash"]) == (text == "hello")
    assert second["progress"]["consumed_packs"] == 3
    assert second["progress"]["plan_packs"] == earlier_packs


def test_a_phase_owes_no_validation_and_has_medians_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run makes up for a validation that is due, and goes on with the losses so far."""
    own = f"--save {tmp_path}/own --load {tmp_path}/own --split 8,2,0 --train-iters"
    for phase, validated, losses in (("", [2, 3], 3), ("--begin-phase two", [3], 1)):
        shutil.rmtree(tmp_path / "own", ignore_errors=True)
        trained(tmp_path, f"{own} 2")
        *_, last = trained(tmp_path, f"{own} 3 --eval-interval 2 {phase}")
        said = capsys.readouterr().out
        assert [n for n in (2, 3) if f"validation at step {n}:" in said] == validated
        assert {len(values) for values in last["spike_window"].values()} == {losses}


def test_a_checkpoint_without_moments_is_refused_with_the_cure(tmp_path: Path) -> None:
    own = f"--save {tmp_path}/own --load {tmp_path}/own"
    trained(tmp_path, f"{own} --train-iters 2 --no-save-optim")
    for words in ("", "--begin-phase two"):
        with pytest.raises(
            CheckpointMismatchError, match=r"--no-save-optim.*; give --no-load-optim"
        ):
            trained(tmp_path, f"{own} --train-iters 3 {words}")
    *_, last = trained(tmp_path, f"{own} --train-iters 3 --no-load-optim")
    assert last["progress"]["iteration"] == 3
