"""Detection of out-of-memory errors, advice for users, and the GPU allocator's memory snapshot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.profiling import ProfilingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.torch_private import (
    dump_memory_snapshot,
    on_out_of_memory,
    record_memory_history,
)

CURE = f"; lower {flags.SEQ_LENGTH} or {flags.MICRO_BATCH_SIZE}, or train a smaller model"
_WORDS = ("out of memory", "can't allocate memory")
_HISTORY_ENTRIES = 100_000


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the error means that GPU or host memory ran out."""
    # Torch raises its own class only for its allocator. A library's failed cudaMalloc and a failed
    # host malloc raise a RuntimeError that only its text identifies.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _WORDS)


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
