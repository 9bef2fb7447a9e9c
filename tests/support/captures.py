"""Runs with CUDA graphs on the CPU: the stand-in for capture, installed in a process of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training import build_graphs
from megatron_packed.training.train_step import TrainStep
from support.faults import on_call
from support.stand_in import RecordingBackend


def capture_on_cpu(
    fault: Callable[[], None] | None = None,
    *,
    fail_at: tuple[int, ...] = (),
    rank: int = 0,
    diary: Path | None = None,
) -> None:
    """Capture graphs with a stand-in, and set their tensors to NaN before each micro-batch.

    Args:
        fault: installs another fault in this process.
        fail_at: numbers of the captures (from 0) on ``rank`` that run out of memory.
        diary: file that receives a line when the process group shuts down, when a failure is
            reported and at the first step, with the number of graphs that exist.
    """
    backend = RecordingBackend(fail_at if int(os.environ["RANK"]) == rank else ())
    build_graphs.build_graphs = partial(build_graphs.build_graphs, backend=backend)
    build_graphs.refuse_eager = lambda options, device: None
    _before_each_call(LayerGraphs, "place", backend.scramble)
    _before_each_call(FullIterationGraphs, "run", backend.scramble)
    if diary is not None:
        _keep(diary, backend)
    if fault is not None:
        fault()


def _before_each_call(owner: Any, name: str, action: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def wrapped(self: Any, *args: Any) -> Any:
        action()
        return original(self, *args)

    setattr(owner, name, wrapped)


def _keep(diary: Path, backend: RecordingBackend) -> None:
    def write(event: str) -> Callable[[Any], None]:
        return lambda _: diary.open("a").write(
            f"{event}, {sum(not graph.gone for graph in backend.graphs)} graphs\n"
        )

    on_call(ParallelGroups, "shutdown", 1, write("shutdown"))
    on_call(FailureWatch, "report", 1, write("report"))
    on_call(TrainStep, "__call__", 1, write("first step"))


def move_a_buffer(step: int) -> None:
    """Reallocate the expert biases at another address before step ``step``."""

    def move(running: TrainStep) -> None:
        router = running.model.moe_layers[0].mixer.router
        router.expert_bias = router.expert_bias.clone()

    on_call(TrainStep, "__call__", step, move)


def while_moving(step: int, fault: Callable[[], None]) -> None:
    """Install `move_a_buffer` and another fault."""
    move_a_buffer(step)
    fault()


def forget_to_accumulate() -> None:
    """Make graphs lose a gradient, which a comparison of runs must detect."""
    from megatron_packed.cuda_graphs.module_graphs import TorchModuleGraphs

    original = TorchModuleGraphs.replay_backward

    def replay_backward(self: TorchModuleGraphs, grads: Any) -> torch.Tensor:
        result = original(self, grads)
        self._parameters[0].main_grad.zero_()  # type: ignore[attr-defined]
        return result

    TorchModuleGraphs.replay_backward = replay_backward  # type: ignore[method-assign]
