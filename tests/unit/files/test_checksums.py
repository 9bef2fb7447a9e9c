"""Checksums of blocks: published test values, and bytes that arrive in parts."""

import numpy as np
import pytest

from megatron_packed.files.checksums import crc32c

# RFC 3720, appendix B.4
PUBLISHED = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@pytest.mark.parametrize(("data", "value"), PUBLISHED)
def test_published_values(data, value):
    assert crc32c(data) == crc32c(np.frombuffer(data, dtype=np.uint8)) == value


def test_a_checksum_continues_where_the_bytes_are_cut():
    data = np.random.default_rng(0).integers(0, 256, 70_001, dtype=np.uint8)
    assert crc32c(data[20_003:], crc32c(data[:20_003])) == crc32c(data)
