"""Parts of flattened tensors, compared with explicit lists of their elements."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.shard_file import write_shard_file
from megatron_packed.checkpoint.shard_reader import FileSegment, ShardReader
from megatron_packed.checkpoint.tensor_shard import (
    Extent,
    Overlap,
    TensorShard,
    first_not_once,
    overlaps,
    shards_of,
    share_out,
)
from support.random_tensors import normal

ROWS, STRIDE = 6, 10


def elements(extent: Extent) -> list[int]:
    return [number for row in extent.each_row() for number in range(row.start, row.end)]


def drawn(draw: random.Random, stride: int = STRIDE) -> Extent:
    if draw.random() < 0.4:
        start, end = sorted(draw.sample(range(ROWS * STRIDE + 1), 2))
        return Extent(start, end)
    left, right = sorted(draw.sample(range(stride + 1), 2))
    height = ROWS * STRIDE // stride
    top, bottom = sorted(draw.sample(range(height + 1), 2))
    start = top * stride + left
    many = bottom - top > 1
    return Extent(start, start + right - left, bottom - top if many else 1, stride if many else 0)


def test_example_of_the_docstring() -> None:
    extent = Extent(6, 8, rows=2, stride=4)
    assert (
        elements(extent) == [6, 7, 10, 11]
        and extent.text == "6:8+4*2"
        and Extent(6, 8).text == "6:8"
    )
    assert extent.problem(12) is None


def test_cuts() -> None:
    draw = random.Random(1)
    for _ in range(300):
        extent = drawn(draw)
        first, last = sorted(draw.choices(range(extent.numel + 1), k=2))
        pieces = extent.cut(first, last)
        assert [number for piece in pieces for number in elements(piece)] == elements(extent)[
            first:last
        ]
        assert all(piece.problem(ROWS * STRIDE) is None for piece in pieces) and len(pieces) <= 3


@pytest.mark.parametrize("other_stride", [STRIDE, 15])
def test_overlaps(other_stride: int) -> None:
    draw = random.Random(2)
    for _ in range(500):
        one, other = drawn(draw), drawn(draw, other_stride)
        here, there = elements(one), elements(other)
        found = [
            (
                here[o.start_here + row * o.pitch_here + i],
                there[o.start_there + row * o.pitch_there + i],
            )
            for o in overlaps(one, other)
            for row in range(o.rows)
            for i in range(o.length)
        ]
        assert all(a == b for a, b in found)
        assert sorted(a for a, _ in found) == sorted(set(here) & set(there))
    columns = Extent(2, 7, 4, STRIDE)
    assert list(overlaps(columns, columns)) == [Overlap(0, 0, 20)]  # Equal extents need one copy.
    assert list(overlaps(columns, Extent(0, 40))) == [Overlap(0, 2, 5, 4, 5, 10)]


def test_every_element_once() -> None:
    draw = random.Random(3)
    for _ in range(300):
        cuts = sorted({0, STRIDE, *draw.sample(range(1, STRIDE), 2)})
        extents = [Extent(a, b, ROWS, STRIDE) for a, b in itertools.pairwise(cuts)]
        whole = extents.pop(draw.randrange(len(extents)))
        at = draw.randrange(whole.numel + 1)
        extents += whole.cut(0, at) + whole.cut(at, whole.numel)
        draw.shuffle(extents)
        assert first_not_once(extents, ROWS * STRIDE) is None
        lost = extents.pop()
        wrong = first_not_once(extents, ROWS * STRIDE)
        assert wrong is not None and wrong in elements(lost)
        assert first_not_once([*extents, lost, Extent(3, 4)], ROWS * STRIDE) is not None
    assert first_not_once([Extent(0, 5, 12, 5)], 60) is None
    assert first_not_once([Extent(0, 5, 6, 10), Extent(5, 10, 4, 15)], 60) == 0


@pytest.mark.parametrize(
    "extent",
    [
        Extent(0, 0),
        Extent(-1, 2),
        Extent(3, 61),
        Extent(0, 2, 7, 10),
        Extent(8, 11, 2, 10),
        Extent(0, 2, 2, 7),
        Extent(0, 2, 1, 10),
        Extent(0, 2, 3, 0),
        Extent(0, 2, 0, 10),
        Extent(0, 2, -1, 10),
    ],
)
def test_what_is_no_part_of_a_tensor(extent: Extent) -> None:
    assert extent.problem(60) is not None


def test_columns_are_saved_and_loaded_as_few_ranges(tmp_path: Path) -> None:
    """Check a weight that two ranks split by columns.

    Each rank writes its columns under one key, and ranks with any other split can load them.
    """
    whole = normal(3000, 8)
    halves = [
        shards_of(
            "w",
            (3000, 8),
            [Extent(at, at + 4, 3000, 8)],
            whole[:, at : at + 4].contiguous().view(-1),
        )
        for at in (0, 4)
    ]
    first = share_out(halves[0], 0, 2) + share_out(halves[0], 1, 2)
    saved = save_checkpoint(tmp_path, 1, first + halves[1], {})
    assert [shard.key for shard in halves[1]] == ["w[4:8+8*3000]"] and len(first) <= 4
    assert (saved.path / "manifest.json").stat().st_size < 3000
    assert torch.equal(read_tensor(saved.path, "w"), whole)
    for width in (2, 4, 8):
        found = torch.zeros(3000 * width)
        load_checkpoint(tmp_path, shards_of("w", (3000, 8), [Extent(0, width, 3000, 8)], found))
        assert torch.equal(found.view(3000, width), whole[:, :width])
    row = torch.zeros(11)
    load_checkpoint(
        tmp_path, [TensorShard(name="w", global_shape=(3000, 8), start=5, end=16, tensor=row)]
    )
    assert torch.equal(row, whole.view(-1)[5:16])


def test_ranges_that_overlap_are_not_saved(tmp_path: Path) -> None:
    shards = shards_of("w", (4, 8), [Extent(0, 5, 4, 8), Extent(4, 8, 4, 8)], torch.zeros(36))
    with pytest.raises(CheckpointError, match="do not cover its 32 elements once each"):
        save_checkpoint(tmp_path, 1, shards, {})


@pytest.mark.parametrize("width", [1, 5, 16, 23, 5000])
def test_runs_are_read_over_the_edges_of_blocks(width: int, tmp_path: Path) -> None:
    """Check runs that cross block boundaries: blocks of 4,096 bytes, rows of 24 and 5,003 elements."""
    stride = 24 if width < 24 else 5003
    whole = torch.arange(400 * 24 if width < 24 else 7 * stride, dtype=torch.float32)
    rows = len(whole) // stride
    [shard] = shards_of("w", tuple(whole.shape), [Extent(0, len(whole))], whole)
    record = write_shard_file(
        tmp_path / "file", 0, [shard], {}, lambda site: None, block_bytes=4096
    )
    for left in {0, 1, stride - width}:
        if left + width > stride:
            continue
        # The gaps of three elements between the rows must not be written.
        out = torch.full((rows * (width + 3),), -1.0)
        segment = FileSegment(
            begin=4 * left,
            end=4 * ((rows - 1) * stride + left + width),
            key=shard.key,
            dtype=torch.float32,
            target=out[: (rows - 1) * (width + 3) + width].view(torch.uint8),
            rows=rows,
            pitch=4 * stride,
            target_pitch=4 * (width + 3),
        )
        with ShardReader(tmp_path / "file", record) as reader:
            for _ in reader.scan([segment]):
                pass
        assert torch.equal(
            out.view(rows, -1)[:, :width], whole.view(rows, stride)[:, left : left + width]
        )
        assert (out.view(rows, -1)[:, width:] == -1).all()
