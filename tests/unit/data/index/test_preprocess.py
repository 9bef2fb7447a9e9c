"""Tests of the conversion of JSONL to indexed data sets: counts are exact for bad lines of all
kinds, and the files do not depend on the number of workers.
"""

import gzip
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_packed.config.data_fields import DataFields
from megatron_packed.data.errors import DataError
from megatron_packed.data.index.indexed_file import IndexedFile
from megatron_packed.data.index.preprocess import PreprocessOptions, preprocess
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.encode import check_tokens
from support.data_helpers import sequence_of

END = ByteTokenizer.eod_id
BAD = {
    b'{"text": "half a li': "malformed_json",
    b'{"text": "a\xff"}': "invalid_utf8",
    b'{"text": "\0"}': "nul_byte",
    b"[1, 2]": "not_an_object",
    b'{"other": "a"}': "missing_key",
    b'{"text": null}': "wrong_type",
    b'{"text": " "}': "empty_text",
    b'{"text": "a", "text": "b"}': "duplicate_key",
    b'{"text": NaN}': "nan_literal",
    b"[" * 100_000: "too_deep",
    b'{"text": "\\ud800"}': "lone_surrogate",
    b'{"n": ' + b"9" * 5000 + b', "text": "a"}': "huge_number",
    b'{"text": "' + b"x" * 2**17 + b'"}': "line_too_long",
}
"""Lines that cannot be used, each with its reason."""


class Hostile(ByteTokenizer):
    """Tokenizer that raises an error, kills its process or never ends for certain texts."""

    def encode(self, text: str, *, special: bool = False):
        if text == "panic":
            raise BaseException("a panic")
        if text == "kill":
            os._exit(9)
        if text == "hang":
            time.sleep(1000)
        return super().encode(text, special=special)


def write_lines(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def documents(prefix: str) -> list[list[int]]:
    file = IndexedFile(prefix)
    assert file.num_documents == len(file)
    return [sequence_of(file, number).tolist() for number in range(len(file))]


def made(files: list[Path], prefix: Path, tokenizer=ByteTokenizer, **options):
    options = {
        "max_bad_fraction": 1.0,
        "show_progress": False,
        "max_line_bytes": 2**17,
        "append_eod": True,
        **options,
    }
    return preprocess(files, prefix, tokenizer, PreprocessOptions(**options))


def test_fuzzed_lines_are_counted_exactly(tmp_path: Path) -> None:
    draw, lines, counts, texts, blank = random.Random(3), [], Counter(), [], 0
    for number in range(3000):
        kind = draw.random()
        if kind < 0.5:
            texts.append(f"line {number} Ω\u2028😀"[: draw.randrange(1, 20)])
            lines.append(
                json.dumps({"text": texts[-1], "id": number}, ensure_ascii=number % 2 == 0).encode()
            )
        elif kind < 0.6:
            blank += 1
            lines.append(draw.choice([b"", b" \t", b"\r"]))
        else:
            line, reason = draw.choice([*BAD.items()])
            counts[reason] += 1
            lines.append(line)
    first = write_lines(tmp_path / "a.jsonl", lines[:2000])
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(b"\n".join(lines[2000:])))
    report, [name] = made([first, second], tmp_path / "out" / "one")
    assert (report.lines, report.blank, report.good) == (3000, blank, len(texts))
    assert {**report.bad, **report.empty} == counts and set(report.empty) == {"empty_text"}
    assert documents(name) == [[*text.encode(), END] for text in texts]
    assert report.tokens == IndexedFile(name).num_tokens and report.documents == len(texts)
    listed = [
        json.loads(line)
        for line in (tmp_path / "out" / "one.quarantine.jsonl").read_text().splitlines()
    ]
    assert Counter(entry["reason"] for entry in listed) == counts
    where = [(entry["file"], entry["line"], entry["reason"]) for entry in listed]
    every = [(str(first), number) for number in range(1, 2001)] + [
        (str(second), number) for number in range(1, 1001)
    ]
    assert where == [(*place, BAD[line]) for place, line in zip(every, lines) if line in BAD]
    sizes = [len(text.encode()) + 1 for text in texts]
    assert (report.tokens, report.target_tokens) == (sum(sizes), sum(sizes) - len(sizes))
    again, [other] = made([first, second], tmp_path / "out" / "two", workers=2)
    assert again == report
    for suffix in (".bin", ".idx", ".crc32c"):
        assert Path(other + suffix).read_bytes() == Path(name + suffix).read_bytes()


def test_a_line_that_kills_or_hangs_its_worker_is_set_aside(tmp_path: Path) -> None:
    texts = ["one", "panic", "two", "kill", "three", "hang", "four"]
    files = [
        write_lines(tmp_path / f"{n}.jsonl", [json.dumps({"text": text}).encode() for text in part])
        for n, part in enumerate((texts, ["five"], ["kill"], ["six"] * 3))
    ]
    report, [name] = made(files, tmp_path / "out", Hostile, workers=2, line_seconds=1.0)
    assert report.bad == {"tokenizer_failed": 1, "killed_worker": 3}
    assert report.longest_document == len("three") + 1  # 'three' is in the first chunk
    found = [bytes(ids[:-1]).decode() for ids in documents(name)]
    assert found == ["one", "two", "three", "four", "five", "six", "six", "six"]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_element_of_a_list_is_a_document(tmp_path: Path, workers: int) -> None:
    """Lines are counted apart from documents, and one bad element makes its line bad."""
    pages = [["ab", "c"], ["d"], ["e", " "], ["f", 3]]
    lines = [json.dumps({"pages": [{"t": text} for text in of_line]}).encode() for of_line in pages]
    fields = DataFields.from_pairs([("text", "pages[*].t")])
    file = write_lines(tmp_path / "a.jsonl", lines)
    report, [name] = made([file], tmp_path / "out", fields=fields, workers=workers)
    assert documents(name) == [[*b"ab", END], [*b"c", END], [*b"d", END]]
    assert (report.lines, report.good, report.documents, report.target_tokens) == (4, 2, 3, 4)
    assert {**report.bad, **report.empty} == {"empty_text": 1, "wrong_type": 1}


def test_keys_and_end_of_document(tmp_path: Path) -> None:
    line = json.dumps({"title": "t", "text": "abc"}).encode()
    file = write_lines(tmp_path / "a.jsonl", [line, b'{"title": "u"}', line])
    report, names = made([file], tmp_path / "out", keys=("title", "text"), append_eod=False)
    assert [documents(name) for name in names] == [[[*b"t"]] * 2, [[*b"abc"]] * 2]
    assert (report.good, report.documents, report.tokens, report.bad) == (
        2,
        4,
        8,
        {"missing_key": 1},
    )
    assert [Path(name).name for name in names] == ["out_title_document", "out_text_document"]


def test_too_many_bad_lines_leave_nothing(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [b'{"text": "a"}', *[b"x"] * 9])
    with pytest.raises(DataError, match="9 of 10 lines are unusable"):
        made([file], tmp_path / "out", max_bad_fraction=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.quarantine.jsonl"]


def test_tokens_beside_the_vocabulary_are_refused() -> None:
    tokenizer = ByteTokenizer()
    check_tokens(np.array([0, tokenizer.vocab_size - 1], np.int32), tokenizer)
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match="but its vocabulary has"):
            check_tokens(np.array([5, wrong, 6], np.int32), tokenizer)
