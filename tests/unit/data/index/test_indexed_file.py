"""Tests of Megatron's indexed data sets: samples and bytes equal those of megatron-core, and
damaged files raise errors.
"""

import os
import random
import struct
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.index import indexed_file as indexed
from megatron_packed.data.index.indexed_documents import IndexedDocuments
from megatron_packed.data.index.indexed_file import (
    IndexedFile,
    checksums_path,
    token_type,
)
from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.data.sources.source_files import index_path, tokens_path
from support.data_helpers import sequence_of

PREPARED = Path(__file__).parent / "indexed"
DOCUMENTS = {
    "uint16": [[[1, 2, 65499]], [[7]], [[9, 8, 7, 6], [5]], [[]], [[3, 3, 3]]],
    "int32": [[[1, 2, 65499, 2**31 - 1]], [[0, 0], [1], [2, 2]], [[4] * 40]],
}
"""Documents that megatron-core wrote into the prepared files (`tools/indexed_files.py`), as lists of
sequences of tokens.
"""


def write(prefix: Path, documents: list[list[list[int]]], dtype: str) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add_document(
                np.array([*chain(*sequences)], np.int64), [len(tokens) for tokens in sequences]
            )
    return prefix


def read(prefix: Path, *, map_tokens: bool = True) -> list[list[list[int]]]:
    file = IndexedFile(prefix, map_tokens=map_tokens)
    ends = file.document_index.tolist()
    documents = [[sequence_of(file, n).tolist() for n in range(*pair)] for pair in pairwise(ends)]
    places = file.document_starts()
    assert [file.tokens(*pair).tolist() for pair in pairwise(places)] == [
        [*chain(*d)] for d in documents
    ]
    return documents


@pytest.mark.shows("Data", ".bin and .idx")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_of_megatron_core_are_read_and_written_identically(name: str, tmp_path: Path) -> None:
    assert read(PREPARED / name) == read(PREPARED / name, map_tokens=False) == DOCUMENTS[name]
    ours = write(tmp_path / name, DOCUMENTS[name], name)
    for path in (index_path, tokens_path):
        assert path(ours).read_bytes() == path(PREPARED / name).read_bytes()
    assert read(ours) == DOCUMENTS[name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}.bin",
        f"{name}.crc32c",
        f"{name}.idx",
    ]


def test_megatron_core_reads_what_we_write(tmp_path: Path) -> None:
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    except Exception as error:  # without its GPU libraries, megatron-core may raise any exception
        pytest.skip(f"megatron-core cannot be imported: {error}")
    draw = np.random.default_rng(3)
    documents = [
        [draw.integers(0, 300, size).tolist() for size in draw.integers(0, 50, 3)]
        for _ in range(200)
    ]
    prefix = write(tmp_path / "ours", documents, token_type(300).name)
    theirs, ours = IndexedDataset(str(prefix)), IndexedFile(prefix)
    assert len(theirs) == len(ours) == 600 and theirs.index.dtype == ours.dtype
    assert theirs.document_indices.tolist() == ours.document_index.tolist()
    for number in range(len(theirs)):
        np.testing.assert_array_equal(theirs[number], sequence_of(ours, number))
        np.testing.assert_array_equal(
            theirs.get(number, offset=len(theirs[number]) // 2),
            sequence_of(ours, number)[len(theirs[number]) // 2 :],
        )


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with random damage.

    A bit is flipped, a field is replaced, a range is removed, doubled or zeroed, or the end is cut
    off.
    """
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
    """The reader detects random damage of the index.

    Without checksums, documents have one sequence each. With checksums, they have several.
    """
    draw = random.Random(with_checksums)
    documents = [
        [
            [draw.randrange(300) for _ in range(draw.randrange(1, 9))]
            for _ in range(1 + 2 * with_checksums)
        ]
        for _ in range(24)
    ]
    prefix = write(tmp_path / "d", documents, "uint16")
    if not with_checksums:
        checksums_path(prefix).unlink()
    whole, refused = index_path(prefix).read_bytes(), 0
    for _ in range(500):
        data = (
            whole if draw.random() < 0.9 else whole[: draw.choice((20, 34))]
        )  # sometimes the index has only the header
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
    data[300_000] ^= 4  # a byte of the second document
    tokens_path(prefix).write_bytes(data)
    file = IndexedFile(prefix, map_tokens=map_tokens)
    assert file.fingerprint() == IndexedFile(prefix).fingerprint()
    assert sequence_of(file, 3).tolist() == [3] * 50000
    with pytest.raises(DataError, match="bytes 262144 to 327679 changed since they were written"):
        sequence_of(file, 1)
    for start, stop in (
        (50_000, 65_536),
        (81_920, 90_000),
    ):  # the tokens before and after the damaged block
        assert file.tokens(start, stop).tolist() == [1] * (stop - start)
    for start, stop in (
        (65_535, 65_537),
        (81_919, 81_921),
    ):  # ranges with one token of the damaged block
        with pytest.raises(DataError, match="bytes 262144 to 327679"):
            IndexedFile(prefix, map_tokens=map_tokens).tokens(start, stop)
    tokens_path(prefix).write_bytes(data[:-4])
    for _ in range(2):  # first with checksums, then without
        with pytest.raises(
            DataError, match=r"799996 bytes, but the sequences of d\.idx need 800000"
        ):
            IndexedFile(prefix, map_tokens=map_tokens)
        checksums_path(prefix).unlink(missing_ok=True)


def test_the_type_of_tokens_is_that_of_megatrons_tools() -> None:
    assert [token_type(size).name for size in (65499, 65500, None)] == ["uint16", "int32", "int32"]


def test_tokens_that_are_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are read completely even if ``pread`` returns few bytes.

    A file that is cut off after it was opened raises an error. A memory map would crash the
    process.
    """
    prefix = write(tmp_path / "d", [[list(range(1000))]], "uint16")
    checksums_path(prefix).unlink()
    file, pread = IndexedFile(prefix, map_tokens=False), os.pread
    monkeypatch.setattr(os, "pread", lambda place, size, at: pread(place, min(size, 33), at))
    assert file.tokens(3, 503).tolist() == list(range(3, 503)) and file.num_tokens == 1000
    assert file.fingerprint() == IndexedFile(prefix).fingerprint()
    os.truncate(tokens_path(prefix), 1001)
    assert file.tokens(0, 500).tolist() == list(range(500))
    with pytest.raises(
        DataError, match=r"d\.bin ends at byte 1001, but was longer when it was opened"
    ):
        sequence_of(file, 0)


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


def test_a_link_under_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "d.bin.part").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match="cannot be written: Too many levels of symbolic links"):
        IndexedWriter(tmp_path / "d", "<u2")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_writer_that_ends_in_between_leaves_no_index_of_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a writer fails before it publishes one of its files, no index describes other tokens.

    Both data sets have the same number of tokens, so that sizes do not reveal the fault.
    """
    replace = os.replace
    for suffix in (".bin", ".crc32c", ".idx"):
        prefix = write(tmp_path / suffix[1:], [[[1, 2]]], "uint16")

        def fails(old: Path, new: Path, suffix: str = suffix) -> None:
            if Path(new).suffix == suffix:
                raise OSError(28, "no room")
            replace(old, new)

        monkeypatch.setattr(os, "replace", fails)
        with pytest.raises(DataError, match="cannot be written: no room"):
            write(prefix, [[[3, 4]]], "uint16")
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(DataError, match="does not exist"):
            IndexedFile(prefix)
        assert read(write(prefix, [[[3, 4]]], "uint16")) == [[[3, 4]]]


@pytest.mark.parametrize(
    ("code", "name"), [(1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (8, "u2")]
)
def test_the_code_of_every_type(code: int, name: str, tmp_path: Path) -> None:
    """Each type has the code of the format, and its smallest and largest values are preserved."""
    limits = np.iinfo(name)
    prefix = write(tmp_path / "d", [[[limits.min, 0, limits.max]]], name)
    assert index_path(prefix).read_bytes()[17] == code
    assert read(prefix) == [[[limits.min, 0, limits.max]]]


def changed(at: int, form: str, value: int):
    """Return a function that overwrites a field of an index."""

    def change(data: bytearray) -> None:
        struct.pack_into(form, data, at, value)

    return change


LENGTHS, STARTS, ENTRIES = 34, 34 + 4 * 6, 34 + 12 * 6
FAULTS = {
    "begins with b'MMIDIDY": changed(6, "<B", ord("Y")),
    "has version 2": changed(9, "<Q", 2),
    "has the type code 9": changed(17, "<B", 9),
    "gives tokens the type float32": changed(17, "<B", 7),
    "has 139 bytes, but 6 sequences and 4 document entries need 138": lambda data: data.append(0),
    "has 33 bytes, fewer than its header of 34": lambda data: data.__delitem__(slice(33, None)),
    "gives sequence 1 a length of -1 tokens": changed(LENGTHS + 4, "<i", -1),
    "sequence 2 begin at byte 20, but the sequences before it end at byte 16": changed(
        STARTS + 16, "<q", 20
    ),
    r"d\.bin has 48 bytes, but the sequences of d\.idx need 52": changed(LENGTHS + 20, "<i", 3),
    "has documents from sequence 1 to 6": changed(ENTRIES, "<q", 1),
    "has documents from sequence 0 to 5": changed(ENTRIES + 24, "<q", 5),
    "document 1 end before it begins": changed(ENTRIES + 8, "<q", 5),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_each_fault_of_an_index_is_found_for_itself(sentence: str, tmp_path: Path) -> None:
    """Each fault of an index raises its own message.

    Documents have several sequences and there are no checksums. The index is also checked in small
    blocks.
    """
    prefix = write(tmp_path / "d", [[[1, 2], [3, 4]]] * 3, "int32")
    checksums_path(prefix).unlink()
    data = bytearray(index_path(prefix).read_bytes())
    FAULTS[sentence](data)
    index_path(prefix).write_bytes(data)
    for at_once in (2**22, 4, 1):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match=sentence):
            patch.setattr(indexed, "_AT_ONCE", at_once)
            IndexedFile(prefix)


def test_an_index_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_AT_ONCE", 2)
    documents = [[[n] * n] for n in range(1, 8)]
    prefix = write(tmp_path / "d", documents, "uint16")
    for _ in range(2):  # first with checksums, then without
        assert read(prefix) == documents
        checksums_path(prefix).unlink(missing_ok=True)
    data = bytearray(index_path(prefix).read_bytes())
    struct.pack_into(
        "<q", data, len(data) - 16, 7
    )  # the last document is now empty, and the document before it has two sequences
    index_path(prefix).write_bytes(data)
    with pytest.raises(DataError, match="its document 5 does not consist of one sequence"):
        IndexedFile(prefix)


def test_checksums_that_are_damaged_themselves(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[[1, 2]], [[3]]], "uint16")
    whole = checksums_path(prefix).read_bytes()
    for data in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-4], whole + whole[:4], b""):
        checksums_path(prefix).write_bytes(data)
        with pytest.raises(
            DataError, match=r"d\.crc32c is damaged, or contains the checksums of other files"
        ):
            IndexedFile(prefix)


def test_checksums_that_are_no_file(tmp_path: Path) -> None:
    """A pipe has no end, and a broken link is no missing file: the tokens would be unchecked."""
    path = checksums_path(write(tmp_path / "d", [[[1, 2]]], "uint16"))
    for place, part in (
        (os.mkfifo, "not a regular file"),
        (lambda link: link.symlink_to("lost"), "No such file"),
    ):
        path.unlink()
        place(path)
        with pytest.raises(DataError, match=rf"d\.crc32c cannot be read .*{part}"):
            IndexedFile(tmp_path / "d")


def test_multimodal_data_is_read_but_not_trained_on(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[[1, 2]], [[3, 4]]], "uint16")
    checksums_path(prefix).unlink()
    index_path(prefix).write_bytes(index_path(prefix).read_bytes() + b"\0\1")
    assert IndexedFile(prefix).modes.tolist() == [0, 1] and read(prefix) == [[[1, 2]], [[3, 4]]]
    with pytest.raises(DataError, match="contains multimodal data"):
        IndexedDocuments(prefix, vocab_size=10, eod_id=9)
