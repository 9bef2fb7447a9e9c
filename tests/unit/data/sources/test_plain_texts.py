"""Tests of plain text files: one document each, in folders and by name."""

import gzip
import json

import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.line_schema import FIELDS
from megatron_packed.data.sources.source_files import expand_paths, reader_of
from megatron_packed.data.tokenizers.chat_format import IdentityFormat
from support.data_helpers import open_files, with_peak


def read(path, max_line_bytes=2**20):
    return list(reader_of(path, max_line_bytes, FIELDS))


def opened(paths, cache, **options):
    return open_files(paths, chat=IdentityFormat(), sft=False, cache_root=cache, **options)


def test_a_folder_of_texts_has_one_document_for_each_file(tmp_path):
    folder = tmp_path / "books"
    (folder / "b").mkdir(parents=True)
    texts = {"a.txt": "one\r\n\n{two}\n", "b/c.txt.gz": "[Illustration]\n\n“é”", "d.txt": " \n"}
    for name, text in texts.items():
        packed = gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()
        (folder / name).write_bytes(packed)
    said = []
    dataset = opened(expand_paths([folder], said.append), tmp_path / "cache")
    assert "3 files (a.txt, b/c.txt.gz, d.txt) read" in said[0]
    found = [bytes(dataset.document(n)[0][:-1].tolist()).decode() for n in range(len(dataset))]
    assert found == [texts["a.txt"], texts["b/c.txt.gz"]]
    assert (dataset.report.lines, dataset.report.blank) == (3, 1)


def test_texts_next_to_data_are_not_read(tmp_path):
    """A licence next to the data is no document."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "LICENSE.txt").write_text("Permission is granted\n")
    said = []
    assert expand_paths([tmp_path], said.append) == [tmp_path / "a.jsonl"]
    assert "1 file (LICENSE.txt) not read: text next to data" in said[0]
    assert expand_paths([tmp_path / "LICENSE.txt"]) == [tmp_path / "LICENSE.txt"]


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', "line"),
        ("\ufeff\n {'text': 'a'}", "line"),
        ('[{"text": "a"}]', "element"),
        ("[\n\n {}]", "element"),
        ("[]", "element"),
        ("[1] A note.", "file"),
        ("[Chorus]\nLa", "file"),
        ("a {}", "file"),
        ("", "file"),
    ],
)
def test_the_first_bytes_decide_how_a_named_text_is_read(tmp_path, start, kind):
    path = tmp_path / "a.txt"
    path.write_text(start, encoding="utf-8")
    assert {line.kind for line in read(path)} <= {kind}
    assert type(reader_of(path, 2**20, FIELDS)).__name__.startswith(
        "Text" if kind == "file" else "Line"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a\xff", "invalid_utf8"),
        ("a".encode("utf-16"), "invalid_utf8"),
        (b"a\0b", "nul_byte"),
        (b"x" * 101, "line_too_long"),
        (gzip.compress(b"abc" * 9, mtime=0)[:-9], "corrupt_stream"),
    ],
)
def test_unusable_texts_are_set_aside_whole(tmp_path, content, reason):
    bad, good = tmp_path / "bad.txt", tmp_path / "good.txt"
    bad.write_bytes(content)
    good.write_text("good")
    [line] = read(bad, 100)
    assert (line.reason, line.kind) == (reason, "file")
    dataset = opened([bad, good], tmp_path / "cache", max_line_bytes=100, max_bad_fraction=0.5)
    assert dataset.report.bad == {reason: 1} and dataset.report.good == 1
    [listed] = (tmp_path / "cache").glob("*.quarantine.jsonl")
    entry = json.loads(listed.read_text())
    assert (entry["file"], entry["reason"]) == (str(bad), reason)
    with pytest.raises(DataError, match=rf"{bad}: {reason}"):
        opened([bad, good], tmp_path / "cache", max_line_bytes=100, max_bad_fraction=0.1)


def test_reserved_characters_of_a_text_are_found(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\ufdd0")
    report = opened([path, *good_text(tmp_path)], tmp_path / "cache", max_bad_fraction=0.5).report
    assert report.bad == {"reserved_character": 1}


def good_text(tmp_path):
    path = tmp_path / "good.txt"
    path.write_text("good")
    return [path]


def test_a_long_text_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "a.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"word " * (12 * 2**20))
    [line], peak = with_peak(read, path, 2**20)
    assert line.reason == "line_too_long" and len(line.data) == 1024 and peak < 8 * 2**20
