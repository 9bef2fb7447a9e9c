"""Safetensors files of a Hugging Face model and their index, read and written tensor by tensor."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    TensorEntry,
    encode_header,
    header_length,
    lay_out,
    parse_header,
)
from megatron_packed.checkpoint.sealed_json import open_plain_file, parse_object, read_small_file
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, byte_view
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.family import OUTPUT, TABLE, Family
from megatron_packed.models.convert.model_weights import weights_of
from megatron_packed.models.convert.tensor_mismatch import QUANTISED_CURE, check_tensors, some
from megatron_packed.models.convert.weight_rows import Shape, Weight

_INDEX_ENDING = ".index.json"
SINGLE = "model.safetensors"
INDEX = SINGLE + _INDEX_ENDING
MAX_INDEX_BYTES = 64 << 20
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that can be imported."""
ROTARY_BUFFER = ".rotary_emb.inv_freq"
"""End of the names of rotary buffers in old files."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_CURE = "download the model again"


class _StoredTensor(NamedTuple):
    path: Path
    entry: TensorEntry
    data_begin: int


class ModelFiles:
    """Tensors of a model directory: one safetensors file, or several with an index.

    The constructor reads the headers; `read` reads a tensor. Files may be symbolic links, as in the
    cache of the hub. The index may only name files of the directory itself.

    Args:
        single: name of a single file; that of the index is ``single`` and ``.index.json``.

    Raises:
        CheckpointError: the directory has no weights, the index is wrong or names a file outside
            the directory, or a file is damaged or truncated.
    """

    def __init__(self, directory: Path, single: str = SINGLE) -> None:
        self.places: dict[str, _StoredTensor] = {}
        self.aside: dict[str, _StoredTensor] = {}
        self.copies: dict[str, str] = {}
        index, file = directory / f"{single}{_INDEX_ENDING}", directory / single
        if os.path.lexists(index) == os.path.lexists(file):
            raise _no_weights(directory, single, both=os.path.lexists(index))
        listed = _read_index(index) if os.path.lexists(index) else None
        for path in (
            [file] if listed is None else sorted({directory / name for name in listed.values()})
        ):
            for place in _read_places(path):
                self._add(place, listed, index)
        missing = sorted(set(listed or ()) - set(self.places))
        if missing:
            raise CheckpointError(
                f"the index lists tensors that its files do not contain: {some(missing)}",
                path=index,
            )

    def _add(self, place: _StoredTensor, listed: Mapping[str, str] | None, index: Path) -> None:
        key, dtype = place.entry.key, place.entry.dtype
        if listed is not None and listed.get(key) != place.path.name:
            raise CheckpointError(
                f"the index names the wrong file for tensor {key}",
                path=index,
                expected=listed.get(key, "no such tensor"),
                found=place.path.name,
                cure=_CURE,
            )
        if dtype not in WEIGHT_DTYPES:
            allowed = ", ".join(DTYPE_NAMES[dtype] for dtype in WEIGHT_DTYPES)
            quantised = not dtype.is_floating_point
            raise CheckpointError(
                f"the dtype of {key}",
                path=place.path,
                expected=f"one of {allowed}",
                found=DTYPE_NAMES[dtype],
                cure=QUANTISED_CURE if quantised else "save the model in float32 or bf16",
            )
        self.places[key] = place

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(place.entry.shape) for name, place in self.places.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: place.entry.dtype for name, place in self.places.items()}

    def drop_copy(self, table: str, copy: str) -> None:
        """Ignore an output table that equals the embedding table to the bit, in a tied model.

        Such files serve versions of transformers that do not tie the tables of a family.

        Args:
            table: name of the embedding table.
            copy: name of the output table, which a tied model does not have.
        """
        if {table, copy} <= self.places.keys() and torch.equal(self.read(table), self.read(copy)):
            del self.places[copy]
            self.copies[table] = copy  # an export writes both tables again

    def set_aside(self, prefixes: tuple[str, ...]) -> None:
        """Move tensors that are not part of the text model from ``places`` to ``aside``.

        These are the tensors whose names have one of the prefixes, and the rotary buffers of old
        files, which follow from config.json. transformers ignores these buffers, too.
        """
        names = [
            name
            for name in self.places
            if name.startswith(prefixes) or name.endswith(ROTARY_BUFFER)
        ]
        self.aside |= {name: self.places.pop(name) for name in names}

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
        path, entry, data_begin = self.places.get(name) or self.aside[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        view = byte_view(tensor.view(-1)).numpy().data
        with os.fdopen(open_plain_file(path.resolve()), "rb") as file:
            file.seek(data_begin + entry.begin)
            if file.readinto(view) < len(view):
                raise CheckpointError("the file is truncated", path=path, cure=_CURE)
        return tensor


def open_weights(
    directory: Path, family: Family, config: ModelConfig, dtype: torch.dtype
) -> tuple[ModelFiles, dict[str, Weight]]:
    """Open the files of a model, and return them with every model tensor by name.

    Tensors that are not part of the text model are set aside.

    Raises:
        CheckpointError: files are missing, damaged or do not fit the model.
    """
    files = ModelFiles(directory)
    files.set_aside(family.aside(config))
    weights = weights_of(family, config, dtype, files.shapes)
    if not config.untie_embeddings_and_output_weights:
        files.drop_copy(weights[TABLE].parts[0].name, family.outside[OUTPUT])
    check_tensors(files.shapes, weights, config, family.outside[OUTPUT], directory)
    return files, weights


def _no_weights(directory: Path, single: str, *, both: bool) -> CheckpointError:
    present, cure = "neither", "download the weights as safetensors"
    pickles = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth")
    )
    if both:
        present, cure = "both", "remove the file that does not belong to the model"
    elif pickles:
        cure = (
            f"{pickles[0]} is a pickle, which is not read because a pickle can execute code; save the "
            "model as safetensors"
        )
    return CheckpointError(
        "no weights",
        path=directory,
        expected=f"{single} or {single}{_INDEX_ENDING}",
        found=present,
        cure=cure,
    )


def _read_index(path: Path) -> dict[str, str]:
    listed = parse_object(read_small_file(path.resolve(), MAX_INDEX_BYTES), path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError("the index has no weight_map", path=path, cure=_CURE)
    for tensor, name in listed.items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"the file of tensor {tensor} is outside the directory",
                path=path,
                expected="the name of a .safetensors file, without a directory",
                found=repr(name)[:200],
                cure=_CURE,
            )
    return listed


def _read_places(path: Path) -> list[_StoredTensor]:
    if not path.exists():
        raise CheckpointError(
            "does not exist, but the index lists it", path=path, cure="download this file, too"
        )
    descriptor = open_plain_file(path.resolve())
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        first = file.read(LENGTH_BYTES)
        header = parse_header(
            first + file.read(header_length(first, size, path) - LENGTH_BYTES), size, path
        )
    return [_StoredTensor(path, entry, header.num_bytes) for entry in header.entries]


def write_files(
    directory: Path,
    tensors: Sequence[tuple[str, torch.dtype, Shape]],
    value: Callable[[str], Tensor],
    max_file_bytes: int,
) -> None:
    """Write safetensors files, synced to disk, and an index if there are several files.

    Args:
        tensors: name, dtype and shape of each tensor, in the order of the files. Within a file,
            tensors with wider dtypes come first.
        value: returns the tensor of a name, contiguous, with the given dtype and shape.
        max_file_bytes: approximate limit for the tensors of one file.
    """
    files: list[list[tuple[str, torch.dtype, Shape]]] = []
    room = 0
    for tensor in tensors:
        (entry,) = lay_out([tensor])
        if not files or entry.end > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(tensor)
        room -= entry.end
    weight_map: dict[str, str] = {}
    total = 0
    for number, content in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        total += write_safetensors(directory / name, content, value)
        weight_map |= {tensor[0]: name for tensor in content}
    if len(files) > 1:
        text = json.dumps(
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
            indent=2,
        )
        (directory / INDEX).write_text(text + "\n")


def write_safetensors(
    path: Path, content: Sequence[tuple[str, torch.dtype, Shape]], value: Callable[[str], Tensor]
) -> int:
    """Write one file; return the bytes of its tensors."""
    entries: list[TensorEntry] = []
    # Tensors with wider dtypes come first, so that every tensor is aligned.
    for name, dtype, shape in sorted(content, key=lambda tensor: -tensor[1].itemsize):
        (entry,) = lay_out([(name, dtype, shape)])
        begin = entries[-1].end if entries else 0
        entries.append(
            TensorEntry(key=name, dtype=dtype, shape=shape, begin=begin, end=begin + entry.end)
        )
    with path.open("xb") as file:
        file.write(encode_header(entries, {"format": "pt"}, path))
        for entry in entries:
            file.write(byte_view(value(entry.key).view(-1)).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return entries[-1].end


def by_prefix(names: Collection[str]) -> str:
    """Return the number of names with each prefix, or the names if they are patterns.

    Example:
        ``"153 tensors model.visual.*, 19 tensors mtp.*"``
    """
    if all(name.endswith("*") for name in names):
        return ", ".join(names)
    counted = Counter(map(_group, names))
    return ", ".join(f"{count} tensors {group}" for group, count in sorted(counted.items()))


def _group(name: str) -> str:
    if name.endswith(ROTARY_BUFFER):
        return f"*{ROTARY_BUFFER}"
    part = name.split(".")
    return ".".join(part[: 2 if part[0] == "model" else 1]) + ".*"
