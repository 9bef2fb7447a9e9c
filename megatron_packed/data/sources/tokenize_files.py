"""Tokenisation of source files into the arrays of a `tokenized_dataset.TokenizedDataset`.

Lines are processed in chunks: read, parse, render, encode. Chunks are independent of each other, so
several threads process them while the calling thread writes the results in the order of the lines.
Parsing holds Python's interpreter lock; encoding releases it.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.data.errors import BadLine, DataError, Notes
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.data.sources.checked_arrays import ArrayWriter
from megatron_packed.data.sources.data_report import DataReport, LineTally, Quarantine
from megatron_packed.data.sources.first_lines import check_first_lines
from megatron_packed.data.sources.jsonl_lines import MAX_LINE_BYTES, RawLine
from megatron_packed.data.sources.line_schema import (
    FIELDS,
    TEXT_SCHEMA,
    TOKEN_SCHEMA,
    LineSample,
    parse_line,
    schema_name,
)
from megatron_packed.data.sources.source_files import reader_of
from megatron_packed.data.tokenizers.chat_format import ChatFormat
from megatron_packed.data.tokenizers.encode import EncodedDocument, SampleEncoder
from megatron_packed.packed.array_types import Int64Array

ARRAY_TYPES = {
    "tokens": "<i4",
    "targets": "u1",
    "offsets": "<i8",
    "target_counts": "<i8",
    "source_lengths": "<i8",
    "source_targets": "<i8",
}
"""Type of the items of each array of a cache. The last two stand only in caches of shortened documents."""
_CHUNK_LINES = 512
_CHUNK_BYTES = 2**20
_MAX_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of the tokenisation of source files."""

    sft: bool
    """True if the sources must hold conversations or prompts, False if plain text. The other kind
    of data raises `DataError` and does not count as bad lines.
    """
    max_bad_fraction: float
    max_line_bytes: int = MAX_LINE_BYTES
    fields: DataFields | None = None
    """Names of the fields of the lines; None for the names of the schemas."""
    num_threads: int | None = None
    """Number of threads that tokenise; None for one per processor."""
    show_progress: bool = True

    @classmethod
    def from_config(cls, config: DataConfig, show: bool) -> BuildOptions:
        """Return the options of a run's data; ``show`` prints the progress."""
        return cls(
            sft=config.sft,
            max_bad_fraction=config.max_bad_fraction,
            fields=config.fields,
            show_progress=show,
        )


class Chunk(NamedTuple):
    """Lines of one file that one thread processes together."""

    file: Path
    lines: list[RawLine]
    position: int
    """Bytes of all files that were read up to the end of this chunk."""
    unread: tuple[str, ...] = ()
    """Columns of a table that are not read."""


class _Outcome(NamedTuple):
    line: RawLine
    schema: str
    documents: list[EncodedDocument]
    notes: Notes
    bad_line: BadLine | None


def build_arrays(
    files: Sequence[Path],
    encoder: SampleEncoder,
    directory: Path,
    quarantine_path: Path,
    options: BuildOptions,
) -> tuple[DataReport, dict[str, Any]]:
    """Write the arrays of ``files`` into ``directory``.

    Bad lines are counted. The caller calls `DataReport.check` after the arrays are in the cache, so
    that they need not be built again with another limit.

    Returns:
        The report, and the manifest entries of the arrays.
    Raises:
        DataError: no document, data of the wrong kind, an unusable template, or data that is
            refused early (`first_lines.check_first_lines`, `DataReport.check_early`).
    """
    check_before_building(files, options, quarantine_path, encoder)
    quarantine = Quarantine(quarantine_path)
    writer = _DatasetWriter(directory, with_sources=encoder.shortens)
    report = DataReport(files=len(files))
    tally = LineTally(report, quarantine)
    total = sum(file.stat().st_size for file in files)
    try:
        with ProgressBar("tokenising", total, options.show_progress) as progress:
            for chunk, outcomes in _in_order(_chunks_of_lines(files, options), encoder, options):
                for outcome in outcomes:
                    _account(chunk.file, outcome, report, tally, writer)
                used = sum(bool(outcome.documents) for outcome in outcomes)
                report.add_notes(Counter({("unread_field", n): used for n in chunk.unread if used}))
                report.check_early(options.max_bad_fraction, quarantine_path)
                progress.update(
                    chunk.position, f"{report.documents} documents, {report.num_bad} bad lines"
                )
    finally:
        tally.close()
        quarantine.close()
        entries = writer.close()
    assert report.lines == report.blank + report.good + report.num_empty + report.num_bad, report
    if not report.documents:
        report.check(options.max_bad_fraction, quarantine_path)
    return report, entries


def check_before_building(
    files: Sequence[Path],
    options: BuildOptions,
    quarantine_path: Path,
    encoder: SampleEncoder | None = None,
) -> None:
    """Check the first lines of each file; see `first_lines.check_first_lines`.

    Args:
        encoder: encoder of the data, which also tries the first usable lines.
    Raises:
        DataError: the lines cannot be used, or are of the wrong kind.
    """

    def parsed(line: RawLine) -> tuple[str, list[LineSample]]:
        samples, _ = _parse(line, options.fields)
        if isinstance(samples, BadLine):
            raise samples
        schema = schema_name(samples[0]) if samples else ""
        if schema:
            check_kind(schema, options.sft)
        return schema, samples

    check_first_lines(
        files,
        lambda file: reader_of(file, options.max_line_bytes, FIELDS, options.fields),
        parsed,
        encoder,
        fields=options.fields,
        max_bad_fraction=options.max_bad_fraction,
        quarantine_path=quarantine_path,
        show=options.show_progress,
    )


def documents_of_lines(
    files: Sequence[Path], encoder: SampleEncoder, options: BuildOptions
) -> dict[Path, Int64Array]:
    """Return for each file the number of documents that each line makes, as ``(lines,)``.

    Blank and bad lines make 0 documents.

    Raises:
        DataError: data of the wrong kind, or an unusable template.
    """
    counts: dict[Path, array[int]] = {file: array("q") for file in files}
    for chunk, outcomes in _in_order(_chunks_of_lines(files, options), encoder, options):
        for outcome in outcomes:
            counts[chunk.file].extend([len(outcome.documents)] * outcome.line.num_lines)
    return {file: np.array(count, np.int64) for file, count in counts.items()}


def check_kind(schema: str, sft: bool) -> None:
    """Check that the kind of data agrees with ``--sft``.

    Without this check a run would train on the wrong tokens, and no count of the report would show
    the mistake.

    Raises:
        DataError: conversations or prompts without ``--sft``, or plain text with ``--sft``.
    """
    if schema == TOKEN_SCHEMA:
        return
    is_text = schema == TEXT_SCHEMA
    if sft and is_text:
        raise DataError(
            f"{flags.SFT} trains only on answers, but the data contains `text` lines, whose tokens are all trained; "
            f"remove {flags.SFT}, "
            'or write the lines as {"prompt": "", "completion": ...}.'
        )
    if not sft and not is_text:
        raise DataError(
            f"the data contains `{schema}` lines; add {flags.SFT} to train on the answers in the lines."
        )


def _account(
    file: Path,
    outcome: _Outcome,
    report: DataReport,
    tally: LineTally,
    writer: _DatasetWriter,
) -> None:
    if outcome.bad_line is not None:
        tally.left_out(file, outcome.line, outcome.bad_line)
        return
    if not outcome.documents:
        tally.blank(outcome.line)
        return
    tally.used(file, outcome.schema, notes=outcome.notes, line=outcome.line)
    for document in outcome.documents:
        report.add_document(document, *writer.append(document))


def _chunks_of_lines(files: Sequence[Path], options: BuildOptions) -> Iterator[Chunk]:
    return chunks_of(files, options.max_line_bytes, FIELDS, options.fields)


def chunks_of(
    files: Sequence[Path],
    max_line_bytes: int,
    columns: Collection[str],
    fields: DataFields | None = None,
) -> Iterator[Chunk]:
    """Yield the lines of all files in order.

    Readers of tables read only the columns in ``columns``, or those that ``fields`` names.
    """
    behind = 0
    for file in files:
        reader = reader_of(file, max_line_bytes, columns, fields)
        lines: list[RawLine] = []
        num_bytes = 0
        for line in reader:
            lines.append(line)
            num_bytes += len(line.data)
            if len(lines) >= _CHUNK_LINES or num_bytes >= _CHUNK_BYTES:
                yield Chunk(file, lines, behind + reader.bytes_read, reader.unread_columns)
                lines, num_bytes = [], 0
        behind += file.stat().st_size
        if lines:
            yield Chunk(file, lines, behind, reader.unread_columns)


def _in_order(
    chunks: Iterator[Chunk], encoder: SampleEncoder, options: BuildOptions
) -> Iterator[tuple[Chunk, list[_Outcome]]]:
    """Yield the outcomes of the chunks in order, with at most two chunks per thread in memory."""
    threads = min(options.num_threads or len(os.sched_getaffinity(0)), _MAX_THREADS)
    if threads == 1:
        for chunk in chunks:
            yield chunk, _process(chunk, encoder, options)
        return
    pending: deque[tuple[Chunk, Future[list[_Outcome]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenise") as pool:
        try:
            for chunk in chunks:
                pending.append((chunk, pool.submit(_process, chunk, encoder, options)))
                if len(pending) >= 2 * threads:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _process(chunk: Chunk, encoder: SampleEncoder, options: BuildOptions) -> list[_Outcome]:
    parsed = [_parse(line, options.fields) for line in chunk.lines]
    usable = [samples for samples, _ in parsed if not isinstance(samples, BadLine)]
    for samples in usable:
        if samples:
            check_kind(schema_name(samples[0]), options.sft)
    encoded = iter(encoder.encode(usable))
    outcomes = []
    for line, (value, notes) in zip(chunk.lines, parsed):
        result = value if isinstance(value, BadLine) else next(encoded)
        if isinstance(result, BadLine):
            outcomes.append(_Outcome(line, "", [], notes, result))
        else:
            schema = schema_name(value[0]) if value and not isinstance(value, BadLine) else ""
            notes = _without_read_fields(notes, encoder.chat) + result.notes
            outcomes.append(_Outcome(line, schema, result.documents, notes, None))
    return outcomes


def _without_read_fields(notes: Notes, chat: ChatFormat) -> Notes:
    """Return notes without the fields of messages that the chat template reads."""
    start = "messages[]."
    return Counter(
        {
            (kind, name): count
            for (kind, name), count in notes.items()
            if not (name.startswith(start) and chat.reads_field(name.removeprefix(start)))
        }
    )


def _parse(line: RawLine, fields: DataFields | None) -> tuple[list[LineSample] | BadLine, Notes]:
    """Return the samples of a line (none for a blank line), or the reason why it is unusable.

    The notes name the fields of the line that are not read.
    """
    notes: Notes = Counter()
    if line.reason is not None:
        return BadLine(line.reason), notes
    if line.is_blank:
        return [], notes
    try:
        return parse_line(line.data, fields, notes), notes
    except BadLine as bad_line:
        return bad_line, notes


class _DatasetWriter:
    def __init__(self, directory: Path, with_sources: bool) -> None:
        self._arrays = {
            name: ArrayWriter(directory, name, dtype)
            for name, dtype in ARRAY_TYPES.items()
            if with_sources or not name.startswith("source_")
        }
        self._end = 0
        self._arrays["offsets"].append([0])

    def append(self, document: EncodedDocument) -> tuple[int, int]:
        """Write a document and return its numbers of tokens and of targets."""
        num_targets = int(np.count_nonzero(document.targets))
        self._end += len(document.ids)
        sizes = (len(document.ids), num_targets)
        source_lengths, source_targets = sizes if document.cut is None else document.cut[:2]
        values: dict[str, ArrayLike] = {
            "tokens": document.ids,
            "targets": document.targets,
            "offsets": [self._end],
            "target_counts": [num_targets],
            "source_lengths": [source_lengths],
            "source_targets": [source_targets],
        }
        for name, writer in self._arrays.items():
            writer.append(values[name])
        return sizes

    def close(self) -> dict[str, Any]:
        return {name: writer.close() for name, writer in self._arrays.items()}
