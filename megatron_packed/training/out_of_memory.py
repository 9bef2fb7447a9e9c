"""Out of memory: how it is recognised, what to do about it, and a record of the GPU's allocator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_packed.config.sections.profiling import ProfilingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.torch_private import (
    dump_memory_snapshot,
    on_out_of_memory,
    record_memory_history,
)

CURE = "; lower --seq-length or --micro-batch-size, or train a smaller model"
_WORDS = ("out of memory", "can't allocate memory")
_HISTORY_ENTRIES = 100_000


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the memory of the GPU or of the host ran out."""
    # Torch has a class for its allocator alone: neither a library's failed cudaMalloc nor the
    # host's malloc has it.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


class MemoryHistory:
    """Record of what the allocator of this process's GPU does, written when memory runs out.

    The record is written in the very moment, while everything is still held, even if the run copes
    with it. It is for pytorch.org/memory_viz.

    Args:
        path: of the record; with several ranks each adds its number.
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
        # In the moment itself: what holds the memory is freed while the error travels up.
        self._ran_out = True
        self._write(f"no room for {wanted / 2**20:,.1f} MiB more on GPU {device}")

    def finish(self) -> None:
        """Write the record at the orderly end; one that was written when memory ran out stays."""
        if not self._ran_out:
            self._write("the run is over")

    def _write(self, why: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            dump_memory_snapshot(str(self.path))
        except (OSError, RuntimeError) as error:
            print(f"there is no memory snapshot: {error}", file=sys.stderr, flush=True)
        else:
            print(f"memory snapshot ({why}): {self.path}", file=sys.stderr, flush=True)


def memory_history(
    options: ProfilingConfig, groups: ParallelGroups, warn: Callable[[str], None]
) -> MemoryHistory | None:
    """Begin the record that the options ask for; None where there is none to be had."""
    if not options.record_memory_history:
        return None
    if groups.device.type != "cuda":
        warn("--record-memory-history is of the GPU's allocator, and there is no GPU.")
        return None
    history = MemoryHistory(options.memory_snapshot_path or "snapshot.pickle", groups)
    history.start()
    return history
