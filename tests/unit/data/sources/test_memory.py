"""Test that the memory of tokenising and indexing does not grow with the size of the file."""

import json
from pathlib import Path

import pytest

from megatron_packed.data.index.preprocess import PreprocessOptions, preprocess
from megatron_packed.data.sources import tokenize_files as build
from megatron_packed.data.tokenizers.base import ByteTokenizer
from support.data_helpers import open_files, with_peak

MIB = 2**20
GROWTH = 2 * MIB
"""Allowed growth of the peak memory for 12 MiB more of lines.

The tokens and target marks of these lines take 60 MiB.
"""


def tokenise(file: Path, threads: int = 1) -> None:
    dataset = open_files([file], sft=False, num_threads=threads)
    for index in range(len(dataset)):  # reads views of a memory map, as loaders do
        dataset.document(index)


def tokenise_in_threads(file: Path) -> None:
    tokenise(file, threads=2)


def index(file: Path) -> None:
    options = PreprocessOptions(
        append_eod=True, workers=1, max_bad_fraction=0.0, show_progress=False
    )
    preprocess([file], file.with_name("out"), ByteTokenizer, options)


@pytest.mark.parametrize("command", [tokenise, tokenise_in_threads, index])
def test_peak_memory_does_not_grow_with_the_file(command, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_CHUNK_BYTES", 2**16)  # so that a small file has many chunks
    peaks = []
    for mebibytes in (4, 16):
        file = tmp_path / str(mebibytes) / "data.jsonl"
        file.parent.mkdir()
        with file.open("w") as lines:
            for number in range(16 * mebibytes):
                lines.write(json.dumps({"text": f"{number} " + "a" * 2**16}) + "\n")
        peaks.append(with_peak(command, file)[1])
    assert peaks[1] < peaks[0] + GROWTH, [f"{peak / MIB:.1f} MiB" for peak in peaks]
