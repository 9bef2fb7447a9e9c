"""Tests of Parquet and Arrow: the same documents as from JSONL, numbers of bad rows, bounded
memory, and unusable files.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_packed.config.data_fields import DataFields, pairs_of
from megatron_packed.config.path_checks import _input_data
from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.index.preprocess import PreprocessOptions, preprocess
from megatron_packed.data.sources.line_schema import FIELDS, parse_line
from megatron_packed.data.sources.source_files import expand_paths
from megatron_packed.data.sources.table_rows import RowReader
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.chat_format import IdentityFormat
from support.data_helpers import conversation, open_files
from support.json_lines import read_lines, write_lines
from support.messages import assistant, user

CONVERSATIONS = [json.loads(conversation("q", "a" * n)) for n in range(1, 400)]
CONVERSATIONS[3]["messages"].append(assistant("not learned", train=False))
SHAREGPT = [
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 7}
] * 3
ALPACA = [{"instruction": "q", "input": None, "output": "a"}] * 3
PROMPTS = [{"prompt": "q", "completion": "é"}] * 3
TEXTS = [{"text": "é" * n} for n in range(1, 9)]


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow")


def write(pa, path, rows, kind, **options):
    """Write ``rows`` as a file of the given kind.

    The kind "saved" writes two files, as ``save_to_disk`` of Hugging Face's datasets does.
    """
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    if kind == "parquet":
        from pyarrow import parquet

        parquet.write_table(table, path, row_group_size=100, **options)
    elif kind == "saved":
        path.mkdir(parents=True)
        names = ["b.arrow", "a.arrow"]  # state.json defines the order of the files
        middle = len(table) // 2
        for name, part in zip(names, (table[:middle], table[middle:])):
            write(pa, path / name, part, "stream")
        (path / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": name} for name in names]})
        )
    else:
        make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=90)
    return path


def opened(path, cache, sft=True, **options):
    return open_files([path], chat=IdentityFormat(), sft=sft, cache_root=cache, **options)


@pytest.mark.shows("Data", lambda kind: "Parquet" if kind == "parquet" else "Hugging Face data set")
@pytest.mark.parametrize("kind", ["parquet", "file", "stream", "saved"])
@pytest.mark.parametrize("rows", [CONVERSATIONS, SHAREGPT, ALPACA, PROMPTS, TEXTS], ids="csapt")
def test_documents_are_those_of_the_same_lines(pa, tmp_path, kind, rows):
    lines = tmp_path / "a.jsonl"
    write_lines(lines, rows)
    first = opened(lines, tmp_path / "cache", rows is not TEXTS)
    second = opened(
        write(pa, tmp_path / "table", rows, kind), tmp_path / "cache", rows is not TEXTS
    )
    assert second.content_hash == first.content_hash and second.key != first.key
    same = replace(second.report, files=1, notes=first.report.notes)
    assert same == first.report and second.report.files == 1 + (kind == "saved")


def test_fields_of_a_table_with_other_names(pa, tmp_path):
    """Only the named columns are read, and a null answer is an empty answer."""
    fields = DataFields.from_pairs(pairs_of(["prompt=qa.question,completion=answers.text"]))
    rows = [
        {"qa": {"question": "q", "id": 1}, "answers": answers, "text": "unused", "n": 1}
        for answers in ({"text": ["a", "b"]}, {"text": []}, {"text": None}, None)
    ]
    for kind in ("parquet", "file", "stream"):
        path = write(pa, tmp_path / kind, rows, kind)
        dataset = opened(path, tmp_path / "cache", fields=fields)
        tokens, targets = dataset.document(0)
        assert bytes(tokens[:-1].tolist()) == b"qa\nb" and targets.tolist() == [0, 1, 1, 1, 1]
        assert dataset.report.empty == {"empty_completion": 3} and len(dataset) == 1
        assert all(b"unused" not in line.data for line in RowReader(path, 2**20, FIELDS, fields))
        wrong = DataFields.from_pairs(pairs_of(["prompt=qa.question,completion=answer"]))
        with pytest.raises(
            DataError, match=r"no such column; .* qa, answers, text, n; did you mean"
        ):
            opened(path, tmp_path / "cache", fields=wrong)
    path = write(
        pa, tmp_path / "p", [{"prompt": "q", "completion": a} for a in ("a", None)], "file"
    )
    assert opened(path, tmp_path / "cache").report.empty == {"empty_completion": 1}


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_columns_that_are_not_read_are_listed(pa, tmp_path, kind):
    """Columns of tokens are read only where no other column decides the schema."""
    row = {"text": "t", "id": 1, "input_ids": [1, 2], "label": True, "labels": [1, 2]}
    reader = RowReader(write(pa, tmp_path / kind, [row], kind), 2**20, FIELDS)
    assert [json.loads(line.data) for line in reader] == [{"text": "t", "label": True}]
    assert reader.unread_columns == ("id", "input_ids", "labels")
    del row["text"]
    reader = RowReader(write(pa, tmp_path / "tokens", [row], kind), 2**20, FIELDS)
    assert [json.loads(line.data) for line in reader] == [
        {"input_ids": [1, 2], "label": True, "labels": [1, 2]}
    ]
    assert reader.unread_columns == ("id",)
    fields = DataFields.from_pairs(pairs_of(["text=id"]))
    chosen = RowReader(write(pa, tmp_path / "chosen", [row], kind), 2**20, FIELDS, fields)
    assert len(list(chosen)) == 1 and chosen.unread_columns == ()


@pytest.mark.parametrize(
    "rows",
    [
        [
            {
                "messages": [
                    user("q"),
                    assistant(None),
                ]
            },
            {"messages": [assistant("a", train=False)], "tools": None},
        ],
        [
            {"conversations": [{"from": "gpt", "value": None}]},
            {"conversations": [{"from": "gpt", "value": "a", "weight": 0, "name": "Ada"}]},
        ],
        [
            {
                "tools": [{"name": "f", "content": None}],
                "messages": [assistant("a")],
            },
            {"tools": [{"name": "g", "content": {"type": "x"}}], "messages": []},
        ],
    ],
    ids=["messages", "sharegpt", "tools"],
)
def test_nulls_mean_the_same_in_rows_and_in_lines(pa, tmp_path, rows):
    """A table has each field of one message in all messages, and an empty answer is null there."""
    table = pa.Table.from_pylist(rows)
    path = write(pa, tmp_path / "a", table, "parquet")
    outcomes = []
    for lines in (
        [line.data for line in RowReader(path, 2**20, FIELDS)],
        [json.dumps(row).encode() for row in table.to_pylist()],  # as `to_json` of datasets
    ):
        of_lines = []
        for line in lines:
            try:
                of_lines.append(parse_line(line))
            except BadLine as bad:
                of_lines.append(str(bad))
        outcomes.append(of_lines)
    assert outcomes[0] == outcomes[1]
    assert str(outcomes[0]).count("empty_") == 1


def test_elements_of_a_list_column_make_documents(pa, tmp_path):
    rows = [{"qa": [{"q": "one", "a": "1"}, {"q": "two", "a": "2"}], "id": 1}]
    fields = DataFields.from_pairs(pairs_of(["prompt=qa[*].q,completion=qa[*].a"]))
    dataset = opened(write(pa, tmp_path / "a", rows, "parquet"), tmp_path / "cache", fields=fields)
    assert (dataset.report.lines, len(dataset)) == (1, 2)
    assert bytes(dataset.document(1)[0][:-1].tolist()) == b"two2"


def test_a_table_with_only_optional_columns_is_refused_with_all_its_columns(pa, tmp_path):
    """SQuAD has a column `context`, but no column that decides a schema."""
    row = {"context": "c", "question": "q", "answers": {"text": ["a"]}}
    path = write(pa, tmp_path / "squad", [row], "parquet")
    with pytest.raises(
        DataError, match=r"columns context, question, answers, but .* conversations,"
    ):
        opened(path, tmp_path / "cache")


def test_bad_rows_are_set_aside_by_file_and_row(pa, tmp_path):
    texts = [b"good"] * 300
    texts[130], texts[200], texts[299] = b"\xff", b" ", None
    binary = pa.array(texts, pa.binary())
    rows = pa.table({"text": binary.view(pa.string()), "n": range(300)})
    for kind, table in [("parquet", rows.set_column(0, "text", binary)), ("stream", rows)]:
        path = write(pa, tmp_path / kind, table, kind)
        report = opened(path, tmp_path / "cache", sft=False, max_bad_fraction=0.1).report
        assert (report.lines, report.good) == (300, 297)
        [listed] = (tmp_path / "cache").glob("*.quarantine.jsonl")
        found = read_lines(listed)
        reasons = [(131, "invalid_utf8"), (201, "empty_text"), (300, "no_known_field")]
        assert [(entry["row"], entry["reason"]) for entry in found] == reasons
        assert {entry["file"] for entry in found} == {str(path)}
        listed.unlink()


def test_a_table_is_never_in_memory_as_a_whole(pa, tmp_path):
    rows = pa.table(
        {"text": [f"{n:06d}" + "x" * 4000 for n in range(10_000)], "unused": ["y" * 4000] * 10_000}
    )
    path = tmp_path / "a.parquet"
    from pyarrow import parquet

    parquet.write_table(
        rows, path, compression="none", use_dictionary=False
    )  # the file has one row group
    del rows
    before = pa.total_allocated_bytes()
    reader, most, count = RowReader(path, 2**20, FIELDS), 0, 0
    for line in reader:
        count += 1
        most = max(most, pa.total_allocated_bytes() - before)
        assert line.data.startswith(b'{"text": "%06dx' % (line.number - 1)) and line.kind == "row"
    assert count == 10_000 and most < 16 * 2**20  # the table has 80 MB
    assert reader.bytes_read == path.stat().st_size
    [line, *_] = RowReader(path, 100, FIELDS)
    assert line.reason == "line_too_long"


def test_damage_is_an_error_of_the_run(pa, tmp_path):
    for kind in ("parquet", "file", "stream"):
        checked = {"write_page_checksum": True} if kind == "parquet" else {}
        path = write(pa, tmp_path / kind, CONVERSATIONS, kind, **checked)
        content = path.read_bytes()
        changed = [content[:300] + bytes(30) + content[330:]] if checked else []
        for damaged in (content[: len(content) // 2], *changed):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=f"{kind} is damaged or cut off"):
                list(RowReader(path, 2**20, FIELDS))
    path = write(pa, tmp_path / "named", [{"words": "a"}], "parquet")
    with pytest.raises(DataError, match="has the columns words, but needs at least one of"):
        list(RowReader(path, 2**20, FIELDS))


def test_preprocess_reads_its_keys(pa, tmp_path):
    rows = [{"text": "t" * n, "title": f"{n}"} for n in range(1, 1200)]
    made = []
    for name, kind, workers in (("a", "parquet", 1), ("b", "saved", 2)):
        files = expand_paths([write(pa, tmp_path / name, rows, kind)])
        options = PreprocessOptions(keys=("title", "text"), workers=workers, show_progress=False)
        report, names = preprocess(files, tmp_path / f"out_{name}", ByteTokenizer, options)
        assert (report.good, report.documents) == (1199, 2398)
        made.append([Path(f"{name}.bin").read_bytes() for name in names])
    assert made[0] == made[1] and made[0][1][:6] == b"t\0t\0t\0"


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_damaged_name_of_an_arrow_column_is_an_error_of_the_run(pa, tmp_path, kind):
    path, table = tmp_path / "a.arrow", pa.table({"text": ["a"], "other": ["b"]})
    with getattr(pa.ipc, f"new_{kind}")(str(path), table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(path.read_bytes().replace(b"other", b"\xff\xfeher"))
    with pytest.raises(DataError, match=r"a\.arrow is damaged or cut off \('utf-8' codec can't"):
        list(RowReader(path, 1000, FIELDS))


def test_a_directory_that_vanishes_while_it_is_listed_is_an_error_with_a_cure(
    tmp_path, monkeypatch
):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "sub").mkdir()
    scandir = os.scandir

    def vanishing(path):
        if str(path).endswith("sub"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    with pytest.raises(
        DataError,
        match=r"cannot be listed: .*sub: No such file or directory; give a directory that",
    ):
        expand_paths([tmp_path])


def test_directories(tmp_path, monkeypatch):
    """The files of a saved data set are found without pyarrow, and damaged descriptions raise
    errors.
    """
    split = tmp_path / "saved" / "train"
    split.mkdir(parents=True)
    (split / "data-0.arrow").write_bytes(b"{}")
    (split / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    splits = tmp_path / "saved" / "dataset_dict.json"
    splits.write_text('{"splits": ["train"]}')
    assert expand_paths([split.parent]) == expand_paths([split]) == [split / "data-0.arrow"]
    splits.write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError,
        match=r"contains the splits train, test; give the path of one split, for example .*saved/train",
    ):
        expand_paths([split.parent])
    os.truncate(split / "state.json", 2**40)
    monkeypatch.setattr("megatron_packed.data.sources.table_rows._MOST_BYTES", 1000)
    with pytest.raises(DataError, match=r"state\.json is damaged"):
        expand_paths([split])
    for state in (
        '{"_data_files": [{"filename": "a\\u0000b"}]}',
        "{",
        "[]",
        "{}",
        '{"_data_files": []}',
        '{"_data_files": [{"filename": "../a"}]}',
    ):
        (split / "state.json").write_text(state)
        with pytest.raises(DataError, match="save the data set again"):
            expand_paths([split])


def test_without_pyarrow_the_cure_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("megatron_packed.data.sources.table_rows.find_spec", lambda name: None)
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")
    for path in (file, tmp_path, tmp_path / "*.parquet"):
        rule, cure = _input_data("--data-path", str(path))
        assert (
            rule == "needs pyarrow, which is not installed"
            and "pip install 'megatron-packed[data]'" in cure
        )
        with pytest.raises(
            DataError, match=r"a.parquet needs pyarrow, which is not installed; run `pip install"
        ):
            expand_paths([path])


def test_a_huge_row_is_skipped_in_bounded_memory(pa, tmp_path):
    from pyarrow import parquet

    size = 96 * 2**20
    table = pa.table({"text": ["before", "x" * size, "after"]})
    parquet.write_table(table, tmp_path / "r.parquet", compression="zstd")
    del table
    program = (
        "import re, sys; from pathlib import Path; from megatron_packed.data.sources.table_rows import RowReader\n"
        "from pyarrow import parquet; status = Path('/proc/self/status')\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', status.read_text())[1]) * 1024\n"
        "before = peak(); lines = list(RowReader(Path(sys.argv[1]), 2**20, ['text']))\n"
        "print([line.reason for line in lines], peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "r.parquet")], capture_output=True, text=True
    )
    reasons, _, grown = done.stdout.strip().rpartition(" ")
    assert reasons == "[None, 'line_too_long', None]", done.stderr
    assert (
        int(grown) < 3.5 * size
    )  # pyarrow's page and column take 3 times the size; text and JSON of the row would take 6 times


def test_rows_are_taken_in_fewer_at_once_where_they_are_long(pa, tmp_path, monkeypatch):
    rows = [{"text": "x" * 100_000}] * 64
    path = write(pa, tmp_path / "r.parquet", rows, "parquet", use_dictionary=False)
    reader = RowReader(path, 2**20, ["text"])
    sizes = [len(batch) for batch in reader._batches()]
    assert max(sizes) == 10 and sum(sizes) == 64 and len(list(reader)) == 64
