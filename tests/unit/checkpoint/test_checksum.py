"""Checksums of blocks: published test values, and both algorithms that a manifest may name."""

import zlib

import numpy as np
import pytest

from megatron_packed.checkpoint import checksum

# RFC 3720, appendix B.4
PUBLISHED = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (b"", 0),
]


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


@pytest.mark.parametrize(("data", "value"), PUBLISHED)
def test_published_values(data, value):
    assert checksum.checksum("crc32c", array(data)) == value


@pytest.mark.parametrize("algorithm", checksum.ALGORITHMS)
def test_a_checksum_goes_on_where_the_bytes_are_cut(algorithm):
    data = np.random.default_rng(0).integers(0, 256, 70_001, dtype=np.uint8)
    begun = checksum.checksum(algorithm, data[:20_003])
    assert checksum.extend(algorithm, begun, data[20_003:]) == checksum.checksum(algorithm, data)


def test_both_algorithms_are_read_and_no_other():
    data = array(b"123456789")
    assert checksum.checksum("crc32c", data) == 0xE3069283
    assert checksum.checksum("crc32", data) == zlib.crc32(b"123456789") == 0xCBF43926
    with pytest.raises(ValueError, match="'md5' is unknown"):
        checksum.checksum("md5", data)
