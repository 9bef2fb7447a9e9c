"""Profiles and memory snapshots are written if requested, and their errors never end a run."""

import gzip
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_packed.config.sections.profiling import ProfilingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.reporting.profiling import (
    MemoryHistory,
    StepProfiler,
    kernel_table,
    memory_history,
)

WINDOW = ProfilingConfig(
    profile=True, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5
)


def profiler(folder: Path, options: ProfilingConfig = WINDOW) -> tuple[StepProfiler, list[str]]:
    told: list[str] = []
    return StepProfiler(
        options, ParallelGroups.single(), folder, say=told.append, warn=told.append
    ), told


def test_a_window_that_the_run_does_not_finish_is_written(tmp_path) -> None:
    made, told = profiler(tmp_path / "p")
    assert [made.turns_at(step) for step in (2, 3, 4, 5, 6)] == [False, True, False, True, False]
    made.end(2)
    assert not told
    made.turn(3)
    torch.ones(8, 8) @ torch.ones(8, 8)
    made.end(4)
    made.turn(5)  # profiling is over
    assert (
        told[0].startswith(f"profile of steps 4 to 4: {tmp_path}")
        and "aten::mm" in told[0]
        and len(told) == 1
    )
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [
        "kernels_rank0.txt",
        "trace_rank0.json.gz",
    ]


def test_a_trace_has_shapes_if_they_are_requested(tmp_path) -> None:
    for requested in (False, True):
        made, _ = profiler(tmp_path / "p", replace(WINDOW, record_shapes=requested))
        made.turn(3)
        torch.ones(8, 8) @ torch.ones(8, 8)
        made.turn(5)
        trace = gzip.decompress((tmp_path / "p" / "trace_rank0.json.gz").read_bytes())
        assert (b"Input Dims" in trace) == requested


def test_other_ranks_are_profiled_if_they_are_listed(tmp_path) -> None:
    """Without the option only rank 0 is profiled."""
    for ranks in ((0,), (1, 2)):
        options = replace(WINDOW, profile_ranks=ranks)
        groups = replace(ParallelGroups.single(), world_size=3, rank=2)
        made = StepProfiler(options, groups, tmp_path / "p", say=lambda text: None, warn=print)
        made.turn(3)
        made.turn(5)
        assert (tmp_path / "p" / "trace_rank2.json.gz").exists() == (2 in ranks)


def test_what_cannot_be_written_costs_the_profile_alone(tmp_path) -> None:
    (tmp_path / "p").write_text("a file")
    made, told = profiler(tmp_path / "p")
    made.turn(3)
    made.turn(5)
    assert len(told) == 1 and told[0].startswith("the profile of rank 0 failed: ")
    of_nsys, told = profiler(tmp_path / "q", ProfilingConfig(profile=True))
    of_nsys.turn(10)
    of_nsys.turn(12)
    assert told == [
        "the profile of rank 0 failed: nsys profiles only GPUs, and none is used; add --use-pytorch-profiler"
    ]


def test_kernels_by_time_without_annotations() -> None:
    def one(
        key: str, microseconds: float, count: int, device: str = "CUDA", annotation: bool = False
    ):
        return SimpleNamespace(
            key=key,
            count=count,
            device_type=getattr(torch.autograd.DeviceType, device),
            self_device_time_total=microseconds,
            self_cpu_time_total=9e9,
            is_user_annotation=annotation,
        )

    averages = [
        one("small", 1000, 4),
        one("large", 3000, 2),
        one("forward", 9e6, 1, annotation=True),
        one("aten::mm", 0, 5, "CPU"),
    ]
    title, _, *lines = kernel_table(averages, steps=2).splitlines()
    assert title == "kernels: 2.00 ms a step (sum of all durations)"
    assert [line.split() for line in lines] == [
        ["75.0%", "1.500", "1.0", "large"],
        ["25.0%", "0.500", "2.0", "small"],
    ]


def test_a_snapshot_of_the_moment_when_memory_ran_out(monkeypatch, tmp_path, capsys) -> None:
    written, observers = [], []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: written.append(path))
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False
    )
    groups = SimpleNamespace(world_size=2, rank=1)
    history = MemoryHistory(str(tmp_path / "s" / "snapshot.pickle"), groups)
    history.start()
    history.finish()
    path = str(tmp_path / "s" / "snapshot.rank1.pickle")
    assert written == [path] and "end of the run" in capsys.readouterr().err
    observers[0](0, 5 * 2**20, 2**30, 2**20)
    assert written == [path] * 2 and "GPU 0 cannot allocate 5.0 MiB more" in capsys.readouterr().err
    history.finish()
    assert len(written) == 2  # the snapshot of the out-of-memory error stays

    def fails(path: str) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fails)
    observers[0](0, 1, 2, 3)
    assert "the memory snapshot cannot be written: disk is full" in capsys.readouterr().err


def test_memory_of_a_gpu_is_recorded_if_that_is_requested(monkeypatch) -> None:
    begun, told = [], []
    monkeypatch.setattr(MemoryHistory, "start", lambda history: begun.append(str(history.path)))
    gpu, cpu = (
        SimpleNamespace(world_size=1, device=torch.device(name)) for name in ("cuda", "cpu")
    )
    on = ProfilingConfig(record_memory_history=True)
    assert memory_history(ProfilingConfig(), gpu, told.append) is None
    assert memory_history(on, gpu, told.append) is not None
    memory_history(replace(on, memory_snapshot_path="here.pickle"), gpu, told.append)
    assert begun == ["snapshot.pickle", "here.pickle"] and not told
    assert memory_history(on, cpu, told.append) is None
    assert len(told) == 1 and "no GPU is used" in told[0]


def test_links_under_the_names_of_a_profile_are_not_followed(tmp_path) -> None:
    names = ("kernels_rank0.txt", "trace_rank0.json.gz")
    (tmp_path / "p").mkdir()
    (tmp_path / "victim").write_text("precious")
    for name in names:
        (tmp_path / "p" / name).symlink_to(tmp_path / "victim")
    made, _ = profiler(tmp_path / "p")
    made.turn(3)
    torch.ones(8, 8) @ torch.ones(8, 8)
    made.turn(5)
    assert (tmp_path / "victim").read_text() == "precious"
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == sorted(names)
    assert not any((tmp_path / "p" / name).is_symlink() for name in names)
