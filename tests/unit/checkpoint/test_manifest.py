"""The manifest: it is read back as written, and a changed manifest is refused.

This includes a forged manifest with a correct hash.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import decode_manifest, merge_tensors, read_manifest
from megatron_packed.checkpoint.sealed_json import seal, unseal

HERE = Path("manifest.json")


@pytest.fixture
def fields(tmp_path, tools) -> dict:
    directory = tools.write_by_hand(tmp_path, 10, tools.make_state(), 2, 1)
    return unseal((directory / "manifest.json").read_bytes(), HERE)


def test_a_manifest_comes_back(fields, tmp_path):
    manifest = read_manifest(tmp_path / "step_00000010")
    assert (manifest.step, manifest.sequence, manifest.world_size, manifest.config_hash) == (
        10,
        1,
        2,
        "c0ffee",
    )
    assert manifest.metadata == {"consumed_tokens": 100}
    assert manifest.tensors["step"].shape == () and manifest.tensors["nothing"].numel == 0
    assert [record.name for record in manifest.files] == [
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    ]
    assert decode_manifest(seal(fields), HERE) == manifest
    assert json.loads((tmp_path / "step_00000010" / "manifest.json").read_text())["step"] == 10


def test_every_bit_of_a_sealed_file_counts():
    data = seal({"a": [1, 2.5, None], "b": "text"})
    assert unseal(data, HERE) == {"a": [1, 2.5, None], "b": "text"}
    for index in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            with pytest.raises(CheckpointError):
                unseal(bytes(damaged), HERE)
    for size in range(len(data)):
        with pytest.raises(CheckpointError):
            unseal(data[:size], HERE)
        with pytest.raises(CheckpointError):
            unseal(data[: size // 2] + data[size // 2 + 1 :], HERE)
    with pytest.raises(CheckpointError):
        unseal(data + b"\n", HERE)


def change(fields: dict, path: str, value) -> None:
    """Set one field of the manifest, given as e.g. ``files.0.name``."""
    *way, last = path.split(".")
    place = fields
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value


FORGED: dict[str, tuple[str, Any, str]] = {
    "traversal": (
        "files.0.name",
        "../rank_00000.safetensors",
        "not a plain name inside the checkpoint",
    ),
    "absolute": ("files.0.name", "/etc/passwd", "not a plain name inside the checkpoint"),
    "hidden": ("files.0.name", ".lock", "not a plain name inside the checkpoint"),
    "dots": ("files.0.name", "..", "not a plain name inside the checkpoint"),
    "newline": ("files.0.name", "a\n", "not a plain name inside the checkpoint"),
    "NUL": ("files.0.name", "a\0b", "not a plain name inside the checkpoint"),
    "same file twice": ("files.1.name", "rank_00000.safetensors", "a file is listed twice"),
    "format": ("format", "megatron_packed checkpoint 2", "the format is unknown"),
    "step is a string": ("step", "10", "field 'step'"),
    "step is a bool": ("step", True, "field 'step'"),
    "negative step": ("step", -1, "field 'step'"),
    "no tensors": ("tensors", [], "field 'tensors'"),
    "metadata": ("metadata", None, "field 'metadata'"),
    "file is a list": ("files.0", [], "expected a JSON object"),
    "algorithm": ("files.0.algorithm", "none", "is inconsistent"),
    "checksum missing": ("files.0.block_checksums", [], "is inconsistent"),
    "checksum is a number": ("files.0.block_checksums.0", 7, "is inconsistent"),
    "checksum in capitals": ("files.0.header_checksum", "ABCDEF01", "is inconsistent"),
    "huge block": ("files.0.block_bytes", 1 << 40, "is inconsistent"),
    "zero block": ("files.0.block_bytes", 0, "is inconsistent"),
    "header past the end": ("files.0.header_bytes", 1 << 24, "is inconsistent"),
    "size": ("files.1.size", 1 << 61, "is inconsistent"),
    "tensor name": ("tensors.a[b", {}, "a name that is not allowed"),
    "dtype": ("tensors.half.dtype", "F99", "shape or dtype of tensor half"),
    "shape": ("tensors.half.shape", [-5, -3], "shape or dtype of tensor half"),
    "more elements than bytes": (
        "tensors.step.shape",
        [1 << 40],
        "ranges of tensor step end early",
    ),
    "hole": ("tensors.half.ranges", [[1, 15, 0]], "starts at 0"),
    "overlap": ("tensors.half.ranges", [[0, 9, 0], [8, 15, 0]], "starts at 9"),
    "beyond the end": ("tensors.half.ranges", [[0, 16, 0]], "ends at 15 or before"),
    "no such file": ("tensors.half.ranges", [[0, 15, 2]], "do not cover its 15 elements"),
    "file -1": ("tensors.half.ranges", [[0, 15, -1]], "do not cover"),
    "other file": ("tensors.step.ranges", [[0, 1, 0]], "do not fill the file"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_manifest_with_a_right_seal_is_refused(kind, fields):
    path, value, message = FORGED[kind]
    change(fields, path, value)
    with pytest.raises(CheckpointError, match=message):
        decode_manifest(seal(fields), HERE)


def test_a_symbolic_link_and_a_pipe_are_no_manifest(tmp_path, tools):
    directory = tools.write_by_hand(tmp_path, 10, tools.make_state(), 1, 1)
    path = directory / "manifest.json"
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="found a symbolic link"):
        read_manifest(directory)
    path.unlink()
    import os

    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_manifest(directory)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [([4], "F32", [0, 2]), ([4], "F32", [1, 4])],
            "do not cover its 4 elements once each",
        ),
        (
            [([4], "F32", [0, 2]), ([4], "F32", [3, 4])],
            "do not cover its 4 elements once each",
        ),
        ([([4], "F32", [0, 2]), None], "end early: expected 4 elements, found 2"),
        (
            [([4], "F32", [0, 2]), ([2, 2], "F32", [2, 4])],
            r"rank 1 .* disagree on tensor w",
        ),
        (
            [([4], "F32", [0, 2]), ([4], "F16", [2, 4])],
            r"expected F32 \[4\], found F16 \[4\]",
        ),
    ],
)
def test_ranks_must_hold_every_element_exactly_once(parts, message):
    def merge(parts):
        names = ("shape", "dtype", "ranges")
        held = [{"w": dict(zip(names, (*part[:2], [part[2]])))} if part else {} for part in parts]
        merge_tensors(held, HERE)

    merge([([4], "F32", [2, 4]), ([4], "F32", [0, 2])])
    with pytest.raises(CheckpointError, match=message):
        merge(parts)
