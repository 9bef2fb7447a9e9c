"""Reader of plain text files: each file is one document, as a line of JSON with its ``text``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_packed.data.sources.compression import Blocks
from megatron_packed.data.sources.jsonl_lines import (
    START_BYTES,
    WHITE_SPACE,
    WHOLE_FILE,
    LineReader,
    RawLine,
    start_of,
    without_mark,
)
from megatron_packed.data.sources.line_schema import TEXT_SCHEMA

_JSON_START = re.compile(rb"\{|\[[ \t\r\n]*[\[{\"'\]]")
"""Beginning of a file of JSON lines or of a JSON array. Texts may begin with words in brackets."""


def begins_as_json(file: Path) -> bool:
    """Return whether a file begins like JSON lines or a JSON array, whatever its name says."""
    start = without_mark(start_of(iter(Blocks(file)))).lstrip(WHITE_SPACE)
    return _JSON_START.match(start) is not None


class TextReader(LineReader):
    """Iterator over the one `RawLine` of a plain text file; a blank file has a blank line.

    The content of the file never raises an exception. It is unusable if it is not UTF-8, contains
    NUL bytes, is damaged or longer than the limit.

    Args:
        file: a text, plain or compressed.
        max_line_bytes: limit of the text, in decompressed bytes.
    """

    def __iter__(self) -> Iterator[RawLine]:
        content, size = [], 0
        for block in self._blocks:
            content.append(block)
            size += len(block)
            if size > self.max_line_bytes:
                break
        data = without_mark(b"".join(content))
        reason = self._blocks.damage or self._fault(data)
        if reason is not None:
            yield RawLine(1, data[:START_BYTES], reason, WHOLE_FILE)
        elif not data.strip():
            yield RawLine(1, b"", kind=WHOLE_FILE)
        else:
            line = json.dumps({TEXT_SCHEMA: data.decode("utf-8")}, ensure_ascii=False)
            yield RawLine(1, line.encode("utf-8"), kind=WHOLE_FILE)

    def _fault(self, data: bytes) -> str | None:
        """Return the reason why a text cannot be used; None if it can."""
        if len(data) > self.max_line_bytes:
            return "line_too_long"
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16, whose NUL bytes are no damage
            return "invalid_utf8"
        if b"\x00" in data:
            return "nul_byte"
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            return "invalid_utf8"
        return None
