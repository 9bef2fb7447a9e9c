"""Tests of raw lines (compression, damage, long lines in bounded memory) and of expanded paths."""

import bz2
import gzip
import lzma
import os
import random
import zipfile

import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.jsonl_lines import LineReader
from megatron_packed.data.sources.source_files import expand_paths, file_identity
from support.data_helpers import with_peak


def read(path, **options):
    return [
        (line.number + n, line.data, line.reason)
        for line in LineReader(path, **options)
        for n in range(line.num_lines)
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
    monkeypatch.setattr("megatron_packed.data.sources.compression._READ_BYTES", block)
    path = tmp_path / "a"
    lines = [b"x" * n for n in (0, 1, 6, 7, 8, 30, 0, 3)]
    path.write_bytes(b"\n".join(lines))
    assert [data for _, data, _ in read(path)] == lines


def test_blank_lines_in_a_row_are_one_step(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\n" * 1000 + b" \r\nx\n\n\n \n\nlast\n \n\n")
    found = [(line.number, line.data, line.num_lines) for line in LineReader(path)]
    assert found == [
        (1, b"", 1001),
        (1002, b"x", 1),
        (1003, b"", 4),
        (1007, b"last", 1),
        (1008, b"", 2),
    ]


@pytest.mark.parametrize("damage", ["cut", "flip", "garbage behind"])
def test_damaged_gzip_ends_with_one_bad_line(tmp_path, damage):
    noise = random.Random(0).randbytes(2**18).replace(b"\n", b".")  # gzip cannot shorten it
    whole = bytearray(gzip.compress(b"first\nsecond\nthird\n" + noise))
    if damage == "cut":
        whole = whole[:-20000]
    elif damage == "flip":
        whole[-6] ^= 1  # a bit of the checksum of the gzip member
    else:
        whole += b"not gzip"
    (tmp_path / "a.gz").write_bytes(whole)
    lines = read(tmp_path / "a.gz")
    assert [reason for _, _, reason in lines][-1] == "corrupt_stream"
    assert [reason for _, _, reason in lines].count(None) == len(lines) - 1
    assert (lines[-3][1], lines[-2][1]) == (b"second", b"third")


def test_a_long_line_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "a.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"before\n" + bytes(64 * 2**20).replace(b"\0", b"x") + b"\nafter\n")
    lines, peak = with_peak(read, path, max_line_bytes=2**20)
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


def test_paths_are_files_directories_and_patterns(tmp_path):
    """A directory stands for its data files; JSON files that describe the data are left out."""
    data = {
        "a.jsonl.gz": "",
        "b.jsonl": "",
        "deep/array.json": '\n[{"x": 1}]',
        "deep/c.jsonl": "",
        "lines.json": '{"x": 1}\n{"x": 2}\n',
        "one_line.json": '{"text": "x"}',
        "p.ndjson.xz": "",
    }
    others = {
        "README.md": "",
        ".hidden/d.jsonl": "",
        "k.quarantine.jsonl": "",
        "dataset_infos.json": '{"default": {"features": {}}}',
        "config.json": '{\n "model_type": "x",\n "text": 1\n}',
    }
    for name, text in {**data, **others}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    said = []
    found = [str(path.relative_to(tmp_path)) for path in expand_paths([tmp_path], said.append)]
    assert found == list(data)
    assert said == [
        f"{tmp_path}: 7 files (a.jsonl.gz, b.jsonl, deep/array.json, deep/c.jsonl, lines.json and 2 more) read; "
        "2 files (config.json, dataset_infos.json) not read: no list of examples"
    ]
    assert [path.name for path in expand_paths([str(tmp_path / "*.md"), tmp_path / "b.jsonl"])] == [
        "README.md",
        "b.jsonl",
    ]


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


@pytest.mark.parametrize("name", ["b.jsonl", "b.json", "sub/b.jsonl.gz"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_data_of_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, name, kind):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "sub").mkdir()
    path = tmp_path / name
    path.symlink_to(tmp_path / "nothing") if kind == "link" else os.mkfifo(path)
    with pytest.raises(DataError, match="cannot be read" if kind == "link" else "not a regular"):
        expand_paths([tmp_path])


def test_identity_is_of_the_content(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"x" * 5000)
    second.write_bytes(b"x" * 5000)
    os.utime(second, (0, 0))
    assert file_identity(first) == file_identity(second)
    second.write_bytes(b"x" * 4999 + b"y")
    assert file_identity(first) != file_identity(second)
    monkeypatch.setattr("megatron_packed.data.sources.source_files._WHOLE_HASH_BYTES", 100)
    monkeypatch.setattr("megatron_packed.data.sources.source_files._SAMPLE_BYTES", 8)
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


def compressed(text, name):
    if name == "zst":
        return pytest.importorskip("pyarrow").Codec("zstd").compress(text, asbytes=True)
    return {"gz": gzip, "bz2": bz2, "xz": lzma}[name].compress(text)


@pytest.mark.parametrize("name", ["gz", "bz2", "xz", "zst"])
def test_every_compression_gives_the_same_lines_and_reports_damage(name, tmp_path, monkeypatch):
    """Several streams in a file are read as one; a cut or changed stream gives one bad line."""
    lines = [b'{"text": "%d"}' % number for number in range(9000)]
    half = b"\n".join(lines[:4000]) + b"\n"
    streams = [compressed(half, name), compressed(b"\n".join(lines[4000:]), name)]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(streams))
    assert [data for _, data, _ in read(file)] == lines
    monkeypatch.setattr("megatron_packed.data.sources.compression._INPUT_BYTES", 7)
    assert [data for _, data, _ in read(file)] == lines
    for damaged in (streams[0][:-3], streams[0] + streams[1][:50], streams[0] + b"garbage"):
        file.write_bytes(damaged)
        *good, (number, _, reason) = read(file)
        assert reason == "corrupt_stream"
        assert [data for _, data, _ in good] == lines[: number - 1]


def test_a_file_of_zeros_after_its_magic_expands_in_bounded_memory(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(lzma.compress(b"before\n" + bytes(64 * 2**20) + b"\nafter", preset=0))
    lines, peak = with_peak(read, path, max_line_bytes=2**20)
    reasons = [reason for _, _, reason in lines]
    assert reasons == [None, "line_too_long", None] and peak < 8 * 2**20


def test_files_that_this_machine_cannot_decompress_are_refused(tmp_path, monkeypatch):
    """As bad lines, one such file among many would stay below the allowed fraction."""
    archive, packed = tmp_path / "a.zip", tmp_path / "b.jsonl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.jsonl", '{"text": "a"}\n')
    packed.write_bytes(b"\x28\xb5\x2f\xfd\x24\x0c")
    monkeypatch.setattr("megatron_packed.data.sources.compression.reads_zstd", lambda: False)
    for path, part in [(archive, r"`unzip -p \S+/a\.zip \|"), (packed, "pip install 'megatron-")]:
        with pytest.raises(DataError, match=rf"{path.name} is .*{part}"):
            expand_paths([path])
