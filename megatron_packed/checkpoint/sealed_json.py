"""Sealed JSON files: ``manifest.json`` and ``latest``.

The last field of the JSON object is the SHA-256 of all bytes before that field. A change of any bit
is detected: the hash covers the body, and the last line must have exactly one form.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError

Json = Any
"""Value that JSON can represent: dict with str keys, list, str, int, float, bool or None."""
JsonFields = dict[str, Json]

_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_SEAL_BYTES = len(b'"sha256": ""\n}\n') + 64
_CURE = "the file is damaged or was not written by megatron_packed; use another checkpoint"


def seal(fields: JsonFields) -> bytes:
    """Encode ``fields`` as JSON, one line per field, and append the hash of all bytes before it."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, sort_keys=True, allow_nan=False)}"
        for key, value in fields.items()
    ]
    body = ("{\n" + ",\n".join(lines) + ",\n").encode()
    return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def unseal(data: bytes, path: Path) -> JsonFields:
    """Return the fields of a sealed file; ``path`` is used in messages.

    Raises:
        CheckpointError: the content does not match the hash, or is not a JSON object.
    """
    fault = partial(CheckpointError, path=path, cure=_CURE)
    body, closing = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    match = _SEAL.fullmatch(closing)
    if match is None:
        raise fault(
            f"the last line of this {len(data)}-byte file is not its checksum",
            expected='"sha256": "<64 hex digits>"',
            found=repr(closing[:120]),
        )
    digest = hashlib.sha256(body).hexdigest().encode()
    if digest != match[1]:
        raise fault(
            "the content does not match its checksum",
            expected=f"sha256 {match[1].decode()}",
            found=digest.decode(),
        )
    fields = parse_object(data, path)
    del fields["sha256"]
    return fields


def parse_object(data: bytes, path: Path, *, finite: bool = True) -> JsonFields:
    """Decode a JSON object under strict rules.

    The data must be UTF-8 without duplicate keys and without excessive nesting. If ``finite``, NaN
    and Infinity are also refused.

    Raises:
        CheckpointError: the data is not such an object.
    """

    fault = partial(CheckpointError, path=path, cure=_CURE)

    def unique(pairs: list[tuple[str, Json]]) -> JsonFields:
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
        raise fault(f"the file is not strict JSON ({reason})") from None
    if not isinstance(value, dict):
        raise fault(
            "the file is not a JSON object",
            expected="an object",
            found=type(value).__name__,
        )
    return value


def open_plain_file(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        CheckpointError: the file is missing, or is a symbolic link, pipe, device or directory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "a symbolic link" if path.is_symlink() else (error.strerror or str(error))
        raise CheckpointError(
            "the file cannot be opened",
            path=path,
            expected="a regular file",
            found=reason,
            cure="use another checkpoint, or restore the file",
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            "this path is not a regular file",
            path=path,
            expected="a regular file",
            found="a directory, pipe or device",
            cure="a checkpoint contains only regular files",
        )
    return descriptor


def read_small_file(path: Path, limit: int) -> bytes:
    """Read all bytes of a regular file of at most ``limit`` bytes.

    Raises:
        CheckpointError: the file is missing, not a regular file, too large or unreadable.
    """
    fault = partial(CheckpointError, path=path, cure=_CURE)
    descriptor = open_plain_file(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise fault(
                "the file is too large for a manifest or the file ``latest``",
                expected=f"at most {limit} bytes",
                found=f"{size} bytes",
            )
        try:
            return file.read(limit)
        except OSError as error:
            raise fault(
                "the file cannot be read",
                expected=f"{size} bytes",
                found=str(error),
            ) from None
