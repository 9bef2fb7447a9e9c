"""Two proofs that the host does not wait for the device in steady steps.

``set_sync_debug_mode("error")`` detects synchronising calls of torch. A profile detects those of
every library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.late_metrics import LateMetrics
from megatron_packed.training.train_step import TrainStep

SYNCHRONISING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
    "cuMemcpyDtoH_v2",
)


def waiting(step: TrainStep, steps: Sequence[list[MicroBatch]], lr: float = 1e-4) -> dict[str, Any]:
    """Run the steps three times: to compile and tune, then under each of the two proofs.

    Returns:
        ``values``, the metrics of all but the last step of the first two runs, and the findings of
        the profile.

    Raises:
        RuntimeError: a call synchronises.
    """
    late: LateMetrics[int] = LateMetrics(step.metrics.numel(), step.device)

    def run() -> list[list[float]]:
        arrived = [late.push(number, step(batches, lr)) for number, batches in enumerate(steps)]
        return [one.values for one in arrived if one is not None]

    def end() -> None:
        late.flush()
        torch.cuda.synchronize()

    values = run()
    end()
    seen = watched(lambda: values.extend(run()), end)
    del values[2 * (len(steps) - 1) :]
    return {"values": values, "finite": bool(np.isfinite(values).all()), **seen}


def assert_no_wait(found: dict[str, Any]) -> None:
    """Check that the steps of `waiting` have finite metrics and never wait for the device."""
    assert found["finite"] and found["waits"] == [] and found["pageable"] == [], found


def watched(
    run: Callable[[], object], end: Callable[[], object] = torch.cuda.synchronize
) -> dict[str, Any]:
    """Call ``run`` under each proof, with ``end`` after each, and return the profile's findings.

    Raises:
        RuntimeError: a call synchronises.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    end()
    with (
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
        record_function("steady_steps"),
    ):
        run()
    end()
    inside = names_inside(profiler, "steady_steps")
    return {
        "events": len(inside),
        "launches": sum(name == "cudaGraphLaunch" for name in inside),
        "nccl": sum("nccl" in name.lower() for name in inside),
        "waits": sorted({name for name in inside if name in SYNCHRONISING}),
        "pageable": sorted({name for name in inside if "Memcpy" in name and "Pageable" in name}),
        "to_host": sum(name.startswith("Memcpy DtoH") for name in inside),
    }


def names_inside(profiler: profile, name: str) -> list[str]:
    """Return the names of all events within the first event ``name`` of an ended profile.

    They come from the profile's own records. ``profiler.events()`` gives the same names, but builds
    a tree of the events, which takes 10 to 20 s for ten steps.
    """
    events = profiler.profiler.kineto_results.events()
    window = min(
        (event for event in events if event.name() == name),
        key=lambda event: (event.start_ns(), -event.end_ns()),
    )
    start, end = window.start_ns(), window.end_ns()
    return [event.name() for event in events if start <= event.start_ns() and event.end_ns() <= end]
