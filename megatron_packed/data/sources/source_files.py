"""Data paths: the files that they name, the reader of a file, and the identity of its content."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.data_files import (
    DATA_FILE_NAMES,
    is_data_name,
    is_plain_name,
    may_be_description,
)
from megatron_packed.config.hub_paths import is_hub_name, is_hub_path
from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.compression import check_compression, is_table
from megatron_packed.data.sources.json_objects import check_no_wrapped_list, read_object_head
from megatron_packed.data.sources.jsonl_lines import LineReader
from megatron_packed.data.sources.line_fields import first_names
from megatron_packed.data.sources.line_schema import DECIDING, deciding_among
from megatron_packed.data.sources.other_formats import check_other_format, refusal_of_folder

if TYPE_CHECKING:
    from megatron_packed.data.sources.table_rows import RowReader

QUARANTINE_SUFFIX = ".quarantine.jsonl"
_SHOWN_NAMES = 5
_READ_BYTES = 2**20
_WHOLE_HASH_BYTES = 256 * 2**20
_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 16


def expand_paths(
    paths: Sequence[str | Path],
    say: Callable[[str], None] = lambda line: None,
    *,
    download: bool = True,
) -> list[Path]:
    """List the files that ``paths`` name. The order of files is the order of documents.

    Args:
        paths: each is a file, a directory, or a pattern with ``*``, ``?`` or ``[]``, on this
            machine or, as an ``hf://`` path, on the Hugging Face Hub. A directory
            stands for its JSON files, plain or compressed, and Parquet files at any depth, sorted;
            or for the files of a data set that Hugging Face's ``save_to_disk`` wrote. A directory
            without such files stands for its ``.txt`` files. Files such as ``dataset_infos.json``,
            which describe a data set, are left out.
        say: receives a line with the files of each directory.
        download: download files of the Hub; False uses the latest download.
    Raises:
        DataError: a path names no file or cannot be downloaded; a file is not regular, not
            readable or named twice; or its format is not read or needs a library.
    """
    if not paths:
        raise DataError(
            f"no data path was given; give a {DATA_FILE_NAMES}, a directory or a pattern."
        )
    files: list[Path] = []
    for path in paths:
        name = str(path)
        if is_hub_path(name):
            from megatron_packed.data.sources.hub import local_path

            name = local_path(name, say=say, download=download)
        files.extend(_expand(name, say))
    seen: set[Path] = set()
    for file in files:
        _check_file(file)
        if is_table(file):
            from megatron_packed.data.sources.table_rows import check_pyarrow

            check_pyarrow(file)
        resolved = file.resolve()
        if resolved in seen:
            raise DataError(
                f"the data paths name {file} twice, but each file is read once per epoch; remove one of the two."
            )
        seen.add(resolved)
    return files


def _expand(path: str, say: Callable[[str], None]) -> list[Path]:
    local = Path(path)
    if local.is_dir():
        from megatron_packed.data.sources.table_rows import is_saved_dataset, saved_files

        try:
            return saved_files(local) if is_saved_dataset(local) else _files_of(local, say)
        except OSError as error:  # another process changes the directory at the same time
            raise DataError(
                f"{local} cannot be listed: {error.filename or local}: {error.strerror}; give a directory that does "
                "not change while it is read."
            ) from None
    if local.exists() or local.is_symlink():
        return [local]
    if any(c in path for c in "*?["):
        matched = [
            Path(name)
            for name in sorted(glob.glob(path, recursive=True))
            if not Path(name).is_dir()
        ]
        if not matched:
            raise DataError(f"{path} matches no file; check the pattern.")
        return matched
    if _is_number(path):
        raise DataError(
            f"{path} is not a file; only a training run accepts weights (`0.5 first 0.5 second`), so give the files "
            "without weights."
        )
    hub = f", or hf://datasets/{path} for a data set of the Hugging Face Hub" * is_hub_name(path)
    raise DataError(
        f"{path} does not exist; give a {DATA_FILE_NAMES}, a directory or a pattern{hub}."
    )


def _files_of(directory: Path, say: Callable[[str], None]) -> list[Path]:
    """Return the data files of a directory, and report them."""
    # A broken link or a pipe stays in the list, so that its refusal says which data is missing.
    data_files = sorted(
        file
        for file in _visible_paths(directory)
        if is_data_name(file.name)
        and not file.name.endswith(QUARANTINE_SUFFIX)
        and not file.is_dir()
    )
    descriptions = (file for file in data_files if may_be_description(file.name) and file.is_file())
    left_out = [file for file in descriptions if _is_description(file)]
    plain = [file for file in data_files if is_plain_name(file.name)]
    used_files = [file for file in data_files if file not in left_out and file not in plain]
    not_read = f"; {_named(left_out, directory)} not read: no list of examples" if left_out else ""
    if not used_files:
        used_files = plain
    elif plain:
        not_read += f"; {_named(plain, directory)} not read: text next to data"
    if not used_files:
        files = filter(Path.is_file, _visible_paths(directory))
        others = refusal_of_folder(directory, files, DATA_FILE_NAMES)
        raise others or DataError(
            f"{directory} contains no {DATA_FILE_NAMES}{not_read}; give the files or another directory."
        )
    say(f"{directory}: {_named(used_files, directory)} read{not_read}")
    return used_files


def _visible_paths(directory: Path) -> Iterator[Path]:
    """Yield the files and folders at any depth of a directory, without hidden ones."""
    for path in directory.rglob("*"):
        if not any(part.startswith(".") for part in path.relative_to(directory).parts):
            yield path


def _named(files: Sequence[Path], directory: Path) -> str:
    names = [str(file.relative_to(directory)) for file in files[:_SHOWN_NAMES]]
    num_more = len(files) - len(names)
    count = f"{len(files)} file{'s' * (len(files) > 1)}"
    return f"{count} ({', '.join(names)}{f' and {num_more} more' * (num_more > 0)})"


def _is_description(file: Path) -> bool:
    """Return whether a ``.json`` file is one JSON object that is not an example for training."""
    head = read_object_head(file)
    if head is None:
        return False
    return head.spans_lines or (head.is_alone is True and DECIDING.isdisjoint(head.keys))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_file(file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}; check the path and its permissions."
        ) from None
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{file} is not a regular file; a pipe or device cannot be read twice, so write its content to a file."
        )
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} cannot be read: permission denied; check its permissions.")
    if not is_table(file):
        check_other_format(file)
    check_compression(file)


def reader_of(
    file: Path, max_line_bytes: int, columns: Collection[str], fields: DataFields | None = None
) -> LineReader | RowReader:
    """Return the reader of a file: of rows of a table, of one plain text, or of lines or elements.

    Raises:
        DataError: the file is one JSON object that holds a list.
    """
    if is_table(file):
        from megatron_packed.data.sources.table_rows import RowReader

        return RowReader(file, max_line_bytes, columns, fields)
    if is_plain_name(file.name):
        from megatron_packed.data.sources.plain_texts import TextReader, begins_as_json

        if not begins_as_json(file):
            return TextReader(file, max_line_bytes)
    check_no_wrapped_list(file, deciding_among(columns) if fields is None else first_names(fields))
    return LineReader(file, max_line_bytes)


def index_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def is_indexed(prefix: str | Path) -> bool:
    """Return whether ``<prefix>.bin`` or ``<prefix>.idx`` exists."""
    return index_path(prefix).is_file() or tokens_path(prefix).is_file()


def names_indexed(path: str) -> bool:
    """Return True if a data path is the prefix of an indexed data set and is no file itself."""
    return not Path(path).exists() and is_indexed(path)


def quarantine_of(path: Path) -> Path:
    """Return the path of the file that lists the bad lines of a cache or of an indexed data set."""
    return path.with_name(f"{path.name}{QUARANTINE_SUFFIX}")


def file_identity(file: Path) -> str:
    """Hash a file to detect a change of its content; the name of the file does not count.

    For files up to 256 MiB the hash covers the complete content. For larger files it covers the
    size, the modification time and sixteen evenly spaced blocks of 64 KiB, because reading a
    terabyte at every start would take too long.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{size}:".encode())
    with file.open("rb") as stream:
        if size <= _WHOLE_HASH_BYTES:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
        else:
            digest.update(f"{file.stat().st_mtime_ns}:".encode())
            for sample in range(_NUM_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
