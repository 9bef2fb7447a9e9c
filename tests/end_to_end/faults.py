"""What goes wrong in a process of a run: called there before the script, each a function with plain arguments."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from megatron_packed.data.errors import DataError
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.training import data as run_data
from megatron_packed.training import state as run_state
from megatron_packed.training.train_step import TrainStep
from megatron_packed.training.trainer import Trainer
from megatron_packed.training.writers import JsonlWriter

LOG_SITE = "before a line of the log"
"""The one of the places below that only rank 0 passes."""
SITES: dict[str, tuple[Any, str]] = {
    "before a forward pass": (HybridModel, "forward"),
    "between backward and all-reduce": (FlatBuffers, "all_reduce"),
    "between all-reduce and update": (Optimizer, "step"),
    "in the update, weights changed": (Optimizer, "write_params"),
    LOG_SITE: (JsonlWriter, "write"),
}
"""Places inside a step."""


def on_call(owner: Any, name: str, number: int, action: Callable[[Any], None]) -> None:
    """``action(self)`` before the ``number``-th call (from 1) of a method, in this process."""
    original, calls = getattr(owner, name), count(1)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            action(self)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def kill_at(site: str, call: int, rank: int) -> None:
    """The process of ``rank`` is killed at the ``call``-th passing of one of `SITES`."""
    if int(os.environ["RANK"]) == rank:
        on_call(*SITES[site], call, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def in_save(site: str, save: int, rank: int, action: Callable[[], None]) -> None:
    """``action()`` in the process of ``rank`` at a place of the commit protocol in its ``save``-th save."""
    if int(os.environ["RANK"]) != rank:
        return
    original, calls = run_state.save_checkpoint, count(1)

    def at(number: int) -> Callable[[str], None]:
        return lambda passed: action() if number == save and passed == site else None

    run_state.save_checkpoint = lambda *args, **kwargs: original(*args, **kwargs, on_site=at(next(calls)))


def kill_in_save(site: str, save: int, rank: int) -> None:
    """The process of ``rank`` is killed at a place of the commit protocol in its ``save``-th save."""
    in_save(site, save, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def tear_line(line: int) -> None:
    """Rank 0 is killed with half of a line of its log written."""

    def half(writer: Any) -> None:
        writer._file.write(b'{"iteration": 99, "lm_lo')
        os.kill(os.getpid(), signal.SIGKILL)

    on_call(JsonlWriter, "write", line, half)


def poison_forward(call: int, rank: int, value: float) -> None:
    """The ``call``-th forward pass of ``rank`` sees embeddings multiplied by ``value``: nan, inf, or a spike."""
    if int(os.environ["RANK"]) == rank:
        on_call(HybridModel, "forward", call, lambda model: _poison_next_embedding(model, value))


def _poison_next_embedding(model: HybridModel, value: float) -> None:
    def poison(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * value

    handle = model.embedding.register_forward_hook(poison)


def signal_at(owner: Any, name: str, call: int, rank: int, number: int) -> None:
    """The process of ``rank`` receives a signal before the ``call``-th call of a method."""
    if int(os.environ["RANK"]) == rank:
        on_call(owner, name, call, lambda _: os.kill(os.getpid(), number))


def signal_all(owner: Any, name: str, call: int, number: int) -> None:
    """Every process receives a signal twice in a row, as from a scheduler and from the launcher."""

    def twice(_: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), number)

    on_call(owner, name, call, twice)


def signal_in_save(save: int, number: int) -> None:
    """Rank 0 receives a signal while its ``save``-th checkpoint is half written."""
    in_save("shard.synced", save, 0, lambda: os.kill(os.getpid(), number))


def impatience(number: int, seconds: float) -> None:
    """Two signals so far apart that a person sent both, within one step."""

    def send(_: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    on_call(Optimizer, "step", 4, send)


def as_if_begun_earlier(rank: int, seconds: float) -> None:
    """On ``rank`` alone the run began so long ago."""

    def move(trainer: Trainer) -> None:
        trainer._started -= seconds

    if int(os.environ["RANK"]) == rank:
        on_call(Trainer, "run", 1, move)


def full_disk(save: int, rank: int) -> None:
    """The disk of ``rank`` is full in its ``save``-th save."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    in_save("shard.synced", save, rank, fail)


def unreadable_data(rank: int) -> None:
    """``rank`` alone cannot use the data."""

    def fail(*_: Any, **__: Any) -> None:
        raise DataError("shard_7.jsonl cannot be read by this machine.")

    if int(os.environ["RANK"]) == rank:
        run_data.open_dataset = fail


def out_of_memory(call: int) -> None:
    """The ``call``-th forward pass finds no memory."""

    def fail(_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    on_call(HybridModel, "forward", call, fail)


def hide_package(name: str) -> None:
    """A package that is not installed."""
    sys.modules[name] = None  # type: ignore[assignment]


def forget_step(number: int) -> None:
    """The ``number``-th step is computed, and all that it changed is put back: what a skipped step must equal."""
    original, calls = TrainStep.__call__, count(1)

    def wrapped(self: TrainStep, *args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) != number:
            return original(self, *args, **kwargs)
        tensors = [*run_state.model_tensors(self.model).values(), *run_state.optimizer_tensors(self.optimizer).values()]
        before = [tensor.clone() for tensor in tensors]
        metrics = original(self, *args, **kwargs)
        for tensor, old in zip(tensors, before):
            tensor.copy_(old)
        return metrics

    TrainStep.__call__ = wrapped  # type: ignore[method-assign]
