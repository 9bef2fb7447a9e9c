"""Reader of JSONL files and JSON arrays, plain or compressed, in bounded memory.

A line ends with ``\\n``. The reader drops a ``\\r`` before ``\\n`` and a byte order mark at the
start of a line. Lines with only white space are counted as blank, not as bad, because files are
often joined with empty lines between them.

A file that begins with ``[`` is a JSON array, on one line or on many. Each element of the array is
one `RawLine`. Elements are separated at the commas outside of strings and brackets, so one element
that is not valid JSON does not affect the others. Several arrays in one file are read as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from megatron_packed.data.sources.compression import Blocks

MAX_LINE_BYTES = 64 * 2**20
"""Default limit of one line or element, in decompressed bytes."""
START_BYTES = 1024
"""Bytes that an unusable line keeps of its beginning."""
_BLANK_START_BYTES = 2**16
"""White space at the start of a file before the reader decides that the file is no array."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WHITE_SPACE = b" \t\r\n"
WHOLE_FILE = "file"
"""`RawLine.kind` of a plain text, of which the file is one document."""


class RawLine(NamedTuple):
    """One line of a file, or one element of an array or row of a table as a line of JSON."""

    number: int
    """Number of the line, element or row in its file, from 1."""
    data: bytes
    """Bytes of the line without the line end. If ``reason`` is set, only the first 1024 bytes."""
    reason: str | None = None
    """Key of `errors.REASONS` if the bytes of the line are unusable, else None."""
    kind: str = "line"
    """``element`` if the file is a JSON array, ``row`` if it is a table, `WHOLE_FILE` if it is one
    text, else ``line``.
    """
    num_lines: int = 1
    """Number of consecutive lines that this value represents: above 1 only for blank lines."""

    @property
    def is_blank(self) -> bool:
        return self.reason is None and not self.data.strip()


class LineReader:
    """Iterator over the `RawLine`s of one file.

    The content of the file never raises an exception. If a compressed stream or an array is
    damaged, or a read fails, the iteration ends with one unusable line.

    Args:
        file: JSONL or JSON arrays, plain or compressed. The first bytes of the file decide, not
            its name.
        max_line_bytes: longer lines and elements are skipped in bounded memory and reported as
            ``line_too_long``.
    """

    def __init__(self, file: Path, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.file = file
        self.max_line_bytes = max_line_bytes
        self.unread_columns: tuple[str, ...] = ()
        """Columns of a table that are not read; none of lines and texts."""
        self._blocks = Blocks(file)

    @property
    def bytes_read(self) -> int:
        """Number of bytes of the file read so far; compressed bytes if the file is compressed."""
        return self._blocks.bytes_read

    def __iter__(self) -> Iterator[RawLine]:
        blocks = iter(self._blocks)
        start = without_mark(start_of(blocks))
        is_array = start.lstrip(WHITE_SPACE).startswith(b"[")
        yield from (self._elements if is_array else self._lines)(chain([start], blocks))

    def _lines(self, blocks: Iterator[bytes]) -> Iterator[RawLine]:
        number, blank = 1, 0
        line = _BytesInPieces(self.max_line_bytes, "line")
        for block in blocks:
            first, *others = block.split(b"\n")
            for piece in others:
                if not line.num_bytes and not first.strip():
                    # Consecutive blank lines become one RawLine, as there may be millions.
                    blank += 1
                else:
                    if blank:
                        yield RawLine(number - blank, b"", num_lines=blank)
                        blank = 0
                    line.add(first)
                    yield line.take(number)
                number += 1
                first = piece
            line.add(first)
        if blank:
            yield RawLine(number - blank, b"", num_lines=blank)
        if self._blocks.damage is not None:
            # The bytes read of the last line may be only its beginning, even if they parse.
            yield line.take(number, self._blocks.damage)
        elif line.num_bytes:
            yield line.take(number)

    def _elements(self, blocks: Iterator[bytes]) -> Iterator[RawLine]:
        number, is_first = 1, True
        element = _BytesInPieces(self.max_line_bytes, "element")
        scanner = _ArrayScanner()
        for block in blocks:
            begin = 0
            for at in scanner.marks(block):
                mark = block[at : at + 1]
                if scanner.is_lost:
                    element.add(block[at:])
                    yield element.take(number, "corrupt_array")
                    return
                if mark == b"[":
                    is_first = True
                else:
                    element.add(block[begin:at])
                    raw_line = element.take(number)
                    if mark == b"," or not is_first or not raw_line.is_blank:  # [] has no element
                        yield raw_line
                        number += 1
                    is_first = False
                begin = at + 1
            if scanner.depth:
                element.add(block[begin:])
        damage = self._blocks.damage or ("corrupt_array" if scanner.depth else None)
        if damage is not None:
            yield element.take(number, damage)


class _BytesInPieces:
    """Bytes of one line or element, which arrive in pieces. Only bytes up to the limit are kept."""

    def __init__(self, max_bytes: int, kind: str) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._kind = kind
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        if not piece:
            return
        self.num_bytes += len(piece)
        if self.num_bytes <= self._max_bytes:
            self._pieces.append(piece)
        else:
            start = b"".join(part[:START_BYTES] for part in (*self._pieces[:START_BYTES], piece))
            self._pieces = [start[:START_BYTES]]

    def take(self, number: int, reason: str | None = None) -> RawLine:
        """Return the line or element, and begin the next one."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        if reason is None and self.num_bytes > self._max_bytes:
            reason = "line_too_long"
        self.num_bytes = 0
        self._pieces = []
        if self._kind == "element":
            data = data.strip(WHITE_SPACE)
        else:
            data = without_mark(data)
            data = data[:-1] if data.endswith(b"\r") else data
        return RawLine(number, data if reason is None else data[:START_BYTES], reason, self._kind)


class _ArrayScanner:
    """Search for the brackets and commas of an array that arrives in blocks."""

    def __init__(self) -> None:
        self.depth = 0
        """Number of open brackets: 0 outside of the array, 1 between its elements."""
        self.is_lost = False
        """True if anything except white space and further arrays comes after an array."""
        self._in_string = False
        self._escaped = False
        """True if the previous block ended with a backslash that escapes the next byte."""

    def marks(self, block: bytes) -> Iterator[int]:
        """Yield the positions of the array's own ``[``, ``,`` and ``]``.

        The position at which `is_lost` becomes True is yielded, too.
        """
        content, at = self._without_escapes(block), 0
        while True:
            if self._in_string:
                quote = content.find(b'"', at)
                if quote < 0:
                    return
                at = quote + 1
                self._in_string = False
            match = _MARKS[min(self.depth, 2)].search(content, at)
            if match is None:
                return
            at, mark = match.end(), match[0]
            if self.depth == 0:
                self.depth = int(mark == b"[")
                self.is_lost = self.depth == 0
                yield match.start()
            elif mark == b'"':
                self._in_string = True
            elif mark in (b"[", b"{"):
                self.depth += 1
            elif mark == b"," or (mark == b"]" and self.depth == 1):
                self.depth -= int(mark == b"]")
                yield match.start()
            elif (
                self.depth > 1
            ):  # a `}` too many stays in its element, which then is not valid JSON
                self.depth -= 1

    def _without_escapes(self, block: bytes) -> bytes:
        """Return the block with other bytes in place of escaped quotes and backslashes."""
        if self._escaped:
            block = b"_" + block[1:]
        if b"\\" in block:
            block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = block.endswith(b"\\")
        return block


_MARKS = (re.compile(rb"[^ \t\r\n]"), re.compile(rb'["{}\[\],]'), re.compile(rb'["{}\[\]]'))
"""Bytes that matter outside of an array, between its elements, and inside of an element."""


def start_of(blocks: Iterator[bytes]) -> bytes:
    """Read blocks up to the first byte that is not white space, and return the joined blocks."""
    start = b""
    for block in blocks:
        start += block
        content = without_mark(start).lstrip(WHITE_SPACE)
        if (content and start not in (b"\xef", b"\xef\xbb")) or len(start) > _BLANK_START_BYTES:
            break
    return start


def without_mark(data: bytes) -> bytes:
    """Return the bytes after a byte order mark."""
    return data[len(_BYTE_ORDER_MARK) :] if data.startswith(_BYTE_ORDER_MARK) else data
