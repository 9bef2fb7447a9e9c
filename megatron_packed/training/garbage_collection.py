"""Control of Python's garbage collection: with ``--manual-gc`` all ranks collect at the same step.

A collection takes tens of milliseconds in a large program. If the ranks collect at different
steps, all other ranks wait for the collecting rank each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.training.callback import Callback

if TYPE_CHECKING:
    from megatron_packed.training.trainer import Trainer


class GarbageCollection(Callback):
    """Garbage collection at the steps set by ``options``; does nothing without ``manual_gc``."""

    def __init__(self, options: TrainingConfig) -> None:
        self._manual = options.manual_gc
        self._interval = options.manual_gc_interval
        self._around_validation = options.manual_gc and options.manual_gc_eval

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Collect once, and disable Python's automatic collection inside the block."""
        if not self._manual or not gc.isenabled():
            yield
            return
        # All ranks collect at the same step: a rank that collects at another step makes all others
        # wait.
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            gc.enable()

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """Collect after every ``manual_gc_interval``-th step."""
        if self._manual and self._interval and step % self._interval == 0:
            gc.collect()

    @contextmanager
    def in_validation(self) -> Iterator[None]:
        """Collect before and after a validation, so that training's garbage takes no memory in it."""
        if self._around_validation:
            gc.collect()
        yield
        if self._around_validation:
            gc.collect()
