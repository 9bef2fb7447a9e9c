"""Reading ranges of tensors out of a checkpoint's files, every block checked on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_packed.checkpoint.directory import check_sizes
from megatron_packed.checkpoint.errors import CheckpointError, CheckpointMismatchError
from megatron_packed.checkpoint.manifest import Manifest, read_manifest
from megatron_packed.checkpoint.shard_file import FileSegment, ShardReader
from megatron_packed.checkpoint.tensor_extent import Extent, Overlap, overlaps
from megatron_packed.checkpoint.tensor_shard import TensorShard, byte_view, shard_key

StoredRange = tuple[str, Extent, Overlap | None, Tensor | None]
"""(tensor name, a stored range, what is wanted of it, uint8 view of what wants it); None twice for
all of it.
"""


def _ranges_by_file(manifest: Manifest, wanted: Sequence[TensorShard]) -> list[list[StoredRange]]:
    """Return for each file its stored ranges of which something is wanted."""
    by_file: list[list[StoredRange]] = [[] for _ in manifest.files]
    for shard in wanted:
        data = byte_view(shard.tensor)
        for extent, index in manifest.tensors[shard.name].ranges:
            for overlap in overlaps(extent, shard.extent):
                by_file[index].append((shard.name, extent, overlap, data))
    return by_file


def open_file(directory: Path, manifest: Manifest, index: int) -> ShardReader:
    """Open a file, check its header against the manifest: same save, same rank, exactly the
    recorded ranges.

    Raises:
        CheckpointError: they differ.
    """
    record = manifest.files[index]
    reader = ShardReader(directory / record.name, record)
    expected = {
        shard_key(name, extent): (dtype, (extent.numel,))
        for name, dtype, extent in manifest.held[index]
    }
    found = {entry.key: (entry.dtype, entry.shape) for entry in reader.header.entries}
    strings = manifest.header_metadata(record.rank)
    if reader.header.metadata == strings and found == expected:
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
    wrong = sorted(
        key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
    )[:5]
    raise CheckpointError(
        "the file holds other ranges than the manifest says",
        path=reader.path,
        expected={key: expected.get(key) for key in wrong},
        found={key: found.get(key) for key in wrong},
        cure="do not mix files of several checkpoints",
    )


def locate(reader: ShardReader, ranges: Sequence[StoredRange]) -> list[FileSegment]:
    """Return the bytes of the file's data section in which stored ranges lie, in order."""
    entries = {entry.key: entry for entry in reader.header.entries}
    segments = []
    for name, extent, overlap, data in ranges:
        entry = entries[shard_key(name, extent)]
        segment = FileSegment(begin=entry.begin, end=entry.end, key=entry.key, dtype=entry.dtype)
        if overlap is not None and data is not None:
            here, there, length, *more = (number * entry.dtype.itemsize for number in overlap)
            rows, pitch, target_pitch = overlap.rows, more[1], more[2]
            segment = replace(
                segment,
                begin=entry.begin + here,
                end=entry.begin + here + (rows - 1) * pitch + length,
                target=data[there : there + (rows - 1) * target_pitch + length],
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
    report: Callable[[int], None] = lambda more: None,
) -> None:
    """Copy the wanted ranges into their tensors, checking every block that is read.

    Raises:
        CheckpointError: damage; some tensors may have been written.
    """
    for index, ranges in enumerate(_ranges_by_file(manifest, wanted)):
        if ranges:
            with open_file(directory, manifest, index) as reader:
                for _, data in reader.scan(locate(reader, ranges)):
                    report(data.nbytes)


def read_tensor(
    path: str | os.PathLike[str], name: str, manifest: Manifest | None = None
) -> Tensor:
    """Return one whole tensor of one checkpoint directory, on the CPU, verified; no process group
    (for tools).

    Args:
        manifest: the directory's, where it has been read already.
    Raises:
        CheckpointError: no such tensor, or damage.
    """
    directory = Path(path)
    manifest = manifest or read_manifest(directory)
    record = manifest.tensors.get(name)
    if record is None:
        some = ", ".join(list(manifest.tensors)[:8])
        raise CheckpointMismatchError(
            f"no tensor {name!r}",
            path=directory,
            expected=f"one of {len(manifest.tensors)} names: {some}, ...",
            found="none",
            cure="read_manifest(path).tensors lists them",
        )
    check_sizes(directory, manifest)
    tensor = torch.empty(record.shape, dtype=record.dtype)
    fill(directory, manifest, [TensorShard.whole(name, tensor)])
    return tensor
