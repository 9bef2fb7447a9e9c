"""Profiler of a few steps (traces, table of the slowest kernels), and snapshot of a GPU's memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from megatron_packed.config import flag_names as flags
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.profiling import ProfilingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.files.written_files import write_file
from megatron_packed.reporting.console import Console
from megatron_packed.torch_private import (
    dump_memory_snapshot,
    on_out_of_memory,
    record_memory_history,
)

_KERNELS_SHOWN = 15
_HISTORY_ENTRIES = 100_000


class StepProfiler:
    """Profiler of the steps from ``--profile-step-start`` (exclusive) to ``--profile-step-end``
    (inclusive).

    With torch.profiler, each selected rank writes a Chrome trace, ``trace_rankR.json.gz``, and a
    table, ``kernels_rankR.txt``. Otherwise these steps are marked for an external profiler: ``nsys
    profile --capture-range=cudaProfilerApi``. An error costs only the profile; the run continues.

    Args:
        options: options of the profiler.
        groups: process groups of this rank.
        folder: folder for traces and tables.
        say, warn: print a line of text.
    """

    def __init__(
        self,
        options: ProfilingConfig,
        groups: ParallelGroups,
        folder: Path,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._options = options
        self._device = groups.device
        self._rank = groups.rank
        self._folder = folder
        self._mine = groups.rank in options.profile_ranks
        self._say = say
        self._warn = warn
        self._begun_at: int | None = None
        self._profile: Any = None
        self.notes: list[tuple[str, str]] = []
        """(heading, table) of this rank, after the last profiled step."""

    def turns_at(self, iteration: int) -> bool:
        """Return True if profiling begins or ends after this step; the same on all ranks."""
        # Ranks that are not profiled pause, too. They would wait in the next collective anyway.
        return iteration in (self._options.profile_step_start, self._options.profile_step_end)

    def turn(self, iteration: int) -> None:
        """Begin or end profiling; call it between steps, when no step is queued."""
        if iteration == self._options.profile_step_start:
            self._guarded(self._begin, iteration)
        else:
            self.end(iteration)

    def end(self, iteration: int) -> None:
        """End profiling if it runs: after its last step, or when the run stops earlier."""
        if self._begun_at is not None:
            self._guarded(self._end, iteration)

    def _guarded(self, action: Callable[[int], None], iteration: int) -> None:
        if not self._mine:
            return
        try:
            action(iteration)
        # A failed profile must not end the run.
        except (OSError, RuntimeError) as error:
            self._begun_at = self._profile = None
            self._warn(f"the profile of rank {self._rank} failed: {error}")

    def _begin(self, iteration: int) -> None:
        if self._options.use_pytorch_profiler:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (
                self._device.type == "cuda"
            )
            self._profile = profile(
                activities=activities, record_shapes=self._options.record_shapes
            )
            self._profile.start()
        elif self._device.type == "cuda":
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        else:
            raise RuntimeError(
                f"nsys profiles only GPUs, and none is used; add {flags.USE_PYTORCH_PROFILER}"
            )
        self._begun_at = iteration

    def _end(self, iteration: int) -> None:
        assert self._begun_at is not None
        first = self._begun_at + 1
        self._begun_at = None
        if self._device.type == "cuda":
            # Kernels of the last step may still be queued. Wait, so that the profile includes them.
            torch.cuda.synchronize(self._device)
        if self._profile is None:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            self._say(f"profile: steps {first} to {iteration} were marked for nsys")
            return
        profiled = self._profile
        # Reset before the export, which may fail: profiling is over in either case.
        self._profile = None
        profiled.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"trace_rank{self._rank}.json.gz"
        _export_trace(profiled, trace)
        table = kernel_table(profiled.key_averages(), steps=iteration - first + 1)
        write_file(self._folder / f"kernels_rank{self._rank}.txt", f"{table}\n".encode())
        self.notes.append((f"Kernels of steps {first} to {iteration} on rank {self._rank}", table))
        self._say(f"profile of steps {first} to {iteration}: {trace}\n{table}")


def _export_trace(profiled: Any, trace: Path) -> None:
    """Write the Chrome trace of a profile, compressed with gzip.

    Raises:
        OSError: the trace cannot be written.
    """
    # torch opens the path of a trace itself, and would follow a link. It gets a path in a new
    # folder, which no other user can write.
    with TemporaryDirectory(dir=trace.parent, prefix=".trace-") as folder:
        exported = Path(folder) / trace.name
        profiled.export_chrome_trace(str(exported))
        os.replace(exported, trace)


def kernel_table(averages: Any, *, steps: int) -> str:
    """Return a table of the slowest kernels, one per line; on a CPU, of the slowest operations.

    Args:
        averages: ``profile.key_averages()``.
        steps: number of profiled steps.
    """
    kernels = [
        average
        for average in averages
        if average.device_type == DeviceType.CUDA and not average.is_user_annotation
    ]
    on_gpu = bool(kernels)
    if not on_gpu:
        kernels = [
            average
            for average in averages
            if average.device_type == DeviceType.CPU and not average.is_user_annotation
        ]
    spent = {
        average.key: (average.self_device_time_total if on_gpu else average.self_cpu_time_total)
        / 1e3
        for average in kernels
    }
    counts = {average.key: average.count for average in kernels}
    total = sum(spent.values())
    lines = [
        f"{'kernels' if on_gpu else 'operations'}: {total / steps:,.2f} ms a step (sum of all durations)",
        f"{'share':>7} {'ms/step':>9} {'calls/step':>11}  name",
    ]
    for name in sorted(spent, key=lambda name: -spent[name])[:_KERNELS_SHOWN]:
        share = 100 * spent[name] / max(total, 1e-9)
        lines.append(
            f"{share:6.1f}% {spent[name] / steps:9.3f} {counts[name] / steps:11,.1f}  {name[:90]}"
        )
    return "\n".join(lines)


def profile_folder(config: RunConfig) -> Path:
    """Return the folder ``profile`` in the run's folder.

    The run's folder is that of its checkpoints, else that of its log, else the current folder.
    """
    if config.checkpoint.save is not None:
        return Path(config.checkpoint.save, "profile")
    log = config.logging.log_jsonl
    return Path(log).parent / "profile" if log is not None else Path("profile")


def profiler_of(
    config: RunConfig, groups: ParallelGroups, console: Console, end: int
) -> StepProfiler | None:
    """Return the profiler; None without ``--profile``. ``end`` is the run's last iteration."""
    options = config.profiling
    if not options.profile:
        return None
    folder = profile_folder(config)
    profiler = StepProfiler(options, groups, folder, say=console.say, warn=console.warn)
    if options.profile_step_start >= end:
        console.warn(
            f"{flags.PROFILE_STEP_START} {options.profile_step_start} is not reached: the run ends after step {end}."
        )
    return profiler


class MemoryHistory:
    """Memory snapshot of this process's GPU allocator, written when memory runs out.

    The snapshot is written at the moment of the failed allocation, before any tensor is freed,
    even if the run handles the error and continues. Open it with pytorch.org/memory_viz.

    Args:
        path: file of the snapshot; with several ranks, each adds its rank to the name.
    """

    def __init__(self, path: str, groups: ParallelGroups) -> None:
        self.path = Path(path)
        if groups.world_size > 1:
            self.path = self.path.with_suffix(f".rank{groups.rank}{self.path.suffix}")
        self._ran_out = False

    def start(self) -> None:
        record_memory_history(_HISTORY_ENTRIES)
        on_out_of_memory(self._on_out_of_memory)

    def _on_out_of_memory(self, device: int, wanted: int, total: int, free: int) -> None:
        # Write now: tensors are freed while the exception propagates.
        self._ran_out = True
        self._write(f"GPU {device} cannot allocate {wanted / 2**20:,.1f} MiB more")

    def finish(self) -> None:
        """Write the snapshot at the end of the run, unless memory ran out before.

        The snapshot that was written when memory ran out is kept.
        """
        if not self._ran_out:
            self._write("end of the run")

    def _write(self, why: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            dump_memory_snapshot(str(self.path))
        except (OSError, RuntimeError) as error:
            print(f"the memory snapshot cannot be written: {error}", file=sys.stderr, flush=True)
        else:
            print(f"memory snapshot ({why}): {self.path}", file=sys.stderr, flush=True)


def memory_history(
    options: ProfilingConfig, groups: ParallelGroups, warn: Callable[[str], None]
) -> MemoryHistory | None:
    """Start the memory snapshot; return None if it is off or if the run uses no GPU."""
    if not options.record_memory_history:
        return None
    if groups.device.type != "cuda":
        warn(
            f"{flags.RECORD_MEMORY_HISTORY} has no effect: it records a GPU's allocator, and no GPU is used."
        )
        return None
    history = MemoryHistory(options.memory_snapshot_path or "snapshot.pickle", groups)
    history.start()
    return history
