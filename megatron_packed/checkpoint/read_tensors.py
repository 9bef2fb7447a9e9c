"""Reading of tensor ranges from the files of a checkpoint; each block that is read is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_packed.checkpoint.directory import check_sizes
from megatron_packed.checkpoint.errors import CheckpointError, CheckpointMismatchError
from megatron_packed.checkpoint.manifest import Manifest, read_manifest
from megatron_packed.checkpoint.shard_reader import FileSegment, ShardReader
from megatron_packed.checkpoint.tensor_shard import (
    Extent,
    Overlap,
    TensorShard,
    byte_view,
    overlaps,
    shard_key,
)
from megatron_packed.files.regular_files import StrPath

StoredRange = tuple[str, Extent, Overlap | None, Tensor | None]
"""Tuple of a tensor's name, a stored range, the wanted part of that range, and the target's bytes.

The last two are None to read the complete range without a target.
"""


def _ranges_by_file(manifest: Manifest, wanted: Sequence[TensorShard]) -> list[list[StoredRange]]:
    """Return for each file the stored ranges that overlap a wanted range."""
    by_file: list[list[StoredRange]] = [[] for _ in manifest.files]
    for shard in wanted:
        data = byte_view(shard.tensor)
        for extent, index in manifest.tensors[shard.name].ranges:
            for overlap in overlaps(extent, shard.extent):
                by_file[index].append((shard.name, extent, overlap, data))
    return by_file


def open_file(directory: Path, manifest: Manifest, index: int) -> ShardReader:
    """Open a file and compare its header with the manifest: the save, the rank and all ranges.

    Raises:
        CheckpointError: the header and the manifest differ.
    """
    record = manifest.files[index]
    reader = ShardReader(directory / record.name, record)
    expected = {
        shard_key(name, extent): (dtype, (extent.numel,))
        for name, dtype, extent in manifest.held[index]
    }
    stored = {entry.key: (entry.dtype, entry.shape) for entry in reader.header.entries}
    strings = manifest.header_metadata(record.rank)
    if reader.header.metadata == strings and stored == expected:
        return reader
    reader.__exit__()
    if reader.header.metadata != strings:
        raise CheckpointError(
            "the file belongs to another save",
            path=reader.path,
            expected=strings,
            found=reader.header.metadata,
            cure="do not mix files of several checkpoints",
        )
    different = sorted(
        key for key in expected.keys() | stored.keys() if expected.get(key) != stored.get(key)
    )[:5]
    raise CheckpointError(
        "the ranges in the file differ from the ranges in the manifest",
        path=reader.path,
        expected={key: expected.get(key) for key in different},
        found={key: stored.get(key) for key in different},
        cure="do not mix files of several checkpoints",
    )


def locate(reader: ShardReader, ranges: Sequence[StoredRange]) -> list[FileSegment]:
    """Return the segments of the file's data section to read for ``ranges``, in file order."""
    entries = {entry.key: entry for entry in reader.header.entries}
    segments = []
    for name, extent, overlap, data in ranges:
        entry = entries[shard_key(name, extent)]
        segment = FileSegment(begin=entry.begin, end=entry.end, key=entry.key, dtype=entry.dtype)
        if overlap is not None and data is not None:
            source_start, target_start, length, *pitches = (
                number * entry.dtype.itemsize for number in overlap
            )
            rows, pitch, target_pitch = overlap.rows, pitches[1], pitches[2]
            segment = replace(
                segment,
                begin=entry.begin + source_start,
                end=entry.begin + source_start + (rows - 1) * pitch + length,
                target=data[target_start : target_start + (rows - 1) * target_pitch + length],
                rows=rows,
                pitch=pitch,
                target_pitch=target_pitch,
            )
        segments.append(segment)
    return sorted(segments, key=lambda segment: segment.begin)


def fill(
    directory: Path,
    manifest: Manifest,
    wanted: Sequence[TensorShard],
    report: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Copy the wanted ranges into their tensors, and check each block that is read.

    Raises:
        CheckpointError: a file is damaged. Some tensors may have been written.
    """
    for index, ranges in enumerate(_ranges_by_file(manifest, wanted)):
        if ranges:
            with open_file(directory, manifest, index) as reader:
                for _, data in reader.scan(locate(reader, ranges)):
                    report(data.nbytes)


def read_tensor(path: StrPath, name: str, manifest: Manifest | None = None) -> Tensor:
    """Read one complete tensor of a checkpoint directory to the CPU, and verify its blocks.

    The function needs no process group, so tools can use it.

    Args:
        manifest: manifest of the directory; None reads it.
    Raises:
        CheckpointError: the checkpoint has no such tensor, or a file is damaged.
    """
    directory = Path(path)
    manifest = manifest or read_manifest(directory)
    record = manifest.tensors.get(name)
    if record is None:
        some = ", ".join(list(manifest.tensors)[:8])
        raise CheckpointMismatchError(
            f"the checkpoint has no tensor {name!r}",
            path=directory,
            expected=f"one of {len(manifest.tensors)} names: {some}, ...",
            found="none",
            cure="read_manifest(path).tensors lists the names",
        )
    check_sizes(directory, manifest)
    tensor = torch.empty(record.shape, dtype=record.dtype)
    fill(directory, manifest, [TensorShard.whole(name, tensor)])
    return tensor
