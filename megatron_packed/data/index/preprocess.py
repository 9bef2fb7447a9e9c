"""Conversion of JSONL files and tables to indexed data sets, by several processes.

Documents are written in the order of the lines. The written files do not depend on the number of
processes.

A bad line neither stops nor hangs the conversion. A line that is not usable JSON, or that the
tokenizer rejects, goes into quarantine. A line can also kill its worker process: by memory, by a
crash inside a library, or by more than `LINE_SECONDS` for its chunk. All chunks in flight are then
given to a new worker, one chunk at a time. Chunks that fail again are processed line by line, until
the bad line is found and put into quarantine.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.sections.data_parts.tokenizer import TOKENS
from megatron_packed.data.errors import BadLine, DataError, Notes, printable
from megatron_packed.data.index.indexed_file import token_type
from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.data.sources.data_report import DataReport, LineTally, Quarantine
from megatron_packed.data.sources.first_lines import check_first_lines
from megatron_packed.data.sources.jsonl_lines import MAX_LINE_BYTES, RawLine
from megatron_packed.data.sources.line_fields import renamed
from megatron_packed.data.sources.source_files import quarantine_of, reader_of
from megatron_packed.data.sources.strict_json import JsonObject, object_of_line
from megatron_packed.data.sources.tokenize_files import Chunk, chunks_of
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import TextPiece, chat_format
from megatron_packed.data.tokenizers.encode import (
    TextNotes,
    TurnMarkers,
    check_tokens,
    encode_pieces,
    with_special_tokens,
)
from megatron_packed.packed.array_types import Int32Array, IntegerArray

LINE_SECONDS = 120.0
"""Limit, in seconds, of the time of a worker for one chunk of lines, or for one line.

The worker is ended after this time. The slowest tokenizers take a second for a chunk.
"""
_AHEAD = 3
"""Number of chunks in flight for each worker."""
_DEATHS = 16
"""Number of lines at the start of a chunk after which the run stops, if each of them ended its
worker. The cause is then probably not the lines.
"""


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Options of the conversion of files to indexed data sets."""

    keys: tuple[str, ...] = ("text",)
    """Fields of each line. Each field becomes a data set ``<prefix>_<key>_document``."""
    append_eod: bool = False
    """True appends the tokenizer's end-of-document token to every document."""
    fields: DataFields | None = None
    """Names of the fields of the lines, which give the keys; None if the lines have the keys."""
    max_bad_fraction: float = 0.01
    max_line_bytes: int = MAX_LINE_BYTES
    workers: int = 1
    """Number of processes that tokenise. With 1, the calling process tokenises, without protection
    against crashes of libraries.
    """
    line_seconds: float = LINE_SECONDS
    show_progress: bool = True
    special_tokens_in_text: str | None = None
    """Value of ``--special-tokens-in-text``."""
    text_notes: TextNotes | None = None
    """Search for special tokens that are counted; set by `preprocess`."""


def preprocess(
    files: Sequence[Path],
    prefix: Path,
    make_tokenizer: Callable[[], Tokenizer],
    options: PreprocessOptions,
) -> tuple[DataReport, list[str]]:
    """Write ``<prefix>_<key>_document.bin`` and ``.idx`` for each key, or nothing at all.

    Args:
        files: JSONL or JSON arrays, plain or compressed; Parquet; Arrow.
        make_tokenizer: called in every process; it must be a function of a module, or a
            ``functools.partial`` of one.
    Returns:
        The report of the lines, and the prefixes of the data sets.
    Raises:
        DataError: too many bad lines (listed in ``<prefix>.quarantine.jsonl``), no good line, or a
            directory that cannot be written.
    """
    quarantine_path = quarantine_of(prefix)
    check_first_lines(
        files,
        lambda file: reader_of(file, options.max_line_bytes, options.keys, options.fields),
        lambda line: ("text" if texts_of_line(line, options.keys, options.fields) else "", []),
        None,
        fields=options.fields,
        max_bad_fraction=options.max_bad_fraction,
        quarantine_path=quarantine_path,
        show=options.show_progress,
    )
    tokenizer = make_tokenizer()
    options = replace(options, text_notes=_text_notes(tokenizer))
    dtype = token_type(tokenizer.vocab_size)
    report = DataReport(files=len(files))
    names = [f"{prefix}_{key}_document" for key in options.keys]
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(name, dtype)) for name in names]
        quarantine = Quarantine(quarantine_path)
        stack.callback(quarantine.close)
        tally = LineTally(report, quarantine)
        progress = stack.enter_context(
            ProgressBar(
                "tokenising", sum(file.stat().st_size for file in files), options.show_progress
            )
        )
        chunks = chunks_of(files, options.max_line_bytes, options.keys, options.fields)
        for chunk, encoded in _in_order(chunks, tokenizer, make_tokenizer, options):
            for place, bad_line in encoded.bad_lines:
                tally.left_out(chunk.file, chunk.lines[place], bad_line)
            for writer, tokens, lengths in zip(writers, encoded.tokens, encoded.lengths):
                writer.add_documents(tokens, lengths)
            _account(report, tally, chunk, encoded)
            report.check_early(options.max_bad_fraction, quarantine_path)
            progress.update(
                chunk.position, f"{report.documents} documents, {report.num_bad} bad lines"
            )
        tally.close()
        assert report.lines == report.blank + report.good + report.num_empty + report.num_bad
        letters_wanted = options.special_tokens_in_text is not None
        report.check(options.max_bad_fraction, quarantine_path, letters_wanted)
    return report, names


def _text_notes(tokenizer: Tokenizer) -> TextNotes | None:
    """Return the search for special tokens; None if the tokenizer's template cannot be used."""
    try:
        chat = chat_format(tokenizer)
    except DataError:
        return None
    try:
        return TextNotes(tokenizer, TurnMarkers(chat.turn_markers))
    finally:
        chat.close()


def _account(report: DataReport, tally: LineTally, chunk: Chunk, encoded: Encoded) -> None:
    report.lines += encoded.blank
    report.blank += encoded.blank
    tally.used(chunk.file, "text", encoded.good)
    for notes in encoded.notes:
        report.add_notes(notes)
    for lengths in encoded.lengths:
        report.documents += len(lengths)
        report.tokens += int(lengths.sum())
        report.target_tokens += int(lengths.sum()) - len(lengths)
        report.longest_document = max(report.longest_document, int(lengths.max(initial=0)))


# -------------------------------------------------------------------------------------------------
# encoding of a chunk of lines, in one process


class Encoded(NamedTuple):
    """Documents of a chunk of lines."""

    tokens: tuple[IntegerArray, ...]
    """For each key, the concatenated documents of all good lines."""
    lengths: tuple[Int32Array, ...]
    """For each key, the number of tokens of each document, ``(documents,)``. A line makes one
    document, or one for each element that a path with ``[*]`` takes.
    """
    good: int
    """Lines that became documents."""
    blank: int
    bad_lines: list[tuple[int, BadLine]]
    """Place in the chunk of each bad line, and the reason."""
    notes: list[Notes]
    """Notes of the good lines that have notes."""


def encode_chunk(
    lines: Sequence[RawLine], tokenizer: Tokenizer, options: PreprocessOptions
) -> Encoded:
    """Encode the documents of a chunk of lines, and list the bad lines.

    Raises:
        DataError: the tokenizer makes tokens outside of its vocabulary.
    """
    texts: list[list[str]] = []
    bad_lines: list[tuple[int, BadLine]] = []
    places, blank = [], 0
    for place, line in enumerate(lines):
        try:
            line_texts = texts_of_line(line, options.keys, options.fields)
        except BadLine as error:
            bad_lines.append((place, error))
            continue
        if line_texts:
            texts.append(line_texts)
            places.append(place)
        else:
            blank += line.num_lines
    good: list[list[Int32Array]] = []
    notes: list[Notes] = []
    special = options.special_tokens_in_text == TOKENS
    for place, of_line, ids in zip(places, texts, _encoded(texts, tokenizer, special)):
        if isinstance(ids, BadLine):
            bad_lines.append((place, ids))
        else:
            good.append(ids)
            notes.append(_notes(of_line, None if special else options.text_notes))
    notes = [of_line for of_line in notes if of_line]
    end = np.full(int(options.append_eod), tokenizer.eod_id, np.int32)
    dtype = token_type(tokenizer.vocab_size)
    tokens, lengths = [], []
    for key in range(len(options.keys)):
        documents = [ids for of_line in good for ids in of_line[key :: len(options.keys)]]
        joined = np.concatenate([part for ids in documents for part in (ids, end)] or [end[:0]])
        check_tokens(joined, tokenizer)
        tokens.append(joined.astype(dtype))
        lengths.append(np.array([len(ids) + len(end) for ids in documents], np.int32))
    bad_lines.sort(key=lambda item: item[0])
    return Encoded(tuple(tokens), tuple(lengths), len(good), blank, bad_lines, notes)


def _notes(texts: Sequence[str], search: TextNotes | None) -> Notes:
    """Return the special tokens that the texts of a line spell as letters."""
    if search is None:
        return Counter()
    return sum((search.find(text) for text in texts), Counter())


def texts_of_line(line: RawLine, keys: Sequence[str], fields: DataFields | None) -> list[str]:
    """Return the text of every key of each document of a line; an empty list for a blank line.

    Raises:
        BadLine: the line cannot be used, with the reason.
    """
    if line.reason is not None:
        raise BadLine(line.reason)
    if line.is_blank:
        return []
    value = object_of_line(line.data)
    values = [value] if fields is None else renamed(value, fields)
    return [_text(value, key) for value in values for key in keys]


def _text(value: JsonObject, key: str) -> str:
    """Return the text of a key of a document."""
    if key not in value:
        raise BadLine("missing_key", printable(key, 40))
    text = value[key]
    if not isinstance(text, str):
        raise BadLine("wrong_type", f"{printable(key, 40)} is not a string")
    if not text.strip():
        raise BadLine("empty_text", printable(key, 40))
    return text


def _encoded(
    texts: list[list[str]], tokenizer: Tokenizer, special: bool
) -> list[list[Int32Array] | BadLine]:
    """Return the tokens of every key of every line.

    All lines are encoded at once. If the tokenizer raises an error, the lines are encoded one by
    one, so that only bad lines are rejected.

    Args:
        special: encode special tokens that a text spells as such.
    """
    pieces = [[TextPiece(text, True, special)] for of_line in texts for text in of_line]
    if special:
        pieces = [with_special_tokens(tokenizer, of_text) for of_text in pieces]
    try:
        encoded = encode_pieces(tokenizer, pieces)
    except (DataError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if len(texts) == 1:
            return [BadLine("tokenizer_failed", printable(f"{type(error).__name__}: {error}", 80))]
        return [outcome for of_line in texts for outcome in _encoded([of_line], tokenizer, special)]
    outcomes: list[list[Int32Array] | BadLine] = []
    documents = iter(encoded)
    for of_line in texts:
        line_documents = [next(documents) for _ in of_line]
        bad_line = next(
            (document for document in line_documents if isinstance(document, BadLine)), None
        )
        ids = [document.ids for document in line_documents if not isinstance(document, BadLine)]
        if bad_line is None and not all(map(len, ids)):
            bad_line = BadLine("no_trainable_token")
        outcomes.append(bad_line or ids)
    return outcomes


# -------------------------------------------------------------------------------------------------
# encoding in several processes


def _in_order(
    chunks: Iterator[Chunk],
    tokenizer: Tokenizer,
    make_tokenizer: Callable[[], Tokenizer],
    options: PreprocessOptions,
) -> Iterator[tuple[Chunk, Encoded]]:
    if options.workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk.lines, tokenizer, options)
        return
    workers = _Workers(tokenizer, make_tokenizer, options)
    pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, workers.submit(chunk.lines)))
            if len(pending) >= _AHEAD * options.workers:
                yield workers.first(pending)
        while pending:
            yield workers.first(pending)
    finally:
        workers.close()


class _Workers:
    """Pool of processes that encode chunks. If a process dies, all processes are replaced.

    The docstring of the module describes how the bad line is found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        make_tokenizer: Callable[[], Tokenizer],
        options: PreprocessOptions,
    ) -> None:
        self._start = (make_tokenizer, options)
        self._options = options
        self._nothing = encode_chunk([], tokenizer, options)
        self._pool = self._make(options.workers)

    def submit(self, lines: Sequence[RawLine]) -> Future[Encoded]:
        try:
            return self._pool.submit(_work, lines)
        except BrokenProcessPool as error:
            failed: Future[Encoded] = Future()
            failed.set_exception(error)
            return failed

    def first(self, pending: deque[tuple[Chunk, Future[Encoded]]]) -> tuple[Chunk, Encoded]:
        """Return the outcome of the chunk that was submitted first."""
        chunk, future = pending.popleft()
        try:
            return chunk, future.result()
        except BrokenProcessPool:
            waiting = [(chunk, future), *pending]
            pending.clear()
            pending.extend(self._again(waiting))
        return self.first(pending)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, workers: int) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(workers, context, initializer=_initialise, initargs=self._start)

    def _again(
        self, waiting: list[tuple[Chunk, Future[Encoded]]]
    ) -> list[tuple[Chunk, Future[Encoded]]]:
        """Process the chunks in flight one at a time, to find the chunk that kills its worker."""
        self.close()
        self._pool = self._make(1)
        outcomes = []
        for chunk, future in waiting:
            if not future.done() or future.exception() is not None:
                try:
                    encoded = self._alone(chunk.lines)
                except BrokenProcessPool:
                    encoded = self._line_by_line(chunk.lines)
                future = Future()
                future.set_result(encoded)
            outcomes.append((chunk, future))
        self.close()
        self._pool = self._make(self._options.workers)
        return outcomes

    def _alone(self, lines: Sequence[RawLine]) -> Encoded:
        try:
            return self._pool.submit(_work, lines).result()
        except BrokenProcessPool:
            self.close()
            self._pool = self._make(1)
            raise

    def _line_by_line(self, lines: Sequence[RawLine]) -> Encoded:
        parts: list[Encoded] = []
        bad_lines: list[tuple[int, BadLine]] = []
        for place, line in enumerate(lines):
            try:
                part = self._alone([line])
            except BrokenProcessPool:
                bad_lines.append((place, BadLine("killed_worker")))
                if len(bad_lines) >= _DEATHS and not parts:
                    raise DataError(
                        f"each of the first {len(bad_lines)} lines of a chunk ended its worker process; read the "
                        f"messages of the workers above, and reduce {flags.WORKERS} if memory is short."
                    ) from None
                continue
            parts.append(part)
            bad_lines += [(place, error) for _, error in part.bad_lines]
        parts = parts or [self._nothing]
        keys = range(len(self._options.keys))
        return Encoded(
            tuple(np.concatenate([part.tokens[key] for part in parts]) for key in keys),
            tuple(np.concatenate([part.lengths[key] for part in parts]) for key in keys),
            sum(part.good for part in parts),
            sum(part.blank for part in parts),
            bad_lines,
            [notes for part in parts for notes in part.notes],
        )


class _Worker:
    """Variables of a worker process."""

    tokenizer: Tokenizer
    options: PreprocessOptions
    deadline = float("inf")


def _initialise(make_tokenizer: Callable[[], Tokenizer], options: PreprocessOptions) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use all processors
    _Worker.tokenizer = make_tokenizer()
    _Worker.options = options
    threading.Thread(target=_watch, args=(options.line_seconds,), daemon=True).start()


def _watch(seconds: float) -> None:
    """End the process when a chunk takes too long or the parent dies.

    A library that is computing cannot be interrupted in another way.
    """
    parent = os.getppid()
    while time.monotonic() < _Worker.deadline and os.getppid() == parent:
        time.sleep(min(seconds / 4, 1.0))
    os._exit(1)


def _work(lines: Sequence[RawLine]) -> Encoded:
    _Worker.deadline = time.monotonic() + _Worker.options.line_seconds
    try:
        return encode_chunk(lines, _Worker.tokenizer, _Worker.options)
    finally:
        _Worker.deadline = float("inf")
