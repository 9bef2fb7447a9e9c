"""Saving beside training: tensors are copied to host memory between two steps, and a thread saves
the copies.

[Note: saves in the background]
1. Between two steps the tensors of the save are copied to a host buffer that all saves share
   (page-locked for CUDA tensors). What training does to them afterwards does not reach the
   checkpoint.
2. A thread does with the copies what a save does otherwise, by the same protocol: see [Note: commit
   protocol]. The ranks agree through a process group of their own, so no collective of
   training is in its way.
3. One save is under way at most: the next one, and the end of the run, wait for it.
4. How it went, the same on all ranks, is asked for after every step; an error is raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch

from megatron_packed.checkpoint.save import SavedCheckpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard, byte_view

_ALIGNMENT = 64
"""Bytes; every copy begins at a multiple."""

Save = Callable[[Sequence[TensorShard]], SavedCheckpoint]


class BackgroundSaves:
    """Saves, one at a time, of what this rank held when they began. Reads: [Note: saves in the
    background].
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[SavedCheckpoint] | None = None
        self._staging = Staging()

    def begin(self, save: Save, shards: Sequence[TensorShard]) -> None:
        """``save(copies of shards)`` in the thread, which is free; returns as soon as the tensors
        may change.
        """
        assert self._under_way is None, "wait for the save before"
        self._under_way = self._thread.submit(save, self._staging.copy(shards))

    def take(self, *, wait: bool) -> SavedCheckpoint | None:
        """The save that was begun last, once; None if there is none or, without ``wait``, if it is
        still under way.

        Raises:
            Exception: what went wrong in the save.
        """
        if self._under_way is None or not (wait or self._under_way.done()):
            return None
        under_way = self._under_way
        self._under_way = None
        return under_way.result()


class Staging:
    """Host memory that holds copies of tensors; made by the first copy, and used again by all that
    fit.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def copy(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """The shards with tensors in host memory; what was copied before is overwritten."""
        starts, total = [], 0
        for shard in shards:
            starts.append(total)
            total += -(-shard.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(shard.tensor.is_cuda for shard in shards)
        self._make_room(total, locked=on_gpu)
        copies = []
        for shard, start in zip(shards, starts):
            room = self._memory[start : start + shard.tensor.nbytes]
            room.copy_(byte_view(shard.tensor), non_blocking=True)
            copies.append(replace(shard, tensor=room.view(shard.dtype)))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _make_room(self, num_bytes: int, *, locked: bool) -> None:
        if len(self._memory) >= num_bytes:
            return
        self._unlock()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        # torch's own page-locked memory comes in powers of two, which may be twice what is needed.
        if locked and num_bytes:
            result = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)
            self._locked = int(result) == 0  # else copies are slower, and right

    def _unlock(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._locked = False

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of a process torch may be gone already
            self._unlock()
