"""Copies between tensors and host buffers in pieces of one block, so that host memory stays small.

CPU tensors are read in place, without a copy. CUDA tensors pass through two pinned buffers: while
the caller checksums and writes one piece, the next piece is copied from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_packed.checkpoint.tensor_shard import byte_view
from megatron_packed.packed.array_types import UInt8Array


def host_pieces(tensors: Sequence[Tensor], piece_bytes: int) -> Iterator[UInt8Array]:
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
