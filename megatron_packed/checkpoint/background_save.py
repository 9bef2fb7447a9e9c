"""Saving in the background: tensors are copied to host memory, and a thread saves the copies.

[Note: saves in the background]

1. Between two training steps the tensors of the save are copied to one host buffer, which all saves
   reuse. For CUDA tensors the buffer is page-locked. Later training steps change only the original
   tensors, so they do not affect the checkpoint.
2. A thread saves the copies with the protocol of a save in the foreground: see [Note: commit
   protocol]. The ranks communicate through a separate process group, so the save and the
   collectives of training do not wait for each other.
3. At most one save runs at a time. The next save, and the end of the run, wait for it.
4. After each training step the trainer checks whether the save has finished. An error of the save
   is raised there, the same on all ranks.
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
"""Alignment of each copy in the host buffer, in bytes."""

WriteShards = Callable[[Sequence[TensorShard]], SavedCheckpoint]


class BackgroundSaves:
    """Background saves of this rank's tensors, at most one at a time.

    See [Note: saves in the background].
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[SavedCheckpoint] | None = None
        self._staging = Staging()

    def begin(self, save: WriteShards, shards: Sequence[TensorShard]) -> None:
        """Copy ``shards`` to host memory and call ``save`` with the copies in the thread.

        No other save may be running. When this method returns, the caller may change the tensors.
        """
        assert self._under_way is None, "wait for the previous save first"
        self._under_way = self._thread.submit(save, self._staging.copy(shards))

    def take(self, *, wait: bool) -> SavedCheckpoint | None:
        """Return the result of the running save, and forget the save.

        Return None if no save was begun since the last result. Without ``wait``, also return None
        while the save is running.

        Raises:
            Exception: the error that the save raised.
        """
        if self._under_way is None or not (wait or self._under_way.done()):
            return None
        under_way = self._under_way
        self._under_way = None
        return under_way.result()


class Staging:
    """Host buffer for copies of tensors, allocated by the first copy and enlarged when needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def copy(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """Copy the tensors of ``shards`` to the buffer and return shards that view the copies.

        The copies of the previous call are overwritten.
        """
        starts, total = [], 0
        for shard in shards:
            starts.append(total)
            total += -(-shard.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(shard.tensor.is_cuda for shard in shards)
        self._make_room(total, locked=on_gpu)
        copies = []
        for shard, start in zip(shards, starts):
            room = self._memory[start : start + shard.tensor.nbytes]
            copies.append(replace(shard, tensor=room.view(shard.dtype), compute=None))
            for values in shard.values():
                data = byte_view(values)
                room[: len(data)].copy_(data, non_blocking=True)
                room = room[len(data) :]
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _make_room(self, num_bytes: int, *, locked: bool) -> None:
        if len(self._memory) >= num_bytes:
            return
        self._unlock()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        # torch rounds page-locked allocations up to a power of two, up to twice the needed size.
        # So allocate ordinary memory, and page-lock it in place.
        if locked and num_bytes:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            result = runtime.cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)
            # If CUDA cannot page-lock the memory, copies are slower but still correct.
            self._locked = int(result) == 0

    def _unlock(self) -> None:
        if self._locked:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._memory.data_ptr())
            self._locked = False

    def __del__(self) -> None:
        with suppress(Exception):  # At the end of a process torch may already be unloaded.
            self._unlock()
