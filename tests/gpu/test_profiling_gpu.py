"""Profiles contain kernels of replays, and a snapshot is written at the moment of out-of-memory.

The snapshot is written even if the run handles the error.
"""

import pickle
from pathlib import Path

import pytest
import torch

from megatron_packed.config.sections.profiling import ProfilingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.reporting.profiling import MemoryHistory, StepProfiler

pytestmark = pytest.mark.gpu


def test_the_table_holds_the_kernels_of_replays_too(tmp_path: Path) -> None:
    x = torch.randn(512, 512, device="cuda")
    x @ x  # allocates the library's workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x @ x
    told: list[str] = []
    options = ProfilingConfig(
        profile=True, use_pytorch_profiler=True, profile_step_start=0, profile_step_end=2
    )
    profiler = StepProfiler(
        options,
        ParallelGroups.single(torch.device("cuda")),
        tmp_path,
        say=told.append,
        warn=told.append,
    )
    profiler.turn(0)
    for _ in range(2):
        with torch.profiler.record_function("forward"):
            graph.replay()
    profiler.turn(2)
    [(_, table)] = profiler.notes
    title, _, first, *_ = table.splitlines()
    assert title.startswith("kernels: ") and first.split()[2] == "1.0" and "forward" not in table, (
        table
    )
    assert (tmp_path / "trace_rank0.json.gz").stat().st_size > 500


def test_a_snapshot_when_memory_runs_out(tmp_path: Path) -> None:
    history = MemoryHistory(
        str(tmp_path / "snapshot.pickle"), ParallelGroups.single(torch.device("cuda"))
    )
    history.start()
    try:
        held = torch.ones(2**20, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        del held
        history.finish()  # must not overwrite the snapshot of the error
        snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
        sizes = [
            block["requested_size"]
            for segment in snapshot["segments"]
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        assert 4 * 2**20 in sizes
        assert any(
            entry["action"] == "oom" for trace in snapshot["device_traces"] for entry in trace
        )
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
