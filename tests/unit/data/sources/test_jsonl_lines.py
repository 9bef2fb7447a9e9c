"""Tests of reading raw lines (gzip, damage, long lines in bounded memory) and of expanding paths."""

import bz2
import gzip
import lzma
import os
import tracemalloc
import zipfile

import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.jsonl_lines import LineReader, expand_paths, file_identity


def read(path, **options):
    return [
        (line.number + n, line.data, line.reason)
        for line in LineReader(path, **options)
        for n in range(line.count)
    ]


def test_lines_of_plain_and_compressed_files_are_the_same(tmp_path):
    content = b"\xef\xbb\xbf{}\nsecond\r\n\n  \nlast without an end"
    expected = [(1, b"{}", None), (2, b"second", None), (3, b"", None), (4, b"", None)]
    expected.append((5, b"last without an end", None))
    # the name does not show that `packed` is compressed
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content[:9]) + gzip.compress(content[9:]))  # two members
    assert read(plain) == read(packed) == expected
    assert [line.is_blank for line in LineReader(plain)] == [False, False, True, False]


def test_empty_files_have_no_lines(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(gzip.compress(b""))
    assert read(tmp_path / "a") == read(tmp_path / "b") == []


@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_lines_across_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr("megatron_packed.data.sources.jsonl_lines._READ_BYTES", block)
    path = tmp_path / "a"
    lines = [b"x" * n for n in (0, 1, 6, 7, 8, 30, 0, 3)]
    path.write_bytes(b"\n".join(lines))
    assert [data for _, data, _ in read(path)] == lines


def test_blank_lines_in_a_row_are_one_step(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\n" * 1000 + b" \r\nx\n\n\n \n\nlast\n \n\n")
    found = [(line.number, line.data, line.count) for line in LineReader(path)]
    assert found == [
        (1, b"", 1001),
        (1002, b"x", 1),
        (1003, b"", 4),
        (1007, b"last", 1),
        (1008, b"", 2),
    ]


@pytest.mark.parametrize("damage", ["cut", "flip", "garbage behind"])
def test_damaged_gzip_ends_with_one_bad_line(tmp_path, damage):
    whole = bytearray(
        gzip.compress(
            os.urandom(1000) + b"\nsecond\nthird\n" + os.urandom(2**18).replace(b"\n", b".")
        )
    )
    if damage == "cut":
        whole = whole[:-20000]
    elif damage == "flip":
        whole[-6] ^= 1  # a bit of the checksum of the gzip member
    else:
        whole += b"not gzip"
    (tmp_path / "a.gz").write_bytes(whole)
    lines = read(tmp_path / "a.gz")
    assert [reason for _, _, reason in lines][-1] == "corrupt_gzip"
    assert [reason for _, _, reason in lines].count(None) == len(lines) - 1
    assert (lines[-3][1], lines[-2][1]) == (b"second", b"third")


def test_a_long_line_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "a.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"before\n" + bytes(64 * 2**20).replace(b"\0", b"x") + b"\nafter\n")
    tracemalloc.start()
    lines = read(path, max_line_bytes=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(number, reason) for number, _, reason in lines] == [
        (1, None),
        (2, "line_too_long"),
        (3, None),
    ]
    assert lines[1][1] == b"x" * 1024
    assert peak < 8 * 2**20


def test_the_limit_is_exact(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10 + b"\n" + b"x" * 11 + b"\n" + b"x" * 10)
    assert [reason for _, _, reason in read(tmp_path / "a", max_line_bytes=10)] == [
        None,
        "line_too_long",
        None,
    ]
    (tmp_path / "b").write_bytes(b' [{"text": "a data set that is one array, in one line"}]\n')
    assert [reason for _, _, reason in read(tmp_path / "b", max_line_bytes=10)] == ["json_array"]


def test_paths_are_files_directories_and_patterns(tmp_path):
    for name in (
        "b.jsonl",
        "a.jsonl.gz",
        "deep/c.jsonl",
        "x.txt",
        ".hidden/d.jsonl",
        "k.quarantine.jsonl",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(path.relative_to(tmp_path)) for path in expand_paths([tmp_path])]
    assert found == ["a.jsonl.gz", "b.jsonl", "deep/c.jsonl"]
    assert [
        path.name for path in expand_paths([str(tmp_path / "*.txt"), tmp_path / "b.jsonl"])
    ] == ["x.txt", "b.jsonl"]


def test_unusable_paths_are_refused_with_a_cure(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for paths, part in [
        ([], "no data path"),
        ([tmp_path / "missing.jsonl"], "does not exist"),
        ([tmp_path / "empty"], "contains no"),
        ([tmp_path / "*.gz"], "matches no file"),
        ([tmp_path / "pipe"], "not a regular file"),
        ([tmp_path / "dangling"], "cannot be read"),
        (["0.5", tmp_path / "a.jsonl"], "weights"),
        ([tmp_path / "a.jsonl", tmp_path / "empty" / ".." / "a.jsonl"], "twice"),
    ]:
        with pytest.raises(DataError, match=part):
            expand_paths(paths)


def test_identity_is_of_the_content(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"x" * 5000)
    second.write_bytes(b"x" * 5000)
    os.utime(second, (0, 0))
    assert file_identity(first) == file_identity(second)
    second.write_bytes(b"x" * 4999 + b"y")
    assert file_identity(first) != file_identity(second)
    monkeypatch.setattr("megatron_packed.data.sources.jsonl_lines._WHOLE_HASH_BYTES", 100)
    monkeypatch.setattr("megatron_packed.data.sources.jsonl_lines._SAMPLE_BYTES", 8)
    second.write_bytes(b"x" * 5000)
    os.utime(first, (0, 0))
    os.utime(second, (0, 0))
    assert file_identity(first) == file_identity(second)
    os.utime(second, (1, 1))
    assert file_identity(first) != file_identity(second)
    os.utime(second, (0, 0))
    second.write_bytes(b"x" * 4999 + b"y")
    os.utime(second, (0, 0))
    assert file_identity(first) != file_identity(second)


@pytest.mark.parametrize("name", ["bz2", "lzma", "zipfile", "zstd"])
def test_what_is_compressed_otherwise_is_no_damaged_text(name, tmp_path):
    """A file of another compression is an error of the run.

    As bad lines, one such file among many would stay below the allowed fraction.
    """
    file, text = tmp_path / "a.jsonl", b'{"text": "a"}\n' * 99
    if name == "zipfile":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a.jsonl", text)
    elif name == "zstd":  # Python has a zstd module only from 3.14 on
        file.write_bytes(b"\x28\xb5\x2f\xfd\x24\x0c" + text)
    else:
        file.write_bytes({"bz2": bz2, "lzma": lzma}[name].compress(text))
    with pytest.raises(DataError, match=r"a\.jsonl is compressed, but .* `(zstd|bzip2|xz|unzip) -"):
        expand_paths([file])
