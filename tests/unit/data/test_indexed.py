"""Megatron's indexed data sets: the same samples and the same bytes as megatron-core, and nothing damaged is read."""

import os
import random
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.indexed import IndexedFile, checksums_path, index_path, token_type, tokens_path
from megatron_packed.data.indexed_writer import IndexedWriter

PREPARED = Path(__file__).parent / "indexed"
DOCUMENTS = {
    "uint16": [[[1, 2, 65499]], [[7]], [[9, 8, 7, 6], [5]], [[]], [[3, 3, 3]]],
    "int32": [[[1, 2, 65499, 2**31 - 1]], [[0, 0], [1], [2, 2]], [[4] * 40]],
}
"""What megatron-core wrote into the prepared files (`indexed/make.py`): tokens by document and sequence."""


def write(prefix: Path, documents: list[list[list[int]]], dtype: str) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add_document(np.array([*chain(*sequences)], np.int64), [len(tokens) for tokens in sequences])
    return prefix


def read(prefix: Path, *, map_tokens: bool = True) -> list[list[list[int]]]:
    file = IndexedFile(prefix, map_tokens=map_tokens)
    ends = file.document_index.tolist()
    documents = [[file.sequence(n).tolist() for n in range(*pair)] for pair in pairwise(ends)]
    places = file.document_starts()
    assert [file.tokens(*pair).tolist() for pair in pairwise(places)] == [[*chain(*d)] for d in documents]
    return documents


@pytest.mark.shows("Data", ".bin and .idx")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_of_megatron_core_are_read_and_written_alike(name: str, tmp_path: Path) -> None:
    assert read(PREPARED / name) == read(PREPARED / name, map_tokens=False) == DOCUMENTS[name]
    ours = write(tmp_path / name, DOCUMENTS[name], name)
    for path in (index_path, tokens_path):
        assert path(ours).read_bytes() == path(PREPARED / name).read_bytes()
    assert read(ours) == DOCUMENTS[name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.crc32c", f"{name}.idx"]


def test_megatron_core_reads_what_we_write(tmp_path: Path) -> None:
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    except Exception as error:  # an installed one that lacks its GPU libraries raises whatever it likes
        pytest.skip(f"megatron-core cannot be imported: {error}")
    draw = np.random.default_rng(3)
    documents = [[draw.integers(0, 300, size).tolist() for size in draw.integers(0, 50, 3)] for _ in range(200)]
    prefix = write(tmp_path / "ours", documents, token_type(300).name)
    theirs, ours = IndexedDataset(str(prefix)), IndexedFile(prefix)
    assert len(theirs) == len(ours) == 600 and theirs.index.dtype == ours.dtype
    assert theirs.document_indices.tolist() == ours.document_index.tolist()
    for number in range(len(theirs)):
        np.testing.assert_array_equal(theirs[number], ours.sequence(number))
        np.testing.assert_array_equal(theirs.get(number, offset=len(theirs[number]) // 2),
                                      ours.sequence(number, len(theirs[number]) // 2, -(-len(theirs[number]) // 2)))


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a bit flipped, a field replaced, a stretch removed, doubled or zeroed, or the end cut off."""
    at, way = draw.randrange(len(data)), draw.randrange(6)
    end = min(at + draw.choice((1, 2, 4, 8, 12)), len(data))
    if way == 0:
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if way == 1:
        return data[:at] + draw.randbytes(end - at) + data[end:]
    if way == 2:
        return data[:at] + data[end:]
    if way == 3:
        return data[:end] + data[at:]
    return data[:at] if way == 4 else data[:at] + b"\x00" * (end - at) + data[end:]


@pytest.mark.parametrize("with_checksums", [False, True])
def test_five_hundred_damaged_indexes(with_checksums: bool, tmp_path: Path) -> None:
    """Without checksums for documents of one sequence each, as usual; with them for any."""
    draw = random.Random(with_checksums)
    documents = [[[draw.randrange(300) for _ in range(draw.randrange(1, 9))] for _ in range(1 + 2 * with_checksums)]
                 for _ in range(24)]  # fmt: skip
    prefix = write(tmp_path / "d", documents, "uint16")
    if not with_checksums:
        checksums_path(prefix).unlink()
    whole, refused = index_path(prefix).read_bytes(), 0
    for _ in range(500):
        data = whole if draw.random() < 0.9 else whole[: draw.choice((20, 34))]  # headers alone, too
        data = damaged(data, draw)
        index_path(prefix).write_bytes(data)
        try:
            found = read(prefix)
        except DataError as error:
            assert str(prefix) in str(error) and "\n" not in str(error)
            refused += 1
        else:
            assert found == documents
    assert refused > 400


@pytest.mark.parametrize("map_tokens", [True, False])
def test_damaged_tokens(map_tokens: bool, tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[[n] * 50000] for n in range(4)], "int32")
    data = bytearray(tokens_path(prefix).read_bytes())
    data[300_000] ^= 4  # of the second document
    tokens_path(prefix).write_bytes(data)
    file = IndexedFile(prefix, map_tokens=map_tokens)
    assert file.fingerprint() == IndexedFile(prefix).fingerprint()
    assert file.sequence(3).tolist() == [3] * 50000
    with pytest.raises(DataError, match="bytes 262144 to 327679 are not what was written"):
        file.sequence(1)
    for start, stop in ((50_000, 65_536), (81_920, 90_000)):  # up to that block, and from behind it
        assert file.tokens(start, stop).tolist() == [1] * (stop - start)
    for start, stop in ((65_535, 65_537), (81_919, 81_921)):  # one token of it
        with pytest.raises(DataError, match="bytes 262144 to 327679"):
            IndexedFile(prefix, map_tokens=map_tokens).tokens(start, stop)
    tokens_path(prefix).write_bytes(data[:-4])
    for _ in range(2):  # with the checksums and without
        with pytest.raises(DataError, match=r"799996 bytes, but the sequences of d\.idx take 800000"):
            IndexedFile(prefix, map_tokens=map_tokens)
        checksums_path(prefix).unlink(missing_ok=True)


def test_the_type_of_tokens_is_that_of_megatrons_tools() -> None:
    assert [token_type(size).name for size in (65499, 65500, None)] == ["uint16", "int32", "int32"]


def test_tokens_that_are_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little a read gives; a file that is cut off meanwhile is an error, where a map would end the process."""
    prefix = write(tmp_path / "d", [[list(range(1000))]], "uint16")
    checksums_path(prefix).unlink()
    file, pread = IndexedFile(prefix, map_tokens=False), os.pread
    monkeypatch.setattr(os, "pread", lambda place, size, at: pread(place, min(size, 33), at))
    assert file.sequence(0, 3, 500).tolist() == list(range(3, 503)) and file.num_tokens == 1000
    assert file.fingerprint() == IndexedFile(prefix).fingerprint()
    os.truncate(tokens_path(prefix), 1001)
    assert file.sequence(0, 0, 500).tolist() == list(range(500))
    with pytest.raises(DataError, match=r"d\.bin ends at byte 1001, and did not when it was opened"):
        file.sequence(0)


def test_a_writer_leaves_all_or_nothing(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[[1]]], "uint16")
    refused = pytest.raises(DataError, match="tokens from 1 to 65536 do not fit uint16")
    with refused, IndexedWriter(prefix, "<u2") as new:
        new.add_document(np.array([1, 65536]))
    writer = IndexedWriter(prefix, "<u2")
    with pytest.raises(DataError, match="another process is writing"):
        IndexedWriter(prefix, "<u2")
    writer.add_document(np.array([2]))
    writer.abandon()
    assert read(prefix) == [[[1]]]
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(DataError, match=r"e\.idx does not exist"):
        IndexedFile(tmp_path / "e")
