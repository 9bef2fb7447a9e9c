"""A full disk ends the preparation of data with one sentence, and leaves no incomplete file.

A limit of the process on the size of files stands for the full disk.
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.data.sources.cache_directory import open_or_build
from megatron_packed.data.sources.data_report import Quarantine
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.tokenizers.bpe_training import train_bpe
from support.json_lines import write_texts


@contextmanager
def no_room() -> Iterator[None]:
    """Refuse every write to a file in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def few_documents(folder: Path) -> None:
    with IndexedWriter(folder / "d", "uint16") as writer:
        writer.add_document(np.arange(10))


def many_documents(folder: Path) -> None:
    with IndexedWriter(folder / "d", "uint16") as writer:
        for _ in range(100):
            writer.add_document(np.arange(10_000))


def bad_line(folder: Path) -> None:
    quarantine = Quarantine(folder / "d.quarantine.jsonl")
    quarantine.add(folder / "d", RawLine(1, b"{}"), BadLine("empty_messages"))
    quarantine.close()


def existing(folder: Path) -> Path:
    if not folder.exists():
        raise DataError(f"{folder} is missing.")
    return folder


def cache(folder: Path) -> None:
    open_or_build(folder / "d", existing, build=lambda new: None, log=print)
    (folder / "d.lock").unlink()
    (folder / "d").rmdir()
    open_or_build(folder / "d", existing, build=few_documents, log=print)


def vocabulary(folder: Path) -> None:
    train_bpe([str(folder.parent / "text.jsonl")], 300, cache_root=folder)


@pytest.mark.parametrize("make", [few_documents, many_documents, bad_line, cache, vocabulary])
def test_a_full_disk_is_one_sentence_and_leaves_no_incomplete_file(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    """Writers of data raise `DataError`, and only empty lock files are left."""
    write_texts(tmp_path / "text.jsonl", ["some words of text"])
    folder = tmp_path / "full"
    folder.mkdir()
    with no_room(), pytest.raises(DataError, match="cannot be written: File too large"):
        make(folder)
    assert [file for file in folder.iterdir() if file.suffix != ".lock"] == []
