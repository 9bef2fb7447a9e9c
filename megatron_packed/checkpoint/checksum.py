"""Checksums of file blocks: CRC32C where its C library is present, zlib's CRC-32 otherwise; the
name is recorded.

The two are different polynomials, so a manifest says which one a file carries, and each can be read
anywhere: CRC32C without the library is computed with numpy (about 50 times slower, same value).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

try:
    import google_crc32c

    _extend_crc32c: Callable[[int, Any], int] | None = (
        google_crc32c.extend if google_crc32c.implementation == "c" else None
    )
except ImportError:
    _extend_crc32c = None

CRC32C = "crc32c"
CRC32 = "crc32"
ALGORITHMS = (CRC32C, CRC32)

WRITING_ALGORITHM = CRC32C if _extend_crc32c is not None else CRC32
"""The algorithm of files written by this process: the fastest one that is here."""


def extend(algorithm: str, value: int, data: Bytes) -> int:
    """Checksum of (bytes seen so far, whose checksum is ``value``) followed by ``data``; start with
    0.
    """
    if algorithm == CRC32:
        return zlib.crc32(data.data, value)
    if algorithm == CRC32C:
        return crc32c_numpy(data, value) if _extend_crc32c is None else _extend_crc32c(value, data)
    raise ValueError(
        f"checksum algorithm {algorithm!r} is unknown; this version knows {', '.join(ALGORITHMS)}."
    )


def checksum(algorithm: str, data: Bytes) -> int:
    """Checksum of ``data`` alone."""
    return extend(algorithm, 0, data)


def to_hex(value: int) -> str:
    return f"{value:08x}"


# CRC32C without a library. A CRC is linear over GF(2), so the data is cut into equal lanes that
# advance together, four bytes a step through two 16-bit tables; the lanes' remainders are then
# folded pairwise, the left one moved past the right one's bytes by a 32 x 32 bit matrix. Source: M.
# Adler, zlib crc32_combine; polynomial of RFC 3720.

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed
_LANES = 4096


@lru_cache(maxsize=1)
def _tables() -> tuple[list[int], Words, Words]:
    """(table of one byte, table of a word's low half, table of its high half)."""
    byte_table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        byte_table.append(value)
    one = np.array(byte_table, dtype=np.uint32)

    def advance(state: Words) -> Words:
        result: Words = (state >> np.uint32(8)) ^ one[state & np.uint32(255)]
        return result

    half = np.arange(1 << 16, dtype=np.uint32)
    low = advance(advance(advance(advance(half))))
    high = advance(advance(advance(advance(half << np.uint32(16)))))
    return byte_table, low, high


@lru_cache(maxsize=64)
def _move_matrix(num_bytes: int) -> tuple[int, ...]:
    """Columns of the matrix that moves a CRC state past ``num_bytes`` zero bytes."""
    byte_table = _tables()[0]
    power = np.array(
        [((1 << i) >> 8) ^ byte_table[(1 << i) & 255] for i in range(32)], dtype=np.uint32
    )
    result = np.array([1 << i for i in range(32)], dtype=np.uint32)
    while num_bytes:
        if num_bytes & 1:
            result = _apply(power, result)
        power = _apply(power, power)
        num_bytes >>= 1
    return tuple(int(column) for column in result)


def _apply(matrix: Words, states: Words) -> Words:
    moved = np.zeros_like(states)
    for bit in range(32):
        moved ^= np.where(
            (states >> np.uint32(bit)) & np.uint32(1), matrix[bit], np.uint32(0)
        ).astype(np.uint32)
    return moved


def crc32c_numpy(data: Bytes, value: int = 0) -> int:
    """CRC32C in numpy, about 300 MB/s; ``value`` continues an earlier checksum."""
    byte_table, low, high = _tables()
    state = value ^ 0xFFFFFFFF
    lane_bytes = len(data) // _LANES // 4 * 4
    body = lane_bytes * _LANES
    if body:
        words = np.ascontiguousarray(data[:body].reshape(_LANES, lane_bytes).view("<u4").T)
        lanes = np.zeros(_LANES, dtype=np.uint32)
        lanes[0] = state
        for word in words:
            lanes ^= word
            lanes = low[lanes & np.uint32(0xFFFF)] ^ high[lanes >> np.uint32(16)]
        while len(lanes) > 1:
            matrix = np.array(_move_matrix(lane_bytes * (_LANES // len(lanes))), dtype=np.uint32)
            lanes = _apply(matrix, lanes[0::2]) ^ lanes[1::2]
        state = int(lanes[0])
    for byte in data[body:].tobytes():
        state = (state >> 8) ^ byte_table[(state ^ byte) & 255]
    return state ^ 0xFFFFFFFF
