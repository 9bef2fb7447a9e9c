"""Sealed JSON files (manifest, hint): one JSON object whose last field is the SHA-256 of all bytes
before it.

Every bit counts: the body is under the hash, and the closing line is compared byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError

Json = Any
"""A value that JSON can hold: dict with str keys, list, str, int, float, bool, None."""

_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_SEAL_BYTES = len(b'"sha256": ""\n}\n') + 64
_CURE = "the file is damaged or not ours; use another checkpoint"


def seal(fields: dict[str, Json]) -> bytes:
    """``fields`` as a JSON object, one line per field, closed by the hash of everything before it."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, sort_keys=True, allow_nan=False)}"
        for key, value in fields.items()
    ]
    body = ("{\n" + ",\n".join(lines) + ",\n").encode()
    return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def unseal(data: bytes, path: Path) -> dict[str, Json]:
    """The fields of a sealed file; ``path`` is for the message.

    Raises:
        CheckpointError: a byte differs from what was sealed, or the body is not a JSON object.
    """
    body, closing = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    match = _SEAL.fullmatch(closing)
    if match is None:
        raise CheckpointError(
            f"the closing line of this {len(data)}-byte file is not a seal",
            path=path,
            expected='"sha256": "<64 hex digits>"',
            found=repr(closing[:120]),
            cure=_CURE,
        )
    found = hashlib.sha256(body).hexdigest().encode()
    if found != match[1]:
        raise CheckpointError(
            "the content is not what was sealed",
            path=path,
            expected=f"sha256 {match[1].decode()}",
            found=found.decode(),
            cure=_CURE,
        )
    fields = parse_object(data, path)
    del fields["sha256"]
    return fields


def parse_object(data: bytes, path: Path, *, finite: bool = True) -> dict[str, Json]:
    """A JSON object, strictly: UTF-8, no duplicate keys, no bottomless nesting and, if ``finite``,
    no NaN or Infinity.

    Raises:
        CheckpointError: it is none.
    """

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"the key {twice!r} occurs twice")
        return result

    def refuse(constant: str) -> Json:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=refuse if finite else None,
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"not strict JSON ({reason})", path=path, cure=_CURE) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            "not a JSON object",
            path=path,
            expected="an object",
            found=type(value).__name__,
            cure=_CURE,
        )
    return value


def open_plain_file(path: Path) -> int:
    """A read-only descriptor of a regular file: no symbolic link, no pipe, no device.

    Raises:
        CheckpointError: it is missing or something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        found = "a symbolic link" if path.is_symlink() else (error.strerror or str(error))
        raise CheckpointError(
            "cannot be opened",
            path=path,
            expected="a regular file",
            found=found,
            cure="use another checkpoint, or bring the file back",
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            "not a regular file",
            path=path,
            expected="a regular file",
            found="something else",
            cure="a checkpoint holds plain files only",
        )
    return descriptor


def read_small_file(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most ``limit`` bytes.

    Raises:
        CheckpointError: missing, no regular file, larger, or unreadable.
    """
    descriptor = open_plain_file(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(
                "too large to be what its name says",
                path=path,
                expected=f"at most {limit} bytes",
                found=f"{size} bytes",
                cure=_CURE,
            )
        try:
            return file.read(limit)
        except OSError as error:
            raise CheckpointError(
                "cannot be read", path=path, expected=f"{size} bytes", found=str(error), cure=_CURE
            ) from None
