"""A run replaces no checkpoint and no log of another run."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import find_checkpoints
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.config import launch_checks
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.training.claimed_outputs import refuse_other_runs
from megatron_packed.training.from_python import train
from support.json_lines import write_texts

MODEL = "--hybrid-layer-pattern - --hidden-size 16 --ffn-hidden-size 16 --no-isolation-self-test"
Train = Callable[..., ExitCode]


class Killed(BaseException):
    """End of a run that may not save."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch) -> Train:
    """Return a function that trains with additional flags, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "documents.jsonl", (f"{number:02d} hello" for number in range(40)))

    def start(flags: str, steps: int, killed_at: int | None = None) -> ExitCode:
        def callback(record: dict[str, Any]) -> None:
            if record["iteration"] == killed_at:
                raise Killed

        words = f"{MODEL} --data-path documents.jsonl --seq-length 64 --lr 1e-2 {flags}".split()
        return train([*words, "--train-iters", str(steps)], callback)

    return start


def iterations(log: str = "log.jsonl") -> list[int]:
    records = map(json.loads, Path(log).read_text().splitlines())
    return [record["iteration"] for record in records if "lm_loss" in record]


def test_the_log_of_a_run_with_another_folder_is_refused_before_data_is_read(
    start: Train, monkeypatch
) -> None:
    start("--save a --log-jsonl log.jsonl", 4)
    before = Path("log.jsonl").read_bytes()
    monkeypatch.setattr("megatron_packed.training.pretrain.build_data", None)  # not called
    with pytest.raises(ConfigError, match=r"log\.jsonl: is the log of the run that saves to .*/a;"):
        start("--save b --log-jsonl log.jsonl", 2)
    with pytest.raises(ConfigError, match="is the log of the run"):
        start("--load a --finetune --save b --log-jsonl log.jsonl", 2)
    assert Path("log.jsonl").read_bytes() == before


def test_a_folder_with_checkpoints_needs_load(start: Train) -> None:
    start("--save a --save-interval 2", 4)
    Path("a/STATUS.json").write_text("of the first run")
    before = [(path, path.stat().st_mtime_ns) for path in sorted(Path("a").rglob("*"))]
    for flags in ("--save a", "--save a --pretrained-checkpoint a", "--save a --log-jsonl a/l"):
        with pytest.raises(
            CheckpointError,
            match=r"(?s)preparing a for checkpoints.*another run has saved here, and this run would "
            r"replace its checkpoints: .* found 2 of them, the newest step_00000004; add --load a to "
            r"resume that run \(with --finetune",
        ):
            start(f"{flags} --save-interval 2", 6)
        assert [(path, path.stat().st_mtime_ns) for path in sorted(Path("a").rglob("*"))] == before
    assert start("--save a --load a", 6) is ExitCode.DONE  # the refused runs hold no lock


@pytest.mark.parametrize("load", ["", "--load a"])
def test_a_run_that_was_killed_before_its_first_save_goes_on(
    start: Train, capsys, load: str
) -> None:
    """The same command begins again, also twice, and no line of the killed runs is lost."""
    command = f"--save a {load} --log-jsonl log.jsonl"
    for _ in range(2):
        with pytest.raises(Killed):
            start(command, 6, killed_at=3)
        assert iterations() == [1, 2, 3]
    assert start(command, 6) is ExitCode.DONE
    assert "WARNING: log.jsonl: the log of an earlier start, which this run does not" in (
        capsys.readouterr().out
    )
    assert iterations() == [1, 2, 3, 4, 5, 6]
    assert iterations("log.1.jsonl") == iterations("log.2.jsonl") == [1, 2, 3]
    first = json.loads(Path("log.jsonl").read_text().splitlines()[0])
    assert [start["step"] for start in first["starts"]] == [0, 0, 0]


def test_a_resumed_run_keeps_its_log_in_another_or_a_moved_folder(start: Train) -> None:
    start("--save a --log-jsonl log.jsonl", 3)
    Path("a").rename("b")
    with pytest.raises(Killed):
        start("--save b --load b --log-jsonl log.jsonl", 6, killed_at=5)
    assert iterations() == [1, 2, 3, 4, 5]
    start("--save b --load b --log-jsonl log.jsonl", 6)
    assert iterations() == [1, 2, 3, 4, 5, 6]
    start("--save c --load b --log-jsonl log.jsonl", 8)
    start("--save c --load b --log-jsonl c/log.jsonl", 7)  # the same run, so it may save here
    assert iterations() == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ConfigError, match=r"saves to .*/c, with steps after step 6; give another"):
        start("--save b --load b --log-jsonl log.jsonl", 8)
    assert os.listdir().count("log.1.jsonl") == 0


def test_without_save_every_start_is_a_run_of_its_own(start: Train) -> None:
    for steps in (3, 2):
        start("--log-jsonl log.jsonl", steps)
    assert iterations() == [1, 2] and iterations("log.1.jsonl") == [1, 2, 3]
    [first, *_] = map(json.loads, Path("log.jsonl").read_text().splitlines())
    assert len(first["starts"]) == 1


def test_phases_and_finetuning_continue_or_begin_logs(start: Train) -> None:
    start("--save a --load a --log-jsonl log.jsonl", 2)
    start("--save a --load a --begin-phase next --log-jsonl log.jsonl --seq-length 32", 4)
    assert iterations() == [1, 2, 3, 4]
    start("--load a --finetune --save b --log-jsonl b.jsonl", 2)
    with pytest.raises(CheckpointError, match="another run has saved here"):
        start("--load a --finetune --save b", 2)  # would begin again at step 0
    start("--load b --save b --log-jsonl b.jsonl", 4)
    assert iterations("b.jsonl") == [1, 2, 3, 4] == iterations()


def test_checkpoints_of_the_run_that_is_resumed_are_no_reason(tmp_path: Path) -> None:
    """The comparison is by run, so a second start of a run that changes its folder goes on."""
    for folder, run_id in (("a", "run"), ("b", "run"), ("c", "other")):
        save_checkpoint(tmp_path / folder, 5, [], {}, run_id=run_id)
    a, b, c, link = (str(tmp_path / name) for name in "abcl")
    os.symlink(a, link)
    for save in (a, b, link, str(tmp_path / "new")):
        refuse_other_runs(CheckpointConfig(save=save, load=a))
    refuse_other_runs(CheckpointConfig(save=link, load=a, finetune=True))
    refuse_other_runs(CheckpointConfig(load=a))
    for save, more in ((c, {}), (b, {"finetune": True})):
        with pytest.raises(CheckpointError, match="another run has saved here"):
            refuse_other_runs(CheckpointConfig(save=save, load=a, **more))
    (tmp_path / "d" / "step_00000005").mkdir(parents=True)  # without a readable manifest
    with pytest.raises(CheckpointError, match="another run has saved here"):
        refuse_other_runs(CheckpointConfig(save=str(tmp_path / "d")))


def test_a_status_that_cannot_be_replaced_is_found_before_training(start: Train) -> None:
    Path("a/STATUS.json").mkdir(parents=True)
    with pytest.raises(
        CheckpointError,
        match=r"a/STATUS\.json: the run cannot write its result there \(Is a directory\); remove it",
    ):
        start("--save a", 2)
    assert find_checkpoints("a") == []


def test_each_run_has_tensorboard_events_of_its_own(
    start: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[str] = []

    class Board:
        def __init__(self, folder: str, purge_step: int) -> None:
            folders.append(folder)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    library = SimpleNamespace(SummaryWriter=Board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    monkeypatch.setattr(launch_checks, "is_installed", lambda module: True)
    start("--save a --load a --tensorboard-dir board", 2)
    start("--save a --load a --tensorboard-dir board", 4)
    assert "of another run" not in capsys.readouterr().out
    start("--save b --tensorboard-dir board", 2)
    assert folders == ["board", "board", "board/run_2"]
    assert "board has TensorBoard events of another run; those of this run are in board/run_2" in (
        capsys.readouterr().out
    )
