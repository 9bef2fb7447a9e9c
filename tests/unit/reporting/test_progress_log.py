"""progress.txt: Megatron's lines, and the cumulative throughput of jobs of one size."""

import datetime as time
import os
from pathlib import Path

import pytest

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.reporting import progress_log
from megatron_packed.reporting.progress_log import ProgressLog


class Clock(time.datetime):
    minutes = 0

    @classmethod
    def now(cls, tz=None):
        return time.datetime(2026, 1, 2, 3, 0) + time.timedelta(minutes=cls.minutes)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    monkeypatch.setattr(progress_log, "datetime", Clock)
    monkeypatch.setattr(Clock, "minutes", 0)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return Clock


def job(folder: Path, size: int, flops: float = 0.0) -> ProgressLog:
    return ProgressLog(folder, size, RunProgress(flops=flops), warn=pytest.fail)


def test_lines_of_two_jobs(tmp_path: Path, clock: type[Clock]) -> None:
    first = job(tmp_path, 4)
    clock.minutes = 10
    first.saved(RunProgress(iteration=5, flops=6e15, consumed_tokens=1_500_000_000), beside=False)
    clock.minutes = 30  # 20 minutes in the queue
    second = job(tmp_path, 4, 6e15)
    clock.minutes = 40
    second.saved(RunProgress(iteration=9, flops=1.8e16, consumed_tokens=4_500_000_000), beside=True)
    second.published(9)
    head = "\tJob ID: 77\t# GPUs: 4\t"
    assert (tmp_path / "progress.txt").read_text().splitlines() == [
        f"2026-01-02 03:00:00{head}Starting job",
        f"2026-01-02 03:10:00{head}Saved checkpoint\tIteration: 5\tJob throughput: 2.5 TFLOP/s/GPU\t"
        "Cumulative throughput: 2.5 TFLOP/s/GPU\tFloating-point operations: 6.00e+15\tTokens (in billions): 1.50",
        f"2026-01-02 03:30:00{head}Starting job",
        f"2026-01-02 03:40:00{head}Saving async checkpoint\tIteration: 9\tJob throughput: 5.0 TFLOP/s/GPU\t"
        "Cumulative throughput: 1.9 TFLOP/s/GPU\tFloating-point operations: 1.80e+16\tTokens (in billions): 4.50",
        f"2026-01-02 03:40:00{head}Saved async checkpoint\tIteration: 9",
    ]


def test_another_number_of_processes_starts_a_new_count(tmp_path: Path, clock: type[Clock]) -> None:
    job(tmp_path, 2)
    job(tmp_path, 4).saved(RunProgress(iteration=5, flops=6e15), beside=False)
    with open(tmp_path / "progress.txt", "ab") as file:
        file.write(b"2026-01-02 03:0\xff\n")  # a line that a killed job cut off
    clock.minutes = 60
    smaller = job(tmp_path, 2, 6e15)
    clock.minutes = 70
    smaller.saved(RunProgress(iteration=9, flops=1.8e16), beside=False)
    assert (
        b"\tCumulative throughput: 10.0 TFLOP/s/GPU\t" in (tmp_path / "progress.txt").read_bytes()
    )


def test_what_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    log = ProgressLog(tmp_path / "absent", 1, RunProgress(), said.append)
    log.saved(RunProgress(iteration=5), beside=False)
    assert len(said) == 1 and "cannot be written: " in said[0]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_left_alone(kind: str, tmp_path: Path) -> None:
    victim, log, said = tmp_path / "victim", tmp_path / "progress.txt", []
    victim.write_text("precious\n")
    log.symlink_to(victim) if kind == "link" else os.mkfifo(log)
    ProgressLog(tmp_path, 1, RunProgress(), warn=said.append).published(3)
    assert victim.read_text() == "precious\n"
    assert len(said) == 1 and "progress.txt cannot be written: " in said[0]
