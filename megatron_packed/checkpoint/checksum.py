"""Checksums of the blocks of a checkpoint's files: CRC32C, and zlib's CRC-32 in older files.

The algorithms use different polynomials, so the manifest names the algorithm of each file.
"""

from __future__ import annotations

import zlib

import google_crc32c

from megatron_packed.packed.array_types import UInt8Array

CRC32C = "crc32c"
"""Algorithm of all files that this version writes."""
CRC32 = "crc32"
"""Algorithm of files that earlier versions wrote on machines without google-crc32c."""
ALGORITHMS = (CRC32C, CRC32)


def extend(algorithm: str, value: int, data: UInt8Array) -> int:
    """Return the checksum of earlier bytes with the checksum ``value``, followed by ``data``."""
    if algorithm == CRC32:
        return zlib.crc32(data.data, value)
    if algorithm == CRC32C:
        return int(google_crc32c.extend(value, data))
    raise ValueError(
        f"checksum algorithm {algorithm!r} is unknown; this version supports {', '.join(ALGORITHMS)}."
    )


def checksum(algorithm: str, data: UInt8Array) -> int:
    """Return the checksum of ``data``."""
    return extend(algorithm, 0, data)


def to_hex(value: int) -> str:
    return f"{value:08x}"
