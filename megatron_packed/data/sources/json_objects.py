"""Recognition of JSON files that are one object and not JSON lines.

Such a file describes a data set or a model, or it holds its examples in a list under one key.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megatron_packed.config.data_files import COMPRESSED_SUFFIXES
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.sources.compression import Blocks, compression_of

_HEAD_BYTES = 2**16
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]', re.DOTALL)
_BLANK = b"\xef\xbb\xbf \t\r\n"


class ObjectHead(NamedTuple):
    """Properties of the object at the start of a file, from its first 64 KiB."""

    keys: tuple[str, ...]
    """Keys of the object, without those of nested objects."""
    list_key: str | None
    """First key whose value is a list of objects."""
    spans_lines: bool
    """True if the object is on several lines."""
    is_alone: bool | None
    """True if nothing comes after the object; None if the object does not end in the first 64 KiB."""


def read_object_head(file: Path) -> ObjectHead | None:
    """Describe the object with which a file begins; return None if the file begins otherwise."""
    head = b""
    for block in Blocks(file):
        head += block
        if len(head) > _HEAD_BYTES:
            break
    start = head[:_HEAD_BYTES].lstrip(_BLANK)
    if not start.startswith(b"{"):
        return None
    keys, list_key, end = _scan(start)
    after_object = head.lstrip(_BLANK)[end:] if end is not None else b""
    return ObjectHead(
        keys,
        list_key,
        b"\n" in start[:end].rstrip(_BLANK),
        None if end is None else not after_object.strip(),
    )


def _scan(text: bytes) -> tuple[tuple[str, ...], str | None, int | None]:
    """Return the keys of an object, the first key with a list of objects, and the object's end."""
    keys: list[str] = []
    list_key, depth, expects_key, previous_token = None, 0, True, b""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == b"{" and previous_token == b"[" and depth == 2 and list_key is None and keys:
            list_key = keys[-1]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return tuple(keys), list_key, match.end()
        elif depth == 1 and token == b",":
            expects_key = True
        elif depth == 1 and expects_key:
            keys.append(_text(token))
            expects_key = False
        previous_token = token
    return tuple(keys), list_key, None


def _text(token: bytes) -> str:
    try:
        return str(json.loads(token))
    except ValueError:  # not UTF-8, or a control character
        return token[1:-1].decode("utf-8", errors="replace")


def check_no_wrapped_list(file: Path, fields: Collection[str]) -> None:
    """Check that a file is not one object that holds a list of examples under some key.

    Args:
        fields: fields of an example. An object with one of these fields is an example.
    Raises:
        DataError: the file holds such a list. The message has a command that extracts the list.
    """
    head = read_object_head(file)
    if head is None or head.list_key is None or not set(fields).isdisjoint(head.keys):
        return
    if head.is_alone is False or (
        head.is_alone is None and not head.spans_lines and _has_second_line(file)
    ):
        return
    raise DataError(
        f"{file} is one JSON object with its examples under the key {printable(head.list_key, 80)!r}, but examples "
        f"must be lines or a JSON array; extract the array with `{_extraction(file, head.list_key)}`."
    )


def _has_second_line(file: Path) -> bool:
    begun = ended = False
    for block in Blocks(file):
        if not begun:
            block = block.lstrip(_BLANK)
            begun = bool(block)
        if not ended:
            _, newline, block = block.partition(b"\n")
            ended = bool(newline)
        if block.strip():
            return True
    return False


def _extraction(file: Path, key: str) -> str:
    """Return a shell command that writes the list under a key to a file."""
    name = file.name
    for suffix in (*COMPRESSED_SUFFIXES, ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    source, target = shlex.quote(str(file)), shlex.quote(str(file.with_name(f"{name}.list.json")))
    literal = f'"{key}"' if re.fullmatch(r"[\w .-]+", key, re.ASCII) else ascii(key)
    code = f"import json, sys; json.dump(json.load(sys.stdin)[{literal}], sys.stdout)"
    python = f"python3 -c {shlex.quote(code)}"
    program = compression_of(file)
    if program is None:
        return f"{python} < {source} > {target}"
    return f"{program} -dc {source} | {python} > {target}"
