"""Tests of files of formats that are not read: the refusal has a command that converts the file."""

import bz2
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.source_files import expand_paths

ROWS = [{"question": "Wo liegt Köln?", "answer": 'Am "Rhein",\nim Westen.'}, {"a": "x" * 200_000}]
TABLE = (
    '\ufeffquestion,answer,a\r\nWo liegt Köln?,"Am ""Rhein"",\nim Westen.",\r\n,,' + "x" * 200_000
)


def refusal(path) -> str:
    with pytest.raises(DataError) as caught:
        expand_paths([path])
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "pack"), [("a b.csv", bytes), ("a.tsv", bytes), ("A.CSV.gz", gzip.compress)]
)
def test_the_printed_command_converts_a_table_of_text(tmp_path, name, pack):
    """A byte order mark, line ends in a field and fields above 128 KiB do not matter."""
    table = TABLE.replace('",\r', '"\t\r').replace("?,", "?\t").replace(",answer,", "\tanswer\t")
    table = table.replace(",,x", "\t\tx") if "tsv" in name else TABLE
    (tmp_path / name).write_bytes(pack(table.encode()))
    said = refusal(tmp_path / name)
    assert f"{name} is a .{'tsv' if 'tsv' in name else 'csv'} file, which is not read" in said
    command = said.split("`")[1]
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search}
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=environment)
    lines = (tmp_path / "NAME.jsonl").read_text().splitlines()
    rows = [{name: part for name, part in json.loads(line).items() if part} for line in lines]
    assert rows == ROWS
    assert expand_paths([tmp_path]) == [tmp_path / "NAME.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "program"),
    [
        ("a.xlsx", b"PK\x03\x04", "pandas.read_excel"),
        ("a.xls", b"\xd0\xcf\x11\xe0", "pandas.read_excel"),
        ("a.docx", b"PK\x03\x04", "pandoc"),
        ("a.pdf", b"%PDF-1.7", "pdftotext"),
        ("a.zip", b"PK\x03\x04", "unzip -p"),
        ("a.csv.bz2", bz2.compress(b"a,b"), "bzip2 -dc"),
    ],
)
def test_each_format_names_the_program_that_converts_it(tmp_path, name, content, program):
    file = tmp_path / name
    file.write_bytes(content)
    assert program in refusal(file) and f"{file} " in refusal(file)
    said = refusal(tmp_path)
    assert said.startswith(f"{tmp_path} contains no .jsonl") and program in said and name in said


def test_a_file_that_begins_as_json_is_read_whatever_its_name(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('{"text": "t"}\n')
    assert expand_paths([file]) == [file]


def test_such_files_next_to_data_are_not_read(tmp_path):
    for name in ("a.csv", "b.jsonl"):
        (tmp_path / name).write_text("")
    assert expand_paths([tmp_path]) == [tmp_path / "b.jsonl"]
