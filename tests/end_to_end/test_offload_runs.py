"""Runs with offload end bit for bit like runs without, and report what was offloaded.

The tests run the complete command on a CPU, from its flags to its exit code, with a stand-in for
capture. Each run is stopped half-way and resumes from its checkpoint with another number of
buffers, or with none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_packed.config.sections.memory import BUFFERS
from megatron_packed.memory import activation_offload
from megatron_packed.memory.offload_streams import CpuStreams
from support.captures import capture_on_cpu
from support.runs import assert_same_state, few_documents, in_folder, run, steps

STEPS, HALF, SLOTS, PACKS = 8, 4, 256, 4
COPY_MS = 8.0
INPUTS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "offload_layer_inputs": True,
    "min_offloaded_tensor_size": 1,
}
BOTH = {
    **INPUTS,
    "recompute_method": "block",
    "recompute_num_layers": 2,
    "fine_grained_activation_offloading": True,
    "offload_modules": ("mlp_norm", "mlp_act", "expert_fc1", "moe_act"),
}
SKIPPED = ("graph_", "offload_")


class SlowCopies(CpuStreams):
    """Streams whose clock shows that every copy takes long and computation takes no time."""

    def __init__(self) -> None:
        self.now, self.current = {"compute": 0.0, "copies": 0.0}, "compute"

    @contextmanager
    def _beside(self) -> Iterator[None]:
        self.current = "copies"
        yield
        self.current = "compute"

    offload_stream = prefetch_stream = _beside  # type: ignore[assignment]

    def timing_event(self) -> float:  # type: ignore[override]
        return self.now[self.current]

    def milliseconds(self, begin: float, end: float) -> float:  # type: ignore[override]
        return end - begin

    def copy(self, target: Tensor, source: Tensor) -> None:
        super().copy(target, source)
        self.now["copies"] += COPY_MS


def process(buffers: int | None = None, *, slow: bool = False) -> None:
    """Set up the process of a run: the number of buffers, and slow copies."""
    if buffers is not None:
        os.environ[BUFFERS] = str(buffers)
    if slow:
        usual = activation_offload.streams_of
        activation_offload.streams_of = (  # type: ignore[assignment]
            lambda device: SlowCopies() if device.type == "cpu" else usual(device)
        )


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the options of a run with validations in both halves.

    Some micro-batches have more documents than the largest capacity.
    """
    folder = tmp_path_factory.mktemp("few")
    return few_documents(
        folder, train_iters=STEPS, eval_interval=3, exit_interval=HALF, log_interval=1
    )


def halves(folder: Path, options: dict[str, Any], *prepared: partial[None]) -> tuple[str, str]:
    """Run the command twice, stopped half-way the first time, and return both console outputs."""
    consoles = []
    for prepare in prepared:
        finished = run(
            {**options, **in_folder(folder)}, folder, prepare=partial(capture_on_cpu, prepare)
        )
        assert finished.exit_code == 0, finished.console
        consoles.append(finished.console)
    assert "resuming from" in consoles[1]
    return consoles[0], consoles[1]


@pytest.fixture(scope="module")
def without(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    halves(folder, options, partial(process), partial(process))
    return folder


def assert_same_run(found: Path, expected: Path) -> list[dict[str, Any]]:
    """Check that logs and saved state of two runs are equal, and return the records of steps.

    Numbers of graphs and of offload are not compared.
    """
    lines = steps(found / "log.jsonl")
    logs = [
        [
            {name: value for name, value in line.items() if not name.startswith(SKIPPED)}
            for line in of_run
        ]
        for of_run in (lines, steps(expected / "log.jsonl"))
    ]
    assert logs[0] == logs[1] and len(logs[0]) == STEPS + 3  # validations after steps 3, 6 and 8
    assert_same_state(found / "checkpoints", expected / "checkpoints", STEPS)
    return [line for line in lines if "lm_loss" in line]


def test_eager(options: dict[str, Any], without: Path, tmp_path: Path) -> None:
    """Offload turns itself off if copies are too slow to hide, and otherwise adds a buffer.

    The first half has slow copies, the second half fast copies. A buffer is added after the first
    offloaded step.
    """
    first, second = halves(
        tmp_path, {**options, **INPUTS}, partial(process, slow=True), partial(process)
    )
    lines = assert_same_run(tmp_path, without)
    moved = PACKS * 4 * SLOTS * 32 * 4 / 2**20  # the inputs of four layers, fp32
    of_one = moved / 4 / PACKS
    # The offload numbers of a line belong to the previous step. After step 2 the copies are known
    # to be slow, and offload stops.
    assert [line.get("offload_moved_mib") for line in lines] == [
        None,
        moved,
        moved,
        None,
        None,
        moved,
        moved,
        moved,
    ]
    loaded = [line.get("offload_loaded_mib") for line in lines]
    assert (
        loaded[1] == loaded[5] == moved - PACKS * of_one
    )  # With one buffer, the last layer's input is still on the device.
    assert loaded[6] == loaded[7] == moved - 2 * PACKS * of_one
    assert [line.get("offload_buffers") for line in lines] == [None, 1, 2, None, None, 1, 2, 2]
    assert lines[1]["offload_load_ms"] == COPY_MS and lines[1]["offload_hidden"] == 1.0
    assert (
        lines[5]["offload_load_ms"] is lines[5]["offload_hidden"] is None
    )  # The streams of a CPU measure no time.
    reason = (
        f"a copy back takes {COPY_MS:.2f} ms, and the computation that could hide it takes 0.00 ms"
    )
    assert (
        first.count(
            f"offload is off: {reason}, and the device has free memory for all offloaded activations"
        )
        == 1
    )
    assert "offloaded 0 MiB, 100% hidden" in first and "hidden" not in second
    assert (
        second.count("offload: 2 device buffer(s) of 0.0 MiB") == 1
        and "offload is off" not in second
    )


@pytest.mark.parametrize(
    ("impl", "memory", "forced"), [("local", BOTH, 0), ("full_iteration", INPUTS, 3)]
)
def test_with_graphs(
    impl: str,
    memory: dict[str, Any],
    forced: int,
    options: dict[str, Any],
    without: Path,
    tmp_path: Path,
) -> None:
    """Offload with graphs equals the run without offload.

    The stand-in runs the computation both at capture and at replay, so the offload of captures is
    counted, too.
    """
    graphs = {"cuda_graph_impl": impl, "cuda_graph_max_packed_seqs": (3, 5)}
    graphed = {**options, **memory, **graphs, "cuda_graph_warmup_steps": 1}
    first, second = halves(tmp_path, graphed, partial(process), partial(process, forced))
    lines = assert_same_run(tmp_path, without)
    assert all(line["graph_replays"] + line["graph_fallbacks"] == PACKS for line in lines)
    assert 0 < sum(line["graph_fallbacks"] for line in lines) < STEPS * PACKS / 2
    inputs = PACKS * 4 * SLOTS * 32 * 4 / 2**20
    moved = [line.get("offload_moved_mib") for line in lines]  # Captures count in step 1.
    assert [line.get("offload_buffers") for line in lines[:HALF]] == [None, 2, 2, 2]
    assert first.count("offload: 2 device buffer(s)") == 1
    if forced:
        assert moved == [None, moved[1], inputs, inputs, None, moved[5], inputs, inputs]
        assert second.count(f"offload: {forced} device buffer(s)") == 1
    else:
        assert moved[2:] == [moved[2]] * 2 + [None] * 4 and moved[2] > inputs
        assert second.count(f"offload is off: {BUFFERS} is 0") == 1
