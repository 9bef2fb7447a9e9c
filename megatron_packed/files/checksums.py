"""Checksum of stored bytes: CRC32C, by the instructions of the processor."""

from __future__ import annotations

from typing import Any

import google_crc32c


def crc32c(data: Any, previous: int = 0) -> int:
    """Return the CRC32C of bytes, or of earlier bytes with the checksum ``previous`` and ``data``.

    Args:
        data: bytes, or a contiguous array of bytes.
    """
    return int(google_crc32c.extend(previous, data))
