"""What goes wrong in a process of a run: called there before the script, each a function with plain arguments."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.training import state as run_state
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


def kill_in_save(site: str, save: int, rank: int) -> None:
    """The process of ``rank`` is killed at a place of the commit protocol in its ``save``-th save."""
    if int(os.environ["RANK"]) != rank:
        return
    original, calls = run_state.save_checkpoint, count(1)

    def at(number: int) -> Callable[[str], None]:
        return lambda passed: os.kill(os.getpid(), signal.SIGKILL) if number == save and passed == site else None

    run_state.save_checkpoint = lambda *args, **kwargs: original(*args, **kwargs, on_site=at(next(calls)))


def tear_line(line: int) -> None:
    """Rank 0 is killed with half of a line of its log written."""

    def half(writer: Any) -> None:
        writer._file.write(b'{"iteration": 99, "lm_lo')
        os.kill(os.getpid(), signal.SIGKILL)

    on_call(JsonlWriter, "write", line, half)


def poison_forward(call: int, rank: int, value: float) -> None:
    """The loss of the ``call``-th forward pass of ``rank`` becomes ``value``, and so do its gradients."""
    if int(os.environ.get("RANK", "0")) == rank:
        on_call(HybridModel, "forward", call, lambda model: _poison_next_embedding(model, value))


def _poison_next_embedding(model: HybridModel, value: float) -> None:
    def poison(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * value

    handle = model.embedding.register_forward_hook(poison)
