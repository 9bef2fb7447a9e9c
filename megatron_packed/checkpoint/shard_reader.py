"""Reading of one file of a checkpoint, block by block; each block is compared with its checksum."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError, CheckpointMismatchError
from megatron_packed.checkpoint.manifest import FileRecord
from megatron_packed.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    Header,
    header_length,
    parse_header,
)
from megatron_packed.checkpoint.sealed_json import open_plain_file
from megatron_packed.checkpoint.shard_file import to_hex
from megatron_packed.files.checksums import crc32c
from megatron_packed.packed.array_types import UInt8Array

_CURE = "the file is damaged; use another checkpoint"


@dataclass(frozen=True, kw_only=True)
class FileSegment:
    """UInt8Array ``[begin, end)`` of a file's data section, and the ``target`` to copy them to.

    ``target`` is a uint8 view, or None for bytes that are only checked. With several ``rows`` only runs of bytes are
    copied, one per row. The runs begin ``pitch`` bytes apart in the file and ``target_pitch`` bytes
    apart in the target. The last run ends at the end of the segment and of the target.
    """

    begin: int
    end: int
    key: str
    dtype: torch.dtype
    target: Tensor | None = None
    rows: int = 1
    pitch: int = 0
    target_pitch: int = 0

    @property
    def length(self) -> int:
        """Length of one run in bytes."""
        return self.end - self.begin - (self.rows - 1) * self.pitch

    def runs_in(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the runs within bytes ``[low, high)`` of the data section.

        Each item is ``(offset in the data section, offset in the target, bytes of a run, rows)``.
        Complete runs form one item, and a run that is cut at either end forms its own item. So
        there are at most three items.
        """
        first, after, step = 0, 1, max(self.pitch, 1)
        if self.rows > 1:
            first = max(0, (low - self.begin - self.length) // step + 1)
            after = min(self.rows, -(-(high - self.begin) // step))
        while first < after:
            at = self.begin + first * self.pitch
            begin, end = max(at, low), min(at + self.length, high)
            num_whole = (high - self.length - self.begin) // step + 1 if self.rows > 1 else 1
            rows = max(min(num_whole, after) - first, 1) if begin == at else 1
            if begin < end:
                yield begin, first * self.target_pitch + begin - at, end - begin, rows
            first += rows


class ShardReader:
    """Reader of one file of a checkpoint, to be used as a context manager.

    The constructor compares the file's size and header with the manifest. Each block is checked
    when it is read. The reader needs host memory for the header and two blocks.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        """Open the file and check its size and header.

        Raises:
            CheckpointError: the file is missing or not a regular file, or its size or header
                differs from ``record``.
        """
        self.path = path
        self.record = record
        self._fault = partial(CheckpointError, path=path, cure=_CURE)
        self.descriptor = open_plain_file(path)
        try:
            self.header = self._read_header()
        except BaseException:
            os.close(self.descriptor)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def scan(self, segments: Sequence[FileSegment]) -> Iterator[tuple[FileSegment, UInt8Array]]:
        """Read and check each block that overlaps ``segments``, and fill the segments' targets.

        For each block and segment, yield the segment and its bytes in the block. The target is
        filled when the caller requests the next item. If the caller raises instead, the target does
        not receive these bytes.

        Raises:
            CheckpointError: a block does not match its checksum.
        """
        block_bytes = self.record.block_bytes
        touched: dict[int, list[FileSegment]] = {}
        for segment in segments:
            for index in range(segment.begin // block_bytes, -(-segment.end // block_bytes)):
                touched.setdefault(index, []).append(segment)
        pinned = any(segment.target is not None and segment.target.is_cuda for segment in segments)
        buffers = ReadBuffers(min(block_bytes, max(self.record.data_bytes, 1)), pinned=pinned)
        for index in sorted(touched):
            start = index * block_bytes
            block = self._read_block(index, buffers.next())
            for segment in touched[index]:
                low, high = max(segment.begin - start, 0), min(segment.end - start, len(block))
                yield segment, block[low:high]
                if segment.target is not None:
                    for at, to, length, rows in segment.runs_in(start + low, start + high):
                        target = segment.target[
                            to : to + (rows - 1) * segment.target_pitch + length
                        ]
                        buffers.copy_out(
                            at - start, segment.pitch, target, segment.target_pitch, length, rows
                        )
        buffers.finish()

    def _read_block(self, index: int, buffer: UInt8Array) -> UInt8Array:
        start = index * self.record.block_bytes
        block = buffer[: min(self.record.block_bytes, self.record.data_bytes - start)]
        position = self.record.header_bytes + start
        self._read_into(block, position)
        checksum = to_hex(crc32c(block))
        if checksum != self.record.block_checksums[index]:
            raise self._fault(
                f"bytes {position} to {position + len(block)} do not match their checksum",
                expected=f"{self.record.algorithm} {self.record.block_checksums[index]}",
                found=checksum,
            )
        return block

    def _read_header(self) -> Header:
        size = os.fstat(self.descriptor).st_size
        if size != self.record.size:
            raise self._fault(
                "the file has the wrong size",
                expected=f"{self.record.size} bytes",
                found=f"{size} bytes",
            )
        first = np.empty(min(LENGTH_BYTES, size), dtype=np.uint8)
        self._read_into(first, 0)
        length = header_length(first.tobytes(), size, self.path)
        if length != self.record.header_bytes:
            raise self._fault(
                "the header has the wrong length",
                expected=f"{self.record.header_bytes} bytes",
                found=f"{length} bytes",
            )
        data = np.empty(length, dtype=np.uint8)
        self._read_into(data, 0)
        checksum = to_hex(crc32c(data))
        if checksum != self.record.header_checksum:
            raise self._fault(
                "the header does not match its checksum",
                expected=f"{self.record.algorithm} {self.record.header_checksum}",
                found=checksum + _origin(data.tobytes(), size, self.path),
            )
        return parse_header(data.tobytes(), size, self.path)

    def _read_into(self, target: UInt8Array, position: int) -> None:
        view = target.data
        while view:
            try:
                count = os.preadv(self.descriptor, [view], position)
            except OSError as error:
                raise self._fault(
                    f"byte {position} cannot be read",
                    expected=f"{len(view)} bytes",
                    found=str(error),
                ) from None
            if count == 0:
                raise self._fault(
                    "the file ends too early",
                    expected=f"{position + len(view)} bytes",
                    found=f"{position} bytes",
                )
            view, position = view[count:], position + count


def _origin(data: bytes, size: int, path: Path) -> str:
    """Describe the run, step and rank in the header of a file, for a message.

    Return an empty string if the header cannot be read or names none of them.
    """
    try:
        strings = parse_header(data, size, path).metadata
    except CheckpointError:
        return ""
    names = ", ".join(
        f"{key} {strings[key]!r}" for key in ("run_id", "step", "rank") if key in strings
    )
    return f" (the header of a file of {names})" if names else ""


def check_tensor_bytes(segment: FileSegment, data: UInt8Array, path: Path, *, finite: bool) -> None:
    """Check that booleans in ``data`` are 0 or 1 and, with ``finite``, that floats are finite.

    ``data`` must consist of complete elements.

    Raises:
        CheckpointError: a boolean is neither 0 nor 1, so the recorded dtype is wrong.
        CheckpointMismatchError: a value is NaN or infinite. The file is intact.
    """
    if segment.dtype is torch.bool:
        highest = int(data.max(initial=0))
        if highest > 1:
            raise CheckpointError(
                f"{segment.key} has values that are not booleans",
                path=path,
                expected="booleans 0 and 1",
                found=highest,
                cure=_CURE,
            )
    elif finite and segment.dtype.is_floating_point and len(data):
        # aminmax propagates NaN, so one pass without a copy finds NaN and infinities.
        extremes = torch.aminmax(torch.from_numpy(data).view(segment.dtype))
        low, high = float(extremes.min), float(extremes.max)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise CheckpointMismatchError(
                f"{segment.key} has values that are not finite",
                path=path,
                expected="finite",
                found=f"values from {low} to {high}",
                cure="load an earlier step, or pass check_finite=False to inspect these values",
            )


class ReadBuffers:
    """Pair of block buffers used in turn to read files; pinned if the data goes to CUDA tensors.

    A buffer is used again only after the device copies that read it have finished.
    """

    def __init__(self, block_bytes: int, *, pinned: bool) -> None:
        self._buffers = [
            torch.empty(block_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        ]
        self._copies: list[list[torch.cuda.Event]] = [[], []]
        self._turn = 0

    def next(self) -> UInt8Array:
        self._turn ^= 1
        self._wait(self._turn)
        return self._buffers[self._turn].numpy()

    def copy_out(
        self, begin: int, pitch: int, target: Tensor, target_pitch: int, length: int, rows: int
    ) -> None:
        """Copy ``rows`` runs of ``length`` bytes from the current buffer to ``target``.

        Args:
            begin: first byte of the first run in the buffer that `next` returned last.
            pitch, target_pitch: bytes from the start of one run to the start of the next, in the
                buffer and in the target.
            target: uint8 view on CPU or CUDA that begins and ends with the runs.
        """
        source = self._buffers[self._turn][begin : begin + (rows - 1) * pitch + length]
        to = target.as_strided((rows, length), (target_pitch or length, 1))
        if not target.is_cuda:
            to.copy_(source.as_strided((rows, length), (pitch or length, 1)))
            return
        with torch.cuda.device(target.device):
            # A strided copy between host and device would be slow. So copy the contiguous bytes,
            # and select the wanted elements on the device.
            staged = source.to(target.device, non_blocking=True) if rows > 1 else source
            to.copy_(staged.as_strided((rows, length), (pitch or length, 1)), non_blocking=True)
            event = torch.cuda.current_stream().record_event()
        self._copies[self._turn].append(event)

    def finish(self) -> None:
        """Wait until all copies from both buffers have finished."""
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        for event in self._copies[turn]:
            event.synchronize()
        self._copies[turn].clear()
