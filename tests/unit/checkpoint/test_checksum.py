"""CRC32C: published values, and both implementations alike."""

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
    assert checksum.crc32c_numpy(array(data)) == value
    assert checksum.checksum("crc32c", array(data)) == value


@pytest.mark.parametrize("size", [1, 4095, 16383, 16384, 16388, 70_001, 1 << 20])
def test_the_numpy_form_equals_the_library(size):
    google_crc32c = pytest.importorskip("google_crc32c")
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert checksum.crc32c_numpy(data) == google_crc32c.value(data.tobytes())
    cut = size // 3
    assert checksum.crc32c_numpy(
        data[cut:], checksum.crc32c_numpy(data[:cut])
    ) == google_crc32c.value(data.tobytes())


def test_without_the_library_crc32c_is_read_and_crc32_is_written(monkeypatch):
    data = array(b"123456789")
    monkeypatch.setattr(checksum, "_extend_crc32c", None)
    assert checksum.checksum("crc32c", data) == 0xE3069283
    assert checksum.checksum("crc32", data) == zlib.crc32(b"123456789") == 0xCBF43926
    with pytest.raises(ValueError, match="'md5' is unknown"):
        checksum.checksum("md5", data)
