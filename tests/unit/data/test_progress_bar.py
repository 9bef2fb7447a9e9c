"""Tests of the progress display: long work shows its progress and time left, short work nothing."""

import threading

import numpy as np

from megatron_packed.data import progress_bar as progress
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces


def plan(documents: int, **options) -> PackPlan:
    pieces = Pieces.cut(np.full(documents, 30), 64, "truncate")
    targets = np.full(documents, 29)
    return PackPlan(
        pieces, targets, packer=Packer(slots=64, window=100), packs_per_step=2, **options
    )


def test_a_line_now_and_then_with_the_time_left(monkeypatch, capsys) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.ProgressBar("reading", 1) as shown:
        for seconds, done in ((1, 10), (10, 25), (11, 30), (20, 50)):
            clock[0] = float(seconds)
            shown.update(done, "well" if done == 25 else "", total=100)
    assert capsys.readouterr().err == "reading: 25%, well, 45 s left\nreading: 50%, 24 s left\n"


def test_no_time_left_before_the_speed_is_known(monkeypatch, capsys) -> None:
    """The first unit of a conversion waits for imports, and the others take no time."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.ProgressBar("converting", 1) as shown:
        for seconds, done in ((0.1, 0), (13, 28), (23.5, 28), (34, 40)):
            clock[0] = float(seconds)
            shown.update(done, total=100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["converting: 28%", "converting: 28%", "converting: 40%, 105 s left"]
    with progress.ProgressBar("converting", 100) as shown:
        for seconds, done in ((1, 0), (8, 10), (12, 90)):
            clock[0] = 34.0 + seconds
            shown.update(done)
    assert capsys.readouterr().err == "converting: 90%\n"


def test_packing_shows_progress_where_the_main_thread_waits(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "_QUIET_SECONDS", -1.0)
    monkeypatch.setattr(progress, "_LINE_EVERY", -1.0)
    shown = plan(1000, show_progress=True)
    assert len(shown.epoch(0)) == len(plan(1000).epoch(0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"packing epoch 0: {share}0%" for share in range(1, 11)
    ]
    ahead = threading.Thread(target=shown.epoch, args=(1,))
    ahead.start()
    ahead.join()
    assert capsys.readouterr().err == ""
