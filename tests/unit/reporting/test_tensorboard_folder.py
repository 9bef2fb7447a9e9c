"""Each run writes its TensorBoard events to a folder of its own."""

import shutil
from pathlib import Path

import pytest

from megatron_packed.reporting.log_file import RunIdentity
from megatron_packed.reporting.tensorboard import TensorBoardWriter, events_folder


def test_events_of_another_run_stay_visible(tmp_path: Path) -> None:
    """A second run that begins at step 1 in the same folder hides no step of the first."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = {}
    for number, last in (("a", 6), ("b", 3)):
        folder = events_folder(
            str(tmp_path), RunIdentity(number, str(tmp_path / number)), resumed=False
        )
        writer = TensorBoardWriter(str(folder), 1)
        for iteration in range(1, last + 1):
            writer.write({"iteration": iteration, "lm_loss": 1.0})
        writer.close()
        shown[folder] = last
    assert list(shown) == [tmp_path, tmp_path / "run_2"]
    for folder, last in shown.items():
        board = EventAccumulator(str(folder))
        board.Reload()
        [tag] = board.Tags()["scalars"]
        assert [event.step for event in board.Scalars(tag)] == list(range(1, last + 1))


def test_a_resumed_run_continues_its_own_events(tmp_path: Path) -> None:
    """A run keeps its folder, also after its checkpoints were moved; a branch has another folder."""
    board, save = tmp_path / "board", tmp_path / "save"
    save.mkdir()
    run = RunIdentity("a", str(save))
    other = RunIdentity("b", str(tmp_path / "other"))
    branch = RunIdentity("a", str(tmp_path / "branch"))

    def folder(identity: RunIdentity, resumed: bool) -> Path:
        return events_folder(str(board), identity, resumed=resumed)

    assert folder(run, False) == folder(run, True) == board
    assert folder(other, False) == folder(other, True) == board / "run_2"
    assert folder(branch, True) == board / "run_3"
    shutil.rmtree(save)
    assert folder(RunIdentity("a", str(tmp_path / "moved")), True) == board


def test_events_without_an_owner_belong_to_a_run_that_resumes(tmp_path: Path) -> None:
    """Earlier versions wrote no owner."""
    (tmp_path / "events.out.tfevents.1.host").touch()
    run = RunIdentity("a", None)
    assert events_folder(str(tmp_path), run, resumed=False) == tmp_path / "run_2"
    assert events_folder(str(tmp_path), RunIdentity("b", None), resumed=True) == tmp_path
    (tmp_path / "run.json").write_text("{")
    assert events_folder(str(tmp_path), RunIdentity("b", None), resumed=True) != tmp_path
