"""Python's garbage collection: left to each process, or with ``--manual-gc`` on all ranks at the
same step.

A collection takes tens of milliseconds in a large program. When every rank takes it at a step of
its own, all others wait for that rank each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_packed.config.sections.training import TrainingConfig


class GarbageCollection:
    """Python's garbage collection at the steps that ``options`` name; idle without ``manual_gc``."""

    def __init__(self, options: TrainingConfig) -> None:
        self._manual = options.manual_gc
        self._interval = options.manual_gc_interval
        self._around_validation = options.manual_gc and options.manual_gc_eval

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Collect once, and keep Python from collecting by itself inside."""
        if not self._manual or not gc.isenabled():
            yield
            return
        # All ranks collect at the same step: one that collects alone makes all others wait.
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            gc.enable()

    def after_step(self, iteration: int) -> None:
        """Collect after every ``manual_gc_interval``-th iteration."""
        if self._manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def in_validation(self) -> Iterator[None]:
        """Collect before and after: garbage of training must not fill the memory of validation."""
        if self._around_validation:
            gc.collect()
        yield
        if self._around_validation:
            gc.collect()
