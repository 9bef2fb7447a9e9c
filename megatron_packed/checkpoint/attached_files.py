"""Attached files of a checkpoint: texts that belong to its weights, for example a tokenizer.

The manifest has the size and the SHA-256 of each attached file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.sealed_json import JsonFields, open_plain_file

MAX_ATTACHED_BYTES = 256 << 20
"""Size limit of an attached file. A tokenizer.json of 250,000 tokens has about 20 MiB."""
_CURE = "restore the file, or use another checkpoint"


@dataclass(frozen=True, kw_only=True)
class AttachedFile:
    """Name, size in bytes, and SHA-256 of one attached file."""

    name: str
    size: int
    sha256: str

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> AttachedFile:
        return cls(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def to_json(self) -> JsonFields:
        return asdict(self)


def attached_problem(texts: Mapping[str, str]) -> str | None:
    """Return why texts cannot be attached to a checkpoint; None if they can."""
    for name, text in texts.items():
        num_bytes = len(text.encode())
        if num_bytes > MAX_ATTACHED_BYTES:
            return (
                f"the file {name} has {num_bytes:,} bytes, and a checkpoint takes files of at most "
                f"{MAX_ATTACHED_BYTES:,}"
            )
    return None


def read_attached(directory: Path, record: AttachedFile) -> str:
    """Read an attached file of a checkpoint, and compare it with the manifest.

    Raises:
        CheckpointError: the file is missing, is no regular file, or differs from the manifest.
    """
    path = directory / record.name
    descriptor = open_plain_file(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        try:
            data = file.read(record.size) if size == record.size else b""
        except OSError as error:
            raise CheckpointError(
                "the file cannot be read", path=path, found=str(error), cure=_CURE
            ) from None
    if size != record.size:
        raise CheckpointError(
            "the file has another size than in the manifest",
            path=path,
            expected=f"{record.size} bytes",
            found=f"{size} bytes",
            cure=_CURE,
        )
    sha256 = AttachedFile.from_bytes(record.name, data).sha256
    if sha256 != record.sha256:
        raise CheckpointError(
            "the content does not match its checksum",
            path=path,
            expected=f"sha256 {record.sha256}",
            found=sha256,
            cure=_CURE,
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            "the file is not UTF-8 text", path=path, found=str(error), cure=_CURE
        ) from None
