"""Records in memory give the packs, the report and the states of a file with the same lines."""

import os
import threading
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_packed.data.errors import DataError
from megatron_packed.data.packed_dataset import PackedDataset
from megatron_packed.data.records import write_records
from megatron_packed.data.tokenizers.base import ByteTokenizer
from support.json_lines import read_lines, write_lines

CACHE = ".megatron_packed_cache"
TEXTS = [{"text": f"{number:02d}" + "x" * (7 * number % 50)} for number in range(30)]
CHATS = [
    {
        "conversations": [
            {"from": "human", "value": f"what comes after {number}?"},
            {"from": "gpt", "value": f"{number + 1}"},
        ]
    }
    for number in range(9)
]
IDS = [[65 + number, 66, 67] for number in range(7)]


class Table:
    """Stand-in for a data set of Hugging Face's ``datasets``: its rows have every column."""

    def __init__(self, rows, column_names=None):
        self.rows = rows
        names = dict.fromkeys(name for row in rows for name in row)
        self.column_names = list(names) if column_names is None else column_names

    def __len__(self):
        return len(self.rows)

    def select_columns(self, names):
        return Table(self.rows, names)

    def __iter__(self):
        for row in self.rows:
            assert "image" not in self.column_names, "decoded a column that is not read"
            yield {name: row.get(name) for name in self.column_names}


class Stream(Table):
    """Stand-in for an ``IterableDataset``: without a length, and perhaps without column names."""

    __len__ = None  # type: ignore[assignment]

    def __init__(self, rows):
        super().__init__(rows)
        self.column_names = None

    def __iter__(self):
        yield from self.rows


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dataset_of(data, **options):
    return PackedDataset(
        data, ByteTokenizer(), **{"tokens_per_pack": 128, "show_progress": False, **options}
    )


def contents(dataset):
    return [[*pack.tokens.tolist(), *pack.loss_mask.tolist()] for pack in dataset]


def file_of(lines, name="lines.jsonl"):
    write_lines(Path(name), lines)
    return name


@pytest.mark.parametrize("kind", [list, tuple, iter, Table, Stream])
@pytest.mark.parametrize("lines", [TEXTS, CHATS], ids=["texts", "chats"])
def test_records_are_packed_as_the_lines_of_a_file(kind, lines):
    """Packs, report and state are those of the file, for every kind of collection."""
    options = {"sft": lines is CHATS}
    file = dataset_of(file_of(lines), **options)
    dataset = dataset_of(kind(lines), **options)
    assert contents(dataset) == contents(file)
    assert dataset.sentences() == file.sentences()
    dataset.load_state_dict(file.state_dict(1))
    assert contents(dataset) == contents(file)[1:]
    with pytest.raises(ValueError, match="the state belongs to other packs"):
        dataset_of(kind(lines[1:]), **options).load_state_dict(file.state_dict(1))


def test_equal_records_share_one_file():
    """The file is in the current directory or in cache_dir, and it is no data of a directory."""
    for data in (TEXTS, iter(TEXTS), Table(TEXTS)):
        dataset_of(data)
    [file] = Path(CACHE).glob(".records-*")
    assert read_lines(file) == TEXTS
    time_of_first = file.stat().st_mtime_ns
    dataset_of(TEXTS, cache_dir="data")
    assert len(list(Path("data").glob(".records-*.jsonl"))) == 1
    assert file.stat().st_mtime_ns == time_of_first
    with pytest.raises(DataError, match="data contains no"):
        dataset_of("data")


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, tuple])
def test_token_ids_are_documents(kind):
    """Lists, arrays and tensors of token ids are used as they are, without an end of document."""
    packs = list(dataset_of([kind(ids) for ids in IDS]))
    [pack] = packs
    ends = pack.packed.cu_seqlens[: pack.packed.num_seqs + 1].tolist()
    found = [pack.tokens[start:end].tolist() for start, end in pairwise(ends)]
    assert sorted(found) == IDS
    assert contents(dataset_of(np.array(IDS))) == contents(packs)
    assert contents(dataset_of(Table([{"input_ids": kind(ids)} for ids in IDS]))) == contents(packs)


def test_labels_of_token_ids_are_targets():
    """Tokens with the label -100 are not learned."""
    record = {"input_ids": np.array([65, 66, 67]), "labels": torch.tensor([-100, 66, -100])}
    [pack] = dataset_of([record], sft=True)
    assert pack.labels[pack.loss_mask > 0].tolist() == [66]


def test_strings_are_paths_unless_they_are_texts():
    """A list of strings names files; with texts=True it is the same as records with `text`."""
    texts = [record["text"] for record in TEXTS]
    path = Path(file_of(TEXTS))
    expected = contents(dataset_of(TEXTS))
    assert contents(dataset_of(texts, texts=True)) == expected
    for paths in (path, str(path), [str(path)], iter([path]), [str(path.resolve())], "line*.jsonl"):
        assert contents(dataset_of(paths)) == expected
    for wrong in (texts, ["What comes after 3?"], ["word"], ["long " * 2000], "a\nb"):
        with pytest.raises(DataError, match=r"does not exist.* A string is a path: .* texts=True"):
            dataset_of(wrong)


def test_only_columns_that_are_read_are_decoded():
    """A data set gives the columns of the schemas or of data_fields, and its nulls are absent."""
    rows = [{"text": "a b", "image": b"png", "system": None}] * 3
    dataset = dataset_of(Table(rows))
    assert contents(dataset) == contents(dataset_of([{"text": "a b"}] * 3))
    assert "fields that are not read: image (3)" in "\n".join(dataset.sentences())
    rows = [{"q": "why", "a": "so", "image": b"png"}, {"q": "why", "a": None}]
    fields = {"prompt": "q", "completion": "a"}
    dataset = dataset_of(Table(rows), sft=True, data_fields=fields)
    assert "1 used (1 prompt/completion), 0 blank, 1 empty" in dataset.sentences()[0]
    with pytest.raises(DataError, match="prompt=question: the data set has no such column"):
        dataset_of(Table(rows), sft=True, data_fields={**fields, "prompt": "question"})
    nulls = [{"messages": [{"role": "user", "content": "a", "tool_calls": None}] * 2}]
    nulls[0]["messages"][1] = {"role": "assistant", "content": "b", "train": None}
    [pack] = dataset_of(Table(nulls), sft=True)
    assert pack.num_target_tokens > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_spawned_workers_and_ranks_read_the_records(world_size):
    """A spawned worker opens the file; its pickle does not contain the records."""
    packs = contents(dataset_of(iter(TEXTS)))
    found = []
    for rank in range(world_size):
        dataset = dataset_of(iter(TEXTS), rank=rank, world_size=world_size)
        workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if rank == 0 else {}
        found.append(contents(DataLoader(dataset, batch_size=None, **workers)))
    assert [pack for both in zip(*found) for pack in both][: len(packs)] == packs


def test_many_writers_at_once_leave_one_complete_file(folder):
    """Writers of the same records end with one file and no temporary file."""
    barrier, found = threading.Barrier(6), []

    def write():
        barrier.wait()
        records = ({"text": "x" * 5000, "n": n} for n in range(600))
        found.append(write_records(records, folder, texts=False, count=None, show=False))

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 1 and len(found) == 6
    assert list(folder.iterdir()) == [found[0]]
    assert len(found[0].read_text().splitlines()) == 600


def test_a_damaged_file_is_replaced_and_old_temporary_files_go(folder):
    """A file of another content under the name, and the files of killed writers, do not stay."""

    def write():
        return write_records(TEXTS, folder, texts=False, count=None, show=False)

    file = write()
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    old, new = folder / ".records-a.tmp", folder / ".records-b.tmp"
    for left in (old, new):
        left.write_text("")
    os.utime(old, (0, time.time() - 25 * 3600))
    assert write() == file and file.read_bytes() == content
    assert sorted(folder.iterdir()) == sorted([file, new])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": float("nan")}, "record 2 cannot be written as JSON: text is nan; give None"),
        ({"text": np.float32("inf")}, "JSON: text is inf; give None or a number"),
        ({"text": b"abc"}, "JSON: text is of type bytes; decode it"),
        (
            {"messages": [{}, {"at": datetime(2026, 1, 2)}]},
            r"JSON: messages\[1\]\.at is of type datetime; convert it, for example by str\(\)",
        ),
        ({"text": {"a", "b"}}, "JSON: text is of type set"),
        ("word", "record 2 is a string. A string is a path: give texts as .* texts=True"),
        (Path("a.jsonl"), "record 2 is PosixPath.'a.jsonl'.; give a dict, or a list of token ids"),
        (None, "record 2 is None; give a dict"),
        (b"abc", "record 2 is of type bytes; give a dict"),
        ([1, 2.5], "record 2 is a list, but its element 1 is 2.5; give whole numbers"),
        (np.array([0.5]), "record 2 is a list, but its element 0 is 0.5; give whole numbers"),
        ([1, True], "record 2 is a list, but its element 1 is True; give whole numbers"),
        ([{"role": "user"}], r"element 0 is of type dict; .*conversation is a dict: {'messages'"),
        (torch.tensor(5), "record 2 is of type Tensor; give a dict, or a list of token ids"),
    ],
)
def test_records_that_are_no_json_are_named(record, message):
    """The error names the record, the place and the cure, in one line without the data."""
    with pytest.raises(DataError, match=message) as caught:
        dataset_of([{"text": "secret" * 50}, record])
    assert len(str(caught.value)) < 200 and "secret" not in str(caught.value)
    assert list(Path(CACHE).iterdir()) == []


def test_a_record_that_contains_itself_is_refused():
    """Deep and circular records do not end in a traceback of the JSON library."""
    circular: dict = {"text": "a"}
    circular["self"] = [circular]
    with pytest.raises(DataError, match=r"record 1 cannot .* nested too deeply or contains itself"):
        dataset_of([circular])


def test_half_a_surrogate_pair_is_an_unusable_line():
    """A record with text that is no UTF-8 is counted, as a line of a file is."""
    with pytest.raises(DataError, match=r"(?s)1 of 2 lines are unusable.*1 lone_surrogate"):
        dataset_of([{"text": "a"}, {"text": "\ud800"}])


class Frame:
    """Stand-in for a DataFrame of pandas, whose iteration gives the names of its columns."""

    columns = ("text",)

    def to_dict(self, orient):
        return [{"text": "a"}]

    def __iter__(self):
        return iter(self.columns)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TEXTS[0], "data is one dict with the keys text; give a list of dicts"),
        (
            {"train": Table(TEXTS)},
            r"keys train; give one of its data sets, for example data\['train",
        ),
        (Frame(), r"data is a Frame; give its rows as dicts: data.to_dict\(orient='records'\)"),
        (IDS[0], r"data is one list of numbers; .* token ids, give one list for each"),
        (b"abc", "data is of type bytes; give a path"),
        (Table([]), "data is an empty Table; give"),
        (iter([]), "data is an empty list_iterator; a generator can be read only once"),
        ([Path("a.jsonl"), TEXTS[0]], "value 2 of data, of type dict, is no path"),
    ],
)
def test_values_that_are_no_records_are_refused(data, message):
    """A wrong type or an empty collection gives one sentence with the cure, without the data."""
    with pytest.raises(ValueError, match=message) as caught:
        dataset_of(data)
    assert len(str(caught.value)) < 250


def test_errors_of_a_generator_are_its_own():
    """The exception of a generator is raised unchanged, and nothing is left in the cache."""

    def records():
        yield TEXTS[0]
        raise OSError("the network is down")

    with pytest.raises(OSError, match="the network is down"):
        dataset_of(records())
    assert list(Path(CACHE).iterdir()) == []


def test_a_cache_directory_that_cannot_be_written_is_named():
    """The error names the directory and cache_dir."""
    Path("cache").write_text("")
    with pytest.raises(DataError, match=r"cache cannot be written: .*give cache_dir another"):
        dataset_of(TEXTS, cache_dir="cache")
