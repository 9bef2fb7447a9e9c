"""Tensors and options of a checkpoint that Megatron wrote with ``--ckpt-format torch_dist``.

The tensors lie in ``.distcp`` files as archives of ``torch.save``, one for each part of a tensor.
``.metadata`` has the place of each part.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.models.convert.megatron.folders import (
    COMMON_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    damage,
    damaged,
    find,
    open_plain,
)
from megatron_packed.models.convert.megatron.pickle_process import (
    METADATA,
    OBJECTS,
    TENSOR,
    TENSOR_CALL,
    PickleProcess,
)
from megatron_packed.models.convert.megatron.restricted_pickle import STORAGE_DTYPES, RefusedPickle
from megatron_packed.models.convert.weight_rows import Shape
from megatron_packed.optim.master_remainders import join_masters

PICKLE = "/data.pkl"
COMMON_STATE = "common_state/"
"""Beginning of the name of the object that newer versions write in place of ``common.pt``."""
BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
"""Beginning of the names of an optimizer's flat buffers, which only the same layout can read."""
_MOST_BYTES_OF_PICKLE = 2**29
_MOST_BYTES_OF_TENSOR_PICKLE = 2**16
_MOST_PARTS = 2**16
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+\.distcp")


class StoredPart(NamedTuple):
    """Part of a tensor, and the place of its archive."""

    begin: Shape
    shape: Shape
    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Tensor of a checkpoint; its parts cover it exactly once.

    Optimizer tensors of older versions are stored as blocks: the number of blocks along each
    dimension, and the flattened elements of one block as an additional last dimension.
    """

    shape: Shape
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]
    blocks: Shape | None = None
    """Shape of the stored tensor, if it is stored as blocks; the places of parts refer to it."""


class TorchDist:
    """Open checkpoint in Megatron's format ``torch_dist``. Close it after use.

    Args:
        directory: a checkpoint, a directory of ``iter_*`` folders, or one with ``weights``.
        iteration: folder to take; the newest when not given.
    Raises:
        CheckpointError: the format is another one, or files are missing, damaged or hostile.
    """

    def __init__(self, directory: Path, iteration: int | None = None) -> None:
        self.directory = find(directory, iteration)
        self._pickles = PickleProcess()
        try:
            self.tensors, self._objects = self._read_metadata()
            self.common = self._read_common()
            self.train_state = self._read_values(self.directory / TRAIN_STATE_FILE)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._pickles.close()

    def read(self, name: str, layer: int | None = None, weight: str | None = None) -> Tensor:
        """Return a whole tensor, or the entry ``layer`` of its first dimension.

        Args:
            weight: bf16 tensor of which tensor ``name`` holds the remainders (``master_remainders.py``),
                to return the masters. They may be stored as float32; a tensor of other numbers than
                remainders is returned, as it holds the masters.
        """
        if weight is not None:
            stored_rest = self.read(name, layer)
            rest = stored_rest.to(torch.int16)
            whole = torch.equal(rest.to(stored_rest.dtype), stored_rest)
            return join_masters(self.read(weight, layer), rest) if whole else stored_rest
        stored = self.tensors[name]
        if layer is not None and stored.blocks is not None and stored.blocks[0] != stored.shape[0]:
            raise damage(self.directory, f"{name} has no block for each layer")
        first = 0 if layer is None else 1
        tensor = torch.empty((stored.blocks or stored.shape)[first:], dtype=stored.dtype)
        for part in stored.parts:
            begin = part.begin
            if layer is not None and not begin[0] <= layer < begin[0] + part.shape[0]:
                continue
            values = self._read_part(name, part, stored.dtype)
            if layer is not None:
                values = values[layer - begin[0]]
            places = zip(begin[first:], values.shape)
            tensor[tuple(slice(place, place + size) for place, size in places)] = values
        return tensor if stored.blocks is None else _of_blocks(tensor, stored.shape[first:])

    def reader(
        self, places: Mapping[str, tuple[str, int | None, str | None]]
    ) -> Callable[[str], Tensor]:
        """Return the function that reads the tensor at a place by the place's name."""
        return lambda name: self.read(*places[name])

    def model_problem(self, args: Mapping[str, Any], rows: int) -> tuple[str, str] | None:
        """Return `arguments.model_problem`, computed in the process with limits."""
        try:
            return self._pickles.model_problem(args, rows)
        except RefusedPickle as error:
            return f"its options take too long to read ({error})", "use another checkpoint"

    def _read_metadata(self) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
        path = self.directory / METADATA_FILE
        metadata = self._unpickle(METADATA, _read_file(path), path)
        assert isinstance(metadata, dict)
        with damaged(path):
            tensors = {
                name: _stored(name, description)
                for name, description in metadata["tensors"].items()
                if not BUCKETS.match(name)
            }
        self.has_buckets = any(map(BUCKETS.match, metadata["tensors"]))
        return tensors, metadata["objects"]

    def _read_common(self) -> dict[str, Any]:
        """Return the plain values of the checkpoint, for example ``args`` and ``iteration``."""
        path = self.directory / COMMON_FILE
        places = [place for name, place in self._objects.items() if name.startswith(COMMON_STATE)]
        if path.exists():
            return self._read_values(path)
        if not places or places[0] is None:
            return {}
        path = self.directory / places[0][0]
        with damaged(path):
            archive = _read_place(self.directory, *places[0])
        return self._values_of(archive, path)

    def _read_values(self, path: Path) -> dict[str, Any]:
        """Return the plain values of a file; empty if there is no such file."""
        return self._values_of(_read_file(path), path) if path.exists() else {}

    def _values_of(self, archive: bytes, path: Path) -> dict[str, Any]:
        """Return the plain values of an archive. A tensor with one element becomes a number."""
        with damaged(path):
            records, _ = _open_archive(archive)
            pickle = records(PICKLE)
        values = self._unpickle(OBJECTS, pickle, path)
        if isinstance(values, list) and len(values) == 1:
            (values,) = values
        if not isinstance(values, dict):
            raise damage(path, "its options are no dictionary")
        with damaged(path):
            return {name: _with_numbers(value, records) for name, value in values.items()}

    def _read_part(self, name: str, part: StoredPart, dtype: torch.dtype) -> Tensor:
        path = self.directory / part.file
        with damaged(path, name):
            records, size = _open_archive(
                _read_place(self.directory, part.file, part.offset, part.length)
            )
            if size(PICKLE) > _MOST_BYTES_OF_TENSOR_PICKLE:
                raise ValueError("the description of a tensor is too long")
            pickle = records(PICKLE)
        description = self._unpickle(TENSOR, pickle, path)
        assert isinstance(description, dict)
        with damaged(path, name):
            if (
                getattr(torch, description["dtype"]) != dtype
                or tuple(description["shape"]) != part.shape
            ):
                raise ValueError(
                    f"{description['dtype']} {description['shape']} contradicts .metadata"
                )
            return _strided(records, description)

    def _unpickle(self, kind: bytes, pickle: bytes, path: Path) -> object:
        """Return the answer to a request of `pickle_process`, which is a dictionary except for ``OBJECTS``."""
        try:
            return self._pickles.read(kind, pickle)
        except RefusedPickle as error:
            raise CheckpointError(
                str(error), path=path, cure="use a checkpoint that Megatron wrote, or copy it again"
            ) from None


def _read_file(path: Path) -> bytes:
    with open_plain(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > _MOST_BYTES_OF_PICKLE:
            raise damage(path, f"it has {size} bytes, but at most {_MOST_BYTES_OF_PICKLE} are read")
        return opened.read(size)


def _read_place(directory: Path, file: str, offset: int, length: int) -> bytes:
    """Return bytes of a ``.distcp`` file in ``directory``."""
    path = directory / _checked_name(file)
    with open_plain(path) as opened:
        if not 0 <= offset <= offset + length <= os.fstat(opened.fileno()).st_size:
            raise damage(path, f"it ends before byte {offset + length}")
        opened.seek(offset)
        return opened.read(length)


def _checked_name(file: Any) -> str:
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        raise ValueError(f"{file!r} is no name of a .distcp file")
    return file


def _open_archive(archive: bytes) -> tuple[Callable[[str], bytes], Callable[[str], int]]:
    """Return functions for the bytes and for the size of a record of a ``torch.save`` archive."""
    opened = zipfile.ZipFile(io.BytesIO(archive))
    (pickle,) = [name for name in opened.namelist() if name.endswith(PICKLE)]
    prefix = pickle.removesuffix(PICKLE)

    def info(record: str) -> zipfile.ZipInfo:
        entry = opened.getinfo(prefix + record)
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(archive):
            raise ValueError(f"{record} is compressed")
        return entry

    def read(record: str) -> bytes:
        return opened.read(info(record))

    if f"{prefix}/byteorder" in opened.namelist() and read("/byteorder") != b"little":
        raise ValueError("it was written with another order of bytes")
    return read, lambda record: info(record).file_size


def _strided(records: Callable[[str], bytes], description: dict[str, Any]) -> Tensor:
    """Return the tensor with a description of `pickle_process`."""
    values = torch.frombuffer(
        bytearray(records(f"/data/{description['key']}")),
        dtype=getattr(torch, description["dtype"]),
    )
    shape, strides, offset = description["shape"], description["strides"], description["offset"]
    if len(shape) != len(strides) or min([offset, *strides]) < 0:
        raise ValueError("its strides do not fit its shape")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if math.prod(shape) and last >= min(len(values), description["count"]):
        raise ValueError("its values end too early")
    return values.as_strided(shape, strides, offset)


def _of_blocks(stored: Tensor, shape: Shape) -> Tensor:
    """Return a tensor of ``shape`` that is stored as blocks."""
    counts = stored.shape[:-1]
    sizes = [size // count for size, count in zip(shape, counts)]
    # (C0, C1, ..., S0 * S1 * ...) -> (C0, C1, ..., S0, S1, ...) -> (C0, S0, C1, S1, ...)
    order = [
        dim for pair in zip(range(len(sizes)), range(len(sizes), 2 * len(sizes))) for dim in pair
    ]
    return stored.reshape(*counts, *sizes).permute(order).reshape(shape)


def _with_numbers(value: object, records: Callable[[str], bytes]) -> object:
    """Return plain values, with the number of each tensor of one element in its place."""
    if isinstance(value, list):
        return [_with_numbers(inner, records) for inner in value]
    if not isinstance(value, dict):
        return value
    if TENSOR_CALL in value:
        tensor = value[TENSOR_CALL]
        return _strided(records, tensor).item() if math.prod(tensor["shape"]) == 1 else None
    return {key: _with_numbers(inner, records) for key, inner in value.items()}


def _stored(name: str, description: dict[str, Any]) -> StoredTensor:
    """Return a tensor of ``.metadata``, whose parts must cover it exactly once."""
    shape = stored_shape = _sizes(description["shape"])
    if description["dtype"] not in STORAGE_DTYPES.values():
        raise ValueError(f"{name} has the data type {description['dtype']}, which is not supported")
    if description["whole_shape"] is not None:
        shape = _sizes(description["whole_shape"])
        _check_blocks(name, shape, stored_shape)
    sizes = {_sizes(begin): _sizes(size) for begin, size in description["chunks"]}
    parts = [
        StoredPart(_sizes(begin), sizes[_sizes(begin)], _checked_name(file), *_sizes(place))
        for begin, file, *place in description["places"]
    ]
    if len(parts) > _MOST_PARTS or len(sizes) != len(parts):
        raise ValueError(f"{name} has {len(parts)} parts, but {len(sizes)} places")
    _check_cover(name, stored_shape, parts)
    return StoredTensor(
        shape=shape,
        dtype=getattr(torch, description["dtype"]),
        parts=tuple(parts),
        blocks=None if description["whole_shape"] is None else stored_shape,
    )


def _check_blocks(name: str, shape: Shape, stored: Shape) -> None:
    """Check that a tensor of ``shape`` consists of the blocks of a stored tensor."""
    counts, size = stored[:-1], stored[-1:]
    fits = len(counts) == len(shape) and all(
        count > 0 and size_of_dim % count == 0 for size_of_dim, count in zip(shape, counts)
    )
    if not fits or math.prod(counts) * math.prod(size) != math.prod(shape):
        raise ValueError(f"{name} has blocks {list(stored)}, which do not fit {list(shape)}")


def _sizes(values: Any) -> Shape:
    if not isinstance(values, list) or any(type(size) is not int or size < 0 for size in values):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple(values)


def _check_cover(name: str, shape: Shape, parts: list[StoredPart]) -> None:
    if any(len(part.begin) != len(shape) or len(part.shape) != len(shape) for part in parts):
        raise ValueError(f"{name} has parts of another rank")
    begins = torch.tensor([part.begin for part in parts], dtype=torch.int64)
    ends = begins + torch.tensor([part.shape for part in parts], dtype=torch.int64)
    stored_shape = torch.tensor(shape, dtype=torch.int64)
    inside = bool((ends <= stored_shape).all())
    for number in range(len(parts) - 1):
        later = slice(number + 1, None)
        meets = (begins[later] < ends[number]) & (begins[number] < ends[later])
        inside = inside and not bool(meets.all(dim=1).any())
    if not inside or sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise ValueError(f"the parts of {name} do not cover its shape {list(shape)} exactly once")
