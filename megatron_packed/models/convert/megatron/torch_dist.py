"""Tensors and options of a checkpoint that Megatron wrote with ``--ckpt-format torch_dist``.

The tensors lie in ``.distcp`` files as archives of ``torch.save``, one for each part of a tensor.
``.metadata`` has the place of each part.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config import flag_names as flags
from megatron_packed.models.convert.megatron.pickle_process import (
    METADATA,
    OBJECTS,
    TENSOR,
    PickleProcess,
)
from megatron_packed.models.convert.megatron.restricted_pickle import DTYPES, RefusedPickle

Shape = tuple[int, ...]
PICKLE = "/data.pkl"
METADATA_FILE, COMMON_FILE, BACKEND_FILE = ".metadata", "common.pt", "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
COMMON_STATE = "common_state/"
"""Beginning of the name of the object that newer versions write in place of ``common.pt``."""
FORMAT = "torch_dist"
_WRITE_AGAIN = "load it with Megatron, and save it in the format torch_dist"
_MOST_BYTES_OF_PICKLE = 2**29
_MOST_BYTES_OF_TENSOR_PICKLE = 2**16
_MOST_PARTS = 2**16
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+\.distcp")


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """Part of a tensor, and the place of its archive."""

    begin: Shape
    shape: Shape
    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Tensor of a checkpoint; its parts cover it exactly once."""

    shape: Shape
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]


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
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._pickles.close()

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """Return a whole tensor, or the entry ``layer`` of its first dimension."""
        stored = self.tensors[name]
        shape = stored.shape if layer is None else (1, *stored.shape[1:])
        whole = torch.empty(shape, dtype=stored.dtype)
        for part in stored.parts:
            if layer is not None and not part.begin[0] <= layer < part.begin[0] + part.shape[0]:
                continue
            values = self._read_part(name, part, stored.dtype)
            begin = part.begin
            if layer is not None:
                values = values[layer - begin[0]].unsqueeze(0)
                begin = (0, *begin[1:])
            whole[tuple(slice(b, b + size) for b, size in zip(begin, values.shape))] = values
        return whole if layer is None else whole[0]

    def _read_metadata(self) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
        path = self.directory / METADATA_FILE
        found = self._unpickle(METADATA, _read_file(path), path)
        with damaged(path):
            tensors = {
                name: _stored(name, about, self.directory)
                for name, about in found["tensors"].items()
            }
        return tensors, found["objects"]

    def _read_common(self) -> dict[str, Any]:
        """Return the plain values of the checkpoint, for example ``args`` and ``iteration``."""
        path = self.directory / COMMON_FILE
        places = [place for name, place in self._objects.items() if name.startswith(COMMON_STATE)]
        if path.is_file():
            archive = _read_file(path)
        elif places and places[0] is not None:
            path = self.directory / places[0][0]
            with damaged(path):
                archive = _read_place(self.directory, *places[0])
        else:
            return {}
        with damaged(path):
            records, _ = _open_archive(archive)
            pickle = records(PICKLE)
        common = self._unpickle(OBJECTS, pickle, path)
        if isinstance(common, list) and len(common) == 1:
            (common,) = common
        if not isinstance(common, dict):
            raise _damage(path, "its options are no dictionary")
        return common

    def _read_part(self, name: str, part: StoredPart, dtype: torch.dtype) -> Tensor:
        path = self.directory / part.file
        with damaged(path, name):
            records, size = _open_archive(
                _read_place(self.directory, part.file, part.offset, part.length)
            )
            if size(PICKLE) > _MOST_BYTES_OF_TENSOR_PICKLE:
                raise ValueError("the description of a tensor is too long")
            pickle = records(PICKLE)
        about = self._unpickle(TENSOR, pickle, path)
        with damaged(path, name):
            if getattr(torch, about["dtype"]) != dtype or tuple(about["shape"]) != part.shape:
                raise ValueError(f"{about['dtype']} {about['shape']} contradicts .metadata")
            values = torch.frombuffer(bytearray(records(f"/data/{about['key']}")), dtype=dtype)
            return _strided(values, about)

    def _unpickle(self, kind: bytes, pickle: bytes, path: Path) -> Any:
        try:
            return self._pickles.read(kind, pickle)
        except RefusedPickle as error:
            raise CheckpointError(
                str(error), path=path, cure="use a checkpoint that Megatron wrote, or copy it again"
            ) from None


def find(directory: Path, iteration: int | None = None) -> Path:
    """Return the folder with ``.metadata`` under ``directory``.

    Raises:
        CheckpointError: there is none, or it has another format.
    """
    if not directory.is_dir():
        raise CheckpointError(
            "is not a directory", path=directory, cure="name the folder that Megatron saved to"
        )
    chosen = _iteration_folder(directory, iteration)
    if (chosen / "weights").is_dir():  # NeMo and Megatron-Bridge
        chosen = chosen / "weights"
    _check_format(chosen)
    return chosen


def _iteration_folder(directory: Path, iteration: int | None) -> Path:
    tracker = directory / TRACKER
    if iteration is None and tracker.is_file():
        text = tracker.read_bytes()[:32].decode("ascii", "replace").strip()
        if text != "release" and not text.isdecimal():
            raise CheckpointError(
                "names no iteration",
                path=tracker,
                cure=f"give the iteration with {flags.CKPT_STEP}",
            )
        name = text if text == "release" else f"iter_{int(text):07d}"
        return directory / name
    if iteration is not None:
        return directory / f"iter_{iteration:07d}"
    folders = sorted(path for path in directory.glob("iter_*") if path.is_dir())
    has_own = (directory / METADATA_FILE).exists() or (directory / "weights").is_dir()
    return directory if has_own or not folders else folders[-1]


def _check_format(folder: Path) -> None:
    cure = _WRITE_AGAIN
    if not folder.is_dir():
        raise CheckpointError("is missing", path=folder, cure="copy the folder again")
    names = sorted(path.name for path in folder.iterdir())
    backend = folder / BACKEND_FILE
    if any(name.startswith("mp_rank_") for name in names):
        raise CheckpointError("has the format torch", path=folder, cure=cure)
    if "modelopt_state" in names:
        raise CheckpointError(
            "has modelopt_state, so its weights are quantised, pruned or distilled",
            path=folder,
            cure="save the checkpoint without ModelOpt",
        )
    if METADATA_FILE not in names:
        cure = "name the folder that Megatron saved to"
        raise CheckpointError(f"has no {METADATA_FILE}", path=folder, cure=cure)
    if not backend.is_file():
        found = f"has no {BACKEND_FILE}, so its format is fsdp_dtensor or torch_dcp"
        raise CheckpointError(found, path=folder, cure=cure)
    with damaged(backend):
        kind = json.loads(backend.read_bytes()[:65536])["sharded_backend"]
    if kind != FORMAT:
        raise CheckpointError(f"has the format {kind}", path=folder, cure=cure)


@contextmanager
def damaged(path: Path, name: str = "") -> Iterator[None]:
    """Report errors of reading damaged data as one sentence."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # damaged bytes make zipfile, json and torch fail in many ways
        raise _damage(path, f"{name}: {error}" if name else str(error)) from None


def _damage(path: Path, reason: str) -> CheckpointError:
    first = " ".join(reason.split())[:300]
    return CheckpointError(f"is damaged ({first})", path=path, cure="copy the checkpoint again")


def _read_file(path: Path) -> bytes:
    size = path.stat().st_size
    if size > _MOST_BYTES_OF_PICKLE:
        raise _damage(path, f"it has {size} bytes, but at most {_MOST_BYTES_OF_PICKLE} are read")
    return path.read_bytes()


def _read_place(directory: Path, file: str, offset: int, length: int) -> bytes:
    """Return bytes of a ``.distcp`` file in ``directory``."""
    path = directory / _checked_name(file)
    if not path.is_file():
        raise CheckpointError("is missing", path=path, cure="copy the checkpoint again")
    if not 0 <= offset <= offset + length <= path.stat().st_size:
        raise _damage(path, f"it ends before byte {offset + length}")
    with path.open("rb") as opened:
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
        found = opened.getinfo(prefix + record)
        if found.compress_type != zipfile.ZIP_STORED or found.file_size > len(archive):
            raise ValueError(f"{record} is compressed")
        return found

    def read(record: str) -> bytes:
        return opened.read(info(record))

    if f"{prefix}/byteorder" in opened.namelist() and read("/byteorder") != b"little":
        raise ValueError("it was written with another order of bytes")
    return read, lambda record: info(record).file_size


def _strided(values: Tensor, about: dict[str, Any]) -> Tensor:
    shape, strides, offset = about["shape"], about["strides"], about["offset"]
    if len(shape) != len(strides) or min([offset, *strides]) < 0:
        raise ValueError("its strides do not fit its shape")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if math.prod(shape) and last >= min(len(values), about["count"]):
        raise ValueError("its values end too early")
    return values.as_strided(shape, strides, offset)


def _stored(name: str, about: dict[str, Any], directory: Path) -> StoredTensor:
    """Return a tensor of ``.metadata``, whose parts must cover it exactly once."""
    shape = _sizes(about["shape"])
    if about["dtype"] not in DTYPES.values():
        raise ValueError(f"{name} has the data type {about['dtype']}, which is not supported")
    sizes = {_sizes(begin): _sizes(size) for begin, size in about["chunks"]}
    parts = []
    for begin, file, offset, length in about["places"]:
        begin = _sizes(begin)
        offset, length = _sizes([offset, length])
        parts.append(
            StoredPart(
                begin=begin,
                shape=sizes[begin],
                file=_checked_name(file),
                offset=offset,
                length=length,
            )
        )
    if len(parts) > _MOST_PARTS or len(sizes) != len(parts):
        raise ValueError(f"{name} has {len(parts)} parts, but {len(sizes)} places")
    _check_cover(name, shape, parts)
    return StoredTensor(shape=shape, dtype=getattr(torch, about["dtype"]), parts=tuple(parts))


def _sizes(values: Any) -> Shape:
    if not isinstance(values, list) or any(type(one) is not int or one < 0 for one in values):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple(values)


def _check_cover(name: str, shape: Shape, parts: list[StoredPart]) -> None:
    if any(len(part.begin) != len(shape) or len(part.shape) != len(shape) for part in parts):
        raise ValueError(f"{name} has parts of another rank")
    begins = torch.tensor([part.begin for part in parts], dtype=torch.int64)
    ends = begins + torch.tensor([part.shape for part in parts], dtype=torch.int64)
    whole = torch.tensor(shape, dtype=torch.int64)
    inside = bool((ends <= whole).all())
    for number in range(len(parts) - 1):
        later = slice(number + 1, None)
        meets = (begins[later] < ends[number]) & (begins[number] < ends[later])
        inside = inside and not bool(meets.all(dim=1).any())
    if not inside or sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise ValueError(f"the parts of {name} do not cover its shape {list(shape)} exactly once")
