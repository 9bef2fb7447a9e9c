"""The manifest of a checkpoint: the file of each range of each tensor, and checksums of all bytes.

``manifest.json`` is a sealed JSON file (`sealed_json.py`). A save writes it last; a directory
without a valid manifest is no checkpoint. A reader checks all fields: file names are plain, sizes
are bounded, the ranges of each tensor cover the tensor exactly, and the ranges of each file fill
the file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path

import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.safetensors_header import MAX_HEADER_BYTES, is_sizes
from megatron_packed.checkpoint.sealed_json import Json, JsonFields, read_small_file, seal, unseal
from megatron_packed.checkpoint.tensor_shard import (
    DTYPE_NAMES,
    NAMED_DTYPES,
    TENSOR_NAME,
    Extent,
    first_not_once,
)

MANIFEST = "manifest.json"
CRC32C = "crc32c"
"""Algorithm of the checksums; no other is read."""
_FORMAT = "megatron_packed checkpoint 1"
MAX_MANIFEST_BYTES = 256 << 20
"""Size limit of a manifest, which bounds the memory of reading one.

With blocks of 4 MiB a manifest needs about 3 MiB per TiB of checkpoint.
"""
MAX_ATTACHED_BYTES = 256 << 20
"""Size limit of an attached file. A tokenizer.json of 250,000 tokens has about 20 MiB."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES_RANGE = (1 << 12, 1 << 26)
_CURE = "megatron_packed did not write this manifest; use another checkpoint"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksums that one file must have."""

    name: str
    rank: int
    size: int
    header_bytes: int
    algorithm: str
    header_checksum: str
    block_bytes: int
    block_checksums: tuple[str, ...]
    """One checksum per ``block_bytes`` bytes of the data section; the last block may be shorter."""

    @property
    def data_bytes(self) -> int:
        return self.size - self.header_bytes

    def to_json(self) -> JsonFields:
        return {**self.__dict__, "block_checksums": list(self.block_checksums)}


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Shape and dtype of a tensor, and the file of each of its ranges."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[tuple[Extent, int], ...]
    """Pairs ``(extent, index into files)`` that contain each element exactly once."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class AttachedFile:
    """Name, size in bytes, and SHA-256 of a text that belongs to the weights, such as a tokenizer."""

    name: str
    size: int
    sha256: str

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> AttachedFile:
        return cls(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def to_json(self) -> JsonFields:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of ``manifest.json``: all that is recorded of a checkpoint except tensor values."""

    run_id: str
    save_id: str
    """Identifier of one save, so that files of two saves of the same step cannot be mixed."""
    step: int
    sequence: int
    """Number of this checkpoint in order of publication under one root.

    The newest checkpoint has the highest number, independent of its step and of the clock.
    """
    world_size: int
    config_hash: str
    metadata: JsonFields
    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord] = field(repr=False)
    attached: tuple[AttachedFile, ...] = ()
    """Files of text; none in older checkpoints."""

    @property
    def all_files(self) -> list[FileRecord | AttachedFile]:
        """Files of tensors, then files of text."""
        return [*self.files, *self.attached]

    @cached_property
    def held(self) -> list[list[tuple[str, torch.dtype, Extent]]]:
        """Ranges in each file, as ``(name, dtype, extent)``."""
        held: list[list[tuple[str, torch.dtype, Extent]]] = [[] for _ in self.files]
        for name, record in self.tensors.items():
            for extent, index in record.ranges:
                held[index].append((name, record.dtype, extent))
        return held

    def header_metadata(self, rank: int) -> dict[str, str]:
        """Return the strings that the header of the file of ``rank`` must contain."""
        return header_metadata(
            run_id=self.run_id,
            save_id=self.save_id,
            step=self.step,
            rank=rank,
            world_size=self.world_size,
            config_hash=self.config_hash,
        )


def header_metadata(
    *, run_id: str, save_id: str, step: int, rank: int, world_size: int, config_hash: str
) -> dict[str, str]:
    return {
        "format": "pt",
        "run_id": run_id,
        "save_id": save_id,
        "step": str(step),
        "rank": str(rank),
        "world_size": str(world_size),
        "config_hash": config_hash,
    }


def encode_manifest(manifest: Manifest) -> bytes:
    stored = {part.name: getattr(manifest, part.name) for part in fields(manifest)}
    return seal(
        {
            "format": _FORMAT,
            **stored,
            "files": [record.to_json() for record in manifest.files],
            "tensors": {
                name: {
                    "shape": list(record.shape),
                    "dtype": DTYPE_NAMES[record.dtype],
                    "ranges": [_encode_range(*part) for part in record.ranges],
                }
                for name, record in manifest.tensors.items()
            },
            "attached": [record.to_json() for record in manifest.attached],
        }
    )


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint directory.

    Raises:
        CheckpointError: the manifest is missing, damaged or written by another program.
    """
    path = directory / MANIFEST
    return decode_manifest(read_small_file(path, MAX_MANIFEST_BYTES), path)


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Check and decode the bytes of a manifest; ``path`` is used in messages.

    Raises:
        CheckpointError: the seal is wrong, the format is unknown, a field is missing or has a wrong
            type, or a file name is not a plain name. Ranges that do not cover their tensor exactly
            or do not fill their file are also errors.
    """
    content = unseal(data, path)
    check = _Fields(content, path, "the manifest")
    if content.get("format") != _FORMAT:
        raise check.fault(
            "the format is unknown",
            expected=repr(_FORMAT),
            found=repr(content.get("format"))[:100],
            cure="read the checkpoint with the version of megatron_packed that wrote it",
        )
    files = tuple(_file_record(value, path) for value in check.take("files", list))
    listed_attached = check.take("attached", list) if "attached" in content else []
    attached = tuple(_attached_file(value, path) for value in listed_attached)
    listed: list[FileRecord | AttachedFile] = [*files, *attached]
    names = [record.name for record in listed]
    if len({*names, MANIFEST}) != len(names) + 1:
        raise check.fault("a file is listed twice", found=sorted(names)[:20])
    manifest = Manifest(
        **check.numbers_and_texts(Manifest),
        metadata=check.take("metadata", dict),
        files=files,
        tensors={
            name: _tensor_record(name, value, len(files), path)
            for name, value in check.take("tensors", dict).items()
        },
        attached=attached,
    )
    for record, held in zip(files, manifest.held):
        num_bytes = sum(extent.numel * dtype.itemsize for _, dtype, extent in held)
        if num_bytes != record.data_bytes:
            raise check.fault(
                f"the ranges of file {record.name} do not fill the file",
                expected=f"{record.data_bytes} bytes",
                found=f"{num_bytes} bytes",
            )
    return manifest


def merge_tensors(parts: Sequence[Mapping[str, Json]], path: Path) -> dict[str, TensorRecord]:
    """Combine the ranges that all ranks wrote into one record per tensor.

    Args:
        parts: ``parts[file index][name] = {shape, dtype, ranges}``.
        path: the checkpoint's directory, used in messages.
    Raises:
        CheckpointError: two ranks disagree on a shape or dtype, or an element was written twice or
            by no rank.
    """
    merged: dict[str, JsonFields] = {}
    for index, part in enumerate(parts):
        for name, value in part.items():
            entry = merged.setdefault(
                name, {"shape": value["shape"], "dtype": value["dtype"], "ranges": []}
            )
            if (entry["shape"], entry["dtype"]) != (value["shape"], value["dtype"]):
                raise CheckpointError(
                    f"rank {index} and a lower rank disagree on tensor {name}",
                    path=path,
                    expected=f"{entry['dtype']} {entry['shape']}",
                    found=f"{value['dtype']} {value['shape']}",
                    cure="give every tensor one global shape and dtype",
                )
            entry["ranges"].extend(_encode_range(Extent(*part), index) for part in value["ranges"])
    for value in merged.values():
        value["ranges"].sort()
    return {name: _tensor_record(name, merged[name], len(parts), path) for name in sorted(merged)}


def _tensor_record(name: str, value: Json, num_files: int, path: Path) -> TensorRecord:
    if not TENSOR_NAME.fullmatch(name):
        raise CheckpointError(
            "a tensor has a name that is not allowed",
            path=path,
            found=repr(name)[:100],
            cure=_CURE,
        )
    check = _Fields(value, path, f"tensor {name}")
    shape, dtype = check.take("shape", list), NAMED_DTYPES.get(check.take("dtype", str))
    if not is_sizes(shape) or dtype is None:
        raise check.fault(
            f"the shape or dtype of tensor {name} is invalid",
            expected=f"sizes and one of {', '.join(NAMED_DTYPES)}",
            found=f"{shape!r} and {value['dtype']!r}"[:200],
        )
    numel = math.prod(shape)
    ranges = []
    for part in check.take("ranges", list):
        extent, index = _decode_range(part) if is_sizes(part) and len(part) in (3, 5) else (None, 0)
        if extent is None or extent.problem(numel) is not None or index >= num_files:
            raise check.fault(
                f"the ranges of tensor {name} do not cover its {numel} elements once each",
                expected=f"a range that ends at {numel} or before, in one of {num_files} files",
                found=repr(part)[:100],
                cure="each element must be in exactly one range",
            )
        ranges.append((extent, index))
    extents = [extent for extent, _ in ranges]
    element = first_not_once(extents, numel)
    if element is not None:
        early = all(extent.last <= element for extent in extents)
        raise check.fault(
            f"the ranges of tensor {name} {'end early' if early else f'do not cover its {numel} elements once each'}",
            expected=f"{numel} elements" if early else f"a range that starts at {element}",
            found=element if early else ", ".join(extent.text for extent in extents)[:100],
            cure="each element must be in exactly one range",
        )
    return TensorRecord(shape=tuple(shape), dtype=dtype, ranges=tuple(ranges))


def encode_extent(extent: Extent) -> list[int]:
    """Return ``[start, end]`` for one row, ``[start, end, rows, stride]`` for several rows."""
    return list(extent) if extent.rows > 1 else [extent.start, extent.end]


def _encode_range(extent: Extent, index: int) -> list[int]:
    """Return ``[start, end, file]``, with ``rows, stride`` appended for several rows."""
    start, end, *row_layout = encode_extent(extent)
    return [start, end, index, *row_layout]


def _decode_range(part: Sequence[int]) -> tuple[Extent, int]:
    start, end, index, *row_layout = part
    return Extent(start, end, *row_layout), index


def _check_name(check: _Fields) -> None:
    """Check that the name of a file is a plain name inside the checkpoint."""
    name = check.take("name", str)
    if not _FILE_NAME.fullmatch(name):
        raise check.fault(
            "a file name is not a plain name inside the checkpoint",
            expected="letters, digits and _.- without a slash",
            found=repr(name)[:200],
        )


def _attached_file(value: Json, path: Path) -> AttachedFile:
    check = _Fields(value, path, "an attached file")
    _check_name(check)
    record = AttachedFile(**check.numbers_and_texts(AttachedFile))
    if record.size > MAX_ATTACHED_BYTES or not _SHA256.fullmatch(record.sha256):
        raise check.fault(
            f"the record of file {record.name} is inconsistent",
            expected=f"at most {MAX_ATTACHED_BYTES} bytes, and a sha256 of 64 hex digits",
            found=f"{record.size} bytes, sha256 {record.sha256}"[:200],
        )
    return record


def _file_record(value: Json, path: Path) -> FileRecord:
    check = _Fields(value, path, "a file record")
    _check_name(check)
    checksums = check.take("block_checksums", list)
    record = FileRecord(**check.numbers_and_texts(FileRecord), block_checksums=tuple(checksums))
    low, high = _BLOCK_BYTES_RANGE
    sound = (
        record.algorithm == CRC32C
        and low <= record.block_bytes <= high
        and record.block_bytes % 8 == 0
        and 8 <= record.header_bytes <= min(record.size, MAX_HEADER_BYTES + 8)
        and len(checksums) == -(-record.data_bytes // record.block_bytes)
        and all(
            isinstance(c, str) and _CHECKSUM.fullmatch(c)
            for c in [record.header_checksum, *checksums]
        )
    )
    if not sound:
        raise check.fault(
            f"the record of file {record.name} is inconsistent",
            expected=f"algorithm {CRC32C}, blocks of {low} to {high} bytes, one checksum per block",
            found=f"algorithm {record.algorithm}, {record.size} bytes, header of {record.header_bytes} bytes, "
            f"blocks of {record.block_bytes} bytes, {len(checksums)} checksums",
        )
    return record


class _Fields:
    """Typed access to one JSON object of the manifest."""

    def __init__(self, value: Json, path: Path, owner: str) -> None:
        self.fault = partial(CheckpointError, path=path, cure=_CURE)
        if not isinstance(value, dict):
            raise self.fault(owner, expected="a JSON object", found=repr(value)[:100])
        self.value = value
        self.owner = owner

    def take(self, key: str, kind: type) -> Json:
        field_value = self.value.get(key)
        if type(field_value) is not kind:
            raise self.fault(
                f"field {key!r} of {self.owner} is missing or has the wrong type",
                expected=kind.__name__,
                found=repr(field_value)[:100],
            )
        if kind is int and not 0 <= self.value[key] < 1 << 62:
            raise self.fault(
                f"field {key!r} of {self.owner} is out of range",
                expected="0 to 2**62",
                found=field_value,
            )
        return field_value

    def numbers_and_texts(self, record: type) -> JsonFields:
        """Return the values of all fields of a dataclass that are an int or a str."""
        kinds = {"int": int, "str": str}
        return {
            part.name: self.take(part.name, kinds[part.type])
            for part in fields(record)
            if part.type in kinds
        }
