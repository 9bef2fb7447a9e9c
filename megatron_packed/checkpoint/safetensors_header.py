"""Writing and strict reading of the header of a safetensors file.

A file begins with 8 bytes that hold the length n of the header, little endian. Then come n bytes of
JSON ``{key: {dtype, shape, data_offsets}}`` with strings under ``__metadata__``, and then the data.

This package writes the files without the safetensors library. The library needs all tensors of a
file in host memory at once, and returns nothing to checksum or sync. The library can read these
files. This package also reads the header itself, because the numbers in a header decide how much
memory is allocated: each number is checked before it is used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.sealed_json import parse_object
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, NAMED_DTYPES

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
"""Size limit of a header. It bounds the memory that a damaged or forged length can allocate."""
MAX_TENSORS = 100_000
"""Limit of the number of tensors in one file. It bounds the memory of a decoded header."""

_METADATA = "__metadata__"
_OTHER_DTYPES = (
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "F6_E2M3",
    "F6_E3M2",
    "F4",
    "C64",
    "U16",
    "U32",
    "U64",
)
"""Dtypes of the format that are not supported. The 8-bit and smaller ones are quantised weights."""
_OTHER_DTYPE_CURE = "if the weights are quantised, dequantise them and save them in bf16"
_CURE = "the file is damaged or is not a safetensors file; use another checkpoint"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Entry of one tensor in a header; its data is bytes ``[begin, end)`` of the data section."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """Checked header of a file.

    The entries are sorted by offset, do not overlap, and cover the data section without gaps.
    """

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    num_bytes: int
    """Bytes before the data section: 8 bytes of length plus the JSON."""

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].end if self.entries else 0


def lay_out(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[TensorEntry]:
    """Assign offsets in the data section to tensors given as ``(key, dtype, shape)``.

    Tensors with the widest dtype come first, then keys in order, so that each tensor is aligned to
    its dtype.
    """
    entries = []
    offset = 0
    for key, dtype, shape in sorted(tensors, key=lambda tensor: (-tensor[1].itemsize, tensor[0])):
        end = offset + math.prod(shape) * dtype.itemsize
        entries.append(TensorEntry(key=key, dtype=dtype, shape=shape, begin=offset, end=end))
        offset = end
    return entries


def encode_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str], path: Path) -> bytes:
    """Encode the bytes before the data section, padded with spaces to a multiple of 8.

    Raises:
        CheckpointError: the header exceeds ``MAX_TENSORS`` or ``MAX_HEADER_BYTES``.
    """
    fields: dict[str, object] = {_METADATA: dict(metadata)}
    for entry in entries:
        fields[entry.key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(entries) > MAX_TENSORS or len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            "there are too many tensors for one file",
            path=path,
            expected=f"at most {MAX_TENSORS} tensors and {MAX_HEADER_BYTES} header bytes",
            found=f"{len(entries)} tensors and {len(text)} header bytes",
            cure="save fewer, larger ranges per rank",
        )
    return struct.pack("<Q", len(text)) + text


def header_length(first_bytes: bytes, file_size: int, path: Path) -> int:
    """Return the number of bytes before the data section.

    Args:
        first_bytes: first 8 bytes of the file.
        file_size: size of the file in bytes.
        path: path of the file, used in messages.
    Raises:
        CheckpointError: the header would exceed the file or ``MAX_HEADER_BYTES``.
    """
    fault = partial(CheckpointError, path=path, cure=_CURE)
    if len(first_bytes) < LENGTH_BYTES:
        raise fault(
            "the file is too short for a safetensors header",
            expected="at least 8 bytes",
            found=f"{len(first_bytes)} bytes",
        )
    (length,) = struct.unpack("<Q", first_bytes[:LENGTH_BYTES])
    limit = min(MAX_HEADER_BYTES, file_size - LENGTH_BYTES)
    if length > limit:
        raise fault(
            "the header length is out of range",
            expected=f"at most {limit} bytes",
            found=f"{length} bytes",
        )
    return LENGTH_BYTES + int(length)


def parse_header(data: bytes, file_size: int, path: Path) -> Header:
    """Decode and check a header.

    Args:
        data: the first ``header_length`` bytes of the file.
        file_size: size of the file in bytes.
        path: path of the file, used in messages.
    Raises:
        CheckpointError: the header is not strict JSON, has a duplicate name or an unknown dtype, or
            a shape does not match the tensor's bytes. Offsets that overlap, leave a gap, exceed
            the file or are not aligned to the dtype are also errors.
    """
    fault = partial(CheckpointError, path=path, cure=_CURE)
    count = data.count(b'"data_offsets"')
    if count > MAX_TENSORS:
        raise fault(
            "the file has too many tensors",
            expected=f"at most {MAX_TENSORS}",
            found=count,
        )
    fields = parse_object(data[LENGTH_BYTES:], path)
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise fault(f"{_METADATA} is not an object of strings")
    entries = sorted(
        (_entry(key, value, path) for key, value in fields.items()),
        key=lambda e: (e.begin, e.end, e.key),
    )
    offset = 0
    for entry in entries:
        if entry.begin != offset:
            kind = (
                "overlaps the previous tensor"
                if entry.begin < offset
                else "leaves a gap after the previous tensor"
            )
            raise fault(
                f"tensor {entry.key!r} {kind}",
                expected=f"data offset {offset}",
                found=entry.begin,
            )
        offset = entry.end
    if len(data) + offset != file_size:
        raise fault(
            "the tensors do not fill the file",
            expected=f"{len(data) + offset} bytes",
            found=f"{file_size} bytes",
        )
    return Header(entries=tuple(entries), metadata=metadata, num_bytes=len(data))


def _entry(key: str, value: object, path: Path) -> TensorEntry:
    fault = partial(CheckpointError, path=path, cure=_CURE)

    def invalid(what: str, expected: object, actual: object) -> CheckpointError:
        return fault(
            f"{what} of tensor {key!r} is invalid",
            expected=expected,
            found=actual,
        )

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise invalid(
            "the description", "an object with dtype, shape, data_offsets", repr(value)[:200]
        )
    dtype = NAMED_DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if value["dtype"] in _OTHER_DTYPES:
        raise fault(
            f"the dtype {value['dtype']} of tensor {key!r} is not supported; "
            f"{', '.join(NAMED_DTYPES)} are",
            cure=_OTHER_DTYPE_CURE,
        )
    if dtype is None:
        raise invalid("the dtype", "one of " + ", ".join(NAMED_DTYPES), repr(value["dtype"])[:50])
    shape, offsets = value["shape"], value["data_offsets"]
    if not is_sizes(shape):
        raise invalid("the shape", "a list of at most 64 sizes", repr(shape)[:100])
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid("the data offsets", "[begin, end] with begin <= end", repr(offsets)[:100])
    begin, end = offsets
    size = math.prod(shape) * dtype.itemsize
    if end - begin != size:
        raise invalid("the byte count", f"{size} ({value['dtype']} of shape {shape})", end - begin)
    if begin % dtype.itemsize:
        raise invalid("the data offset", f"a multiple of {dtype.itemsize}", begin)
    return TensorEntry(key=key, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def is_sizes(value: object) -> bool:
    """Return whether ``value`` is a list of at most 64 integers from 0 to 2**62 - 1.

    ``True`` and ``False`` do not count as integers.
    """
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    )
