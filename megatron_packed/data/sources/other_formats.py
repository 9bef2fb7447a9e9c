"""Formats of data that are not read, and the command that converts a file of each."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from megatron_packed.config.data_files import COMPRESSED_SUFFIXES
from megatron_packed.data.errors import DataError

_CSV = (
    "import csv, json; csv.field_size_limit(2**31 - 1); "
    "[print(json.dumps(row)) for row in csv.DictReader(open(0, encoding='utf-8-sig', newline=''){tabs})]"
)
_EXCEL = (
    "import pandas; pandas.read_excel(open(0, 'rb'), dtype=str, keep_default_na=False)"
    ".to_json('NAME.jsonl', orient='records', lines=True)"
)
_COMMANDS = {
    ".csv": f'python -c "{_CSV.format(tabs="")}" < FILE > NAME.jsonl',
    ".tsv": f'python -c "{_CSV.format(tabs=", delimiter=chr(9)")}" < FILE > NAME.jsonl',
    ".xlsx": f'python -c "{_EXCEL}" < FILE',
    ".xls": f'python -c "{_EXCEL}" < FILE',
    ".pdf": "pdftotext FILE NAME.txt",
    ".docx": "pandoc -t plain FILE -o NAME.txt",
    ".zip": "unzip -p FILE | gzip > NAME.jsonl.gz",
}
"""Command for each end of a name. CSV needs no library, Excel needs pandas with openpyxl or xlrd."""
_PROGRAMS = dict(zip(COMPRESSED_SUFFIXES, ("gzip", "zstd", "bzip2", "xz")))
_JSON_STARTS = (b"{", b"[")


def other_format(name: str) -> str | None:
    """Return the end of a name that tells a format that is not read; None for other names.

    Example:
        ``a.csv.gz`` and ``A.CSV`` give ``.csv``.
    """
    lower = name.lower()
    packed = next((end for end in COMPRESSED_SUFFIXES if lower.endswith(end)), "")
    return next((end for end in _COMMANDS if lower.removesuffix(packed).endswith(end)), None)


def check_other_format(file: Path) -> None:
    """Check that a file has no format that is not read. A file that begins as JSON is read.

    Raises:
        DataError: the name of the file tells such a format, with the command that converts it.
    """
    suffix = other_format(file.name)
    if suffix is None:
        return
    with file.open("rb") as stream:
        if stream.read(64).lstrip().startswith(_JSON_STARTS):
            return
    raise DataError(f"{file} is a {suffix} file, which is not read; {_cure(file, suffix)}.")


def refusal_of_folder(directory: Path, files: Iterable[Path], kinds: str) -> DataError | None:
    """Return the error for a folder that has only files of other formats; None without such files.

    Args:
        kinds: kinds of files that are read.
    """
    others = sorted(file for file in files if other_format(file.name) is not None)
    if not others:
        return None
    first = others[0]
    suffix = other_format(first.name)
    assert suffix is not None
    further = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return DataError(
        f"{directory} contains no {kinds}; {first.relative_to(directory)}{further} cannot be read: a "
        f"{suffix} file is not read; {_cure(first, suffix)}."
    )


def _cure(file: Path, suffix: str) -> str:
    """Return the sentence with the command that converts a file."""
    packed = next((end for end in COMPRESSED_SUFFIXES if file.name.lower().endswith(end)), None)
    path, command = shlex.quote(str(file)), _COMMANDS[suffix]
    if packed is not None and "< FILE" in command:
        command = f"{_PROGRAMS[packed]} -dc FILE | {command.replace(' < FILE', '')}"
    return f"convert it with `{command.replace('FILE', path)}`"
