"""Tests that a GPU that makes no progress is detected, and that a slow GPU is not."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_packed.distributed.collectives import all_gather_json, barrier
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import DeviceHangError, HangDetector
from megatron_packed.training.failures import is_lost_connection
from megatron_packed.training.pretrain import hang_detector_of

PATIENCE = 0.2


class Step:
    """Event that completes a given number of seconds from now."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.at = time.monotonic() + seconds

    def query(self) -> bool:
        return time.monotonic() >= self.at


class Hangs:
    """Callback that records the reported hangs."""

    def __init__(self) -> None:
        self.errors: list[DeviceHangError] = []
        self.heard = threading.Event()

    def __call__(self, error: DeviceHangError) -> None:
        self.errors.append(error)
        self.heard.set()


@contextmanager
def sees_no_hang(progress: Callable[[], object]) -> Iterator[HangDetector]:
    """Yield a hang detector, and check at the end that it has reported nothing."""
    hangs = Hangs()
    with HangDetector(PATIENCE, hangs, progress) as hang_detector:
        yield hang_detector
    assert not hangs.errors


@pytest.mark.parametrize(
    "asks", [True, False], ids=["the host asks for it", "the host sits in the driver"]
)
@pytest.mark.parametrize("done", [0, 1], ids=["from the start", "after a step"])
def test_a_device_that_makes_no_progress(asks: bool, done: int) -> None:
    hangs, steps = Hangs(), chain([Step()] * done, repeat(Step(float("inf"))))
    with HangDetector(PATIENCE, hangs, lambda: next(steps)) as hang_detector:
        for _ in range(1 + 2 * done):
            hang_detector.beat()
        begun = time.monotonic()
        while not hangs.heard.wait(PATIENCE / 20) and time.monotonic() < begun + 20 * PATIENCE:
            if asks:
                hang_detector.waits()
        time.sleep(PATIENCE)
    [error] = hangs.errors
    assert str(error) == "the GPU has made no progress for 0 s"
    # For such an error the failure watch asks all ranks for their last operation.
    assert is_lost_connection(error)


def test_a_host_that_waits_for_a_busy_device() -> None:
    delay = iter(PATIENCE / 4 * number for number in range(16))
    with sees_no_hang(lambda: Step(next(delay))) as hang_detector:
        for _ in range(16):
            hang_detector.beat()
        begun = time.monotonic()
        while time.monotonic() < begun + 3 * PATIENCE:
            hang_detector.waits()
            time.sleep(PATIENCE / 20)


def test_a_host_that_works() -> None:
    """Check that a working main thread is not taken for a hang.

    The thread has waited for the previous step, then packs an epoch without calls to the detector.
    """

    def sort(number: int) -> None:
        time.sleep(PATIENCE / 50)
        if number:
            sort(number - 1)

    with sees_no_hang(Step) as hang_detector:
        hang_detector.beat()
        hang_detector.waits()
        sort(150)


def test_a_host_that_queues_work_long_before_the_device_runs_it() -> None:
    with sees_no_hang(lambda: Step(float("inf"))) as hang_detector:
        begun = time.monotonic()
        while time.monotonic() < begun + 3 * PATIENCE:
            hang_detector.beat()
            time.sleep(PATIENCE / 20)


def test_a_host_that_takes_its_time() -> None:
    hangs = Hangs()
    with HangDetector(PATIENCE, hangs, Step) as hang_detector:
        hang_detector.beat()
        with hang_detector.resting():
            time.sleep(2 * PATIENCE)
        assert not hangs.errors
        assert hangs.heard.wait(20 * PATIENCE)


@pytest.mark.parametrize(
    "waits", [barrier, lambda groups: all_gather_json("1", groups)], ids=["barrier", "gather"]
)
def test_a_host_that_waits_for_hosts_again_and_again(
    waits: Callable[[ParallelGroups], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check repeated waits for other hosts, each with its own timeout, as during slow captures.

    The thread is at the same place whenever the detector looks.
    """

    def sum_late(_: torch.Tensor) -> None:
        time.sleep(PATIENCE / 2)

    def gather_late(received: list[torch.Tensor], mine: torch.Tensor) -> None:
        # The lengths are gathered first; after this all ranks have arrived.
        if mine.dtype == torch.int64:
            time.sleep(PATIENCE / 2)
        for one in received:
            one.copy_(mine)

    monkeypatch.setattr(dist, "all_reduce", sum_late)
    monkeypatch.setattr(dist, "all_gather", gather_late)
    groups, hangs = SimpleNamespace(world_size=2, control_device=torch.device("cpu")), Hangs()
    with HangDetector(PATIENCE, hangs, Step):
        for _ in range(6):
            waits(groups)  # type: ignore[arg-type]
        assert not hangs.errors
        # After these waits, a main thread at an unchanged instruction counts as making no progress.
        assert hangs.heard.wait(20 * PATIENCE)


def test_rests_within_rests() -> None:
    with sees_no_hang(Step) as hang_detector, hang_detector.resting():
        with hang_detector.resting():
            pass
        time.sleep(2 * PATIENCE)


def test_what_has_come_is_not_kept_where_the_host_never_waits() -> None:
    with HangDetector(PATIENCE, Hangs(), Step) as hang_detector:
        for _ in range(100):
            hang_detector.beat()
        assert len(hang_detector._pending) == 1


def test_a_long_queue_is_waited_for_with_signs_of_life() -> None:
    delay = iter(PATIENCE / 4 * number for number in range(1, 9))
    with sees_no_hang(lambda: Step(next(delay))) as hang_detector:
        for _ in range(8):
            hang_detector.beat()
        begun = time.monotonic()
        hang_detector.wait()
        assert time.monotonic() - begun > 1.5 * PATIENCE


def test_no_hang_is_reported_after_the_detector_is_closed() -> None:
    hangs = Hangs()
    with HangDetector(PATIENCE, hangs, lambda: Step(float("inf"))) as hang_detector:
        hang_detector.beat()
    time.sleep(2 * PATIENCE)
    assert not hangs.errors


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), ("cuda", 1), ("cuda", 2)])
def test_several_gpus_are_watched_as_long_as_collectives_may_take(
    device: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that patience equals the timeout of collectives, and that a hang ends the process.

    The process ends with the exit code of its report and calls no CUDA function.
    """
    timeout, ended = timedelta(minutes=10), []
    groups = SimpleNamespace(device=torch.device(device), world_size=ranks, timeout=timeout)
    hang_detector = hang_detector_of(groups, lambda error: 1)  # type: ignore[arg-type]
    assert (hang_detector is None) == (device == "cpu" or ranks == 1)
    if hang_detector is not None:
        monkeypatch.setattr("os._exit", ended.append)
        hang_detector._on_hang(DeviceHangError("it stands still"))
        assert hang_detector._patience == 600 and ended == [1]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete",
            True,
        ),
        (
            "Application timeout caused pair closure.",
            True,
        ),  # gloo raises this error for the second of two pending collectives.
        ("shapes do not match", False),
    ],
)
def test_what_gloo_says_of_a_lost_process(text: str, lost: bool) -> None:
    assert is_lost_connection(RuntimeError(text)) is lost
