"""Writing of one file of a checkpoint, block by block and with checksums.

CPU tensors are read in place, without a copy, unless their values are computed for the file. CUDA
tensors pass through two pinned buffers: while
the caller checksums and writes one piece, the next piece is copied from the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_packed.checkpoint.manifest import CRC32C, FileRecord
from megatron_packed.checkpoint.safetensors_header import (
    encode_header,
    lay_out,
)
from megatron_packed.checkpoint.tensor_shard import TensorShard, byte_view
from megatron_packed.files.checksums import crc32c
from megatron_packed.files.written_files import open_new, write_all
from megatron_packed.packed.array_types import UInt8Array

BLOCK_BYTES = 4 << 20
"""UInt8Array that one checksum covers; reads, checks and host buffers use blocks of this size."""


def write_shard_file(
    path: Path,
    rank: int,
    shards: Sequence[TensorShard],
    metadata: Mapping[str, str],
    on_site: Callable[[str], None],
    block_bytes: int = BLOCK_BYTES,
    values: Callable[[TensorShard], Tensor] | None = None,
) -> FileRecord:
    """Write ``shards`` to one safetensors file, sync the file, and return its size and checksums.

    Checksums are computed from the bytes in memory, so they also detect errors on the way to the
    disk. CUDA tensors need two blocks of host memory, CPU tensors none.

    Args:
        values: returns the tensor to write for a shard, in place of the shard's own. Only one such
            tensor exists at a time.
    Raises:
        OSError: the file cannot be written: the disk is full, read-only, ...
    """
    entries = lay_out([(shard.key, shard.dtype, tuple(shard.tensor.shape)) for shard in shards])
    header = encode_header(entries, metadata, path)
    by_key = {shard.key: shard for shard in shards}
    in_order = [by_key[entry.key] for entry in entries]
    blocks = _RunningBlocks(block_bytes)
    descriptor = open_new(path, mode=0o644)
    try:
        on_site("shard.opened")
        write_all(descriptor, header)
        on_site("shard.header_written")
        for piece in _pieces(in_order, block_bytes, values):
            blocks.add(piece)
            write_all(descriptor, piece.data)
            on_site("shard.piece_written")
            # The piece keeps its tensor alive. Free it before `values` allocates the next tensor.
            del piece
        on_site("shard.before_sync")
        os.fsync(descriptor)
        on_site("shard.synced")
    finally:
        os.close(descriptor)
    return FileRecord(
        name=path.name,
        rank=rank,
        size=len(header) + blocks.total,
        header_bytes=len(header),
        algorithm=CRC32C,
        header_checksum=to_hex(crc32c(header)),
        block_bytes=block_bytes,
        block_checksums=tuple(blocks.finish()),
    )


def _pieces(
    shards: Sequence[TensorShard], block_bytes: int, values: Callable[[TensorShard], Tensor] | None
) -> Iterator[UInt8Array]:
    if values is None:
        yield from host_pieces((part for shard in shards for part in shard.values()), block_bytes)
    else:
        for shard in shards:
            yield from host_pieces([values(shard)], block_bytes)


def to_hex(checksum: int) -> str:
    return f"{checksum:08x}"


class _RunningBlocks:
    """Checksums of consecutive blocks of a byte stream that arrives in pieces of any size."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.total = 0
        self.checksums: list[str] = []
        self.value = 0

    def add(self, piece: UInt8Array) -> None:
        while len(piece):
            part = piece[: self.block_bytes - self.total % self.block_bytes]
            self.value = crc32c(part, self.value)
            self.total += len(part)
            piece = piece[len(part) :]
            if self.total % self.block_bytes == 0:
                self._close()

    def finish(self) -> list[str]:
        if self.total % self.block_bytes:
            self._close()
        return self.checksums

    def _close(self) -> None:
        self.checksums.append(to_hex(self.value))
        self.value = 0


def host_pieces(tensors: Iterable[Tensor], piece_bytes: int) -> Iterator[UInt8Array]:
    """Yield the bytes of 1-D tensors, in order, in pieces of at most ``piece_bytes``.

    A piece is valid until the caller requests the next piece. CUDA copies run on the current
    stream, after the work that is already queued on it.
    """
    waiting: UInt8Array | None = None
    copied: torch.cuda.Event | None = None
    buffers = _PinnedPair(piece_bytes)
    for tensor in tensors:
        data = byte_view(tensor)
        for begin in range(0, data.numel(), piece_bytes):
            piece = data[begin : begin + piece_bytes]
            array, event = buffers.stage(piece) if piece.is_cuda else (piece.numpy(), None)
            if waiting is not None:
                if copied is not None:
                    copied.synchronize()
                yield waiting
            waiting, copied = array, event
    if waiting is not None:
        if copied is not None:
            copied.synchronize()
        yield waiting


class _PinnedPair:
    """Pair of pinned buffers used in turn, allocated for the first CUDA tensor."""

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.buffers: list[Tensor] = []
        self.turn = 0

    def stage(self, piece: Tensor) -> tuple[UInt8Array, torch.cuda.Event]:
        """Start the copy of ``piece`` to a buffer; return its array and the event after the copy."""
        if not self.buffers:
            self.buffers = [
                torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
        self.turn ^= 1
        target = self.buffers[self.turn][: piece.numel()]
        with torch.cuda.device(piece.device):
            target.copy_(piece, non_blocking=True)
            event = torch.cuda.current_stream().record_event()
        return target.numpy(), event
