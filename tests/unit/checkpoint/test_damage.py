"""Damaged checkpoints: a load reports the damaged file before it writes any tensor.

The load then falls back to the previous checkpoint.
"""

import ast
import os
import random
import shutil
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_packed.checkpoint
from megatron_packed.checkpoint.background_save import BackgroundSaves
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.sealed_json import seal, unseal
from megatron_packed.checkpoint.shard_file import to_hex
from megatron_packed.checkpoint.shard_reader import ShardReader
from megatron_packed.checkpoint.tensor_shard import TensorShard, split_replicated, whole_tensors
from megatron_packed.files.checksums import crc32c

FLIPS = 300


def flip(path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_300_flipped_bits_300_detected(tmp_path, tools):
    """Check that a flipped bit at a random position of any file is reported.

    Damage of ``latest`` is a warning, and all other damage stops the load. There are three
    checkpoints. In the first the ranks divide all tensors. In the second they split a matrix by
    columns and divide the other tensors. A background save wrote the third.
    """
    state = tools.make_state()
    directories = [
        tools.write_by_hand(tmp_path / "shared", 10, state, 3, 1),
        tools.write_by_hand(tmp_path / "columns", 10, state, 2, 1, share=by_columns),
        written_beside_training(tmp_path / "beside", 10, state),
    ]
    roots = [directory.parent for directory in directories]
    assert any(len(entry) == 5 for entry in ranges_of_weight(directories[1]))
    files = [
        (root, path)
        for root in roots
        for path in [*sorted((root / "step_00000010").iterdir()), root / "latest"]
    ]
    assert len(files) == 5 + 4 + 3
    randomness = random.Random(1234)
    detected = 0
    for root, path in islice(cycle(files), FLIPS):
        position, bit = randomness.randrange(path.stat().st_size), randomness.randrange(8)
        flip(path, position, bit)
        found, lines = tools.blank(state), []
        if path.name == "latest":
            load_checkpoint(root, whole_tensors(found), warn=lines.append)
            assert tools.same_bytes(found, state)
            detected += len(lines) == 1 and str(path) in lines[0]
        else:
            with pytest.raises(CheckpointError) as error:
                load_checkpoint(root, whole_tensors(found), warn=lines.append)
            assert tools.same_bytes(found, tools.blank(state)), (path, position, bit)
            text = str(error.value)
            detected += str(path) in text and "expected" in text and "found" in text
        flip(path, position, bit)
    assert detected == FLIPS
    for root in roots:
        load_checkpoint(root, whole_tensors(found), warn=pytest.fail)
        assert tools.same_bytes(found, state)


def by_columns(state, rank, world_size):
    """Return the shards of one of two tensor-parallel ranks.

    A rank has half of the columns of the weight and half of the elements of all other tensors.
    """
    weight = state["layers.0.mixer.weight"]
    rows, columns = weight.shape
    first, last = rank * columns // world_size, (rank + 1) * columns // world_size
    mine = weight[:, first:last].contiguous().view(-1)
    part = TensorShard(
        name="layers.0.mixer.weight",
        global_shape=tuple(weight.shape),
        start=first,
        end=last,
        rows=rows,
        stride=columns,
        tensor=mine,
    )
    rest = {name: tensor for name, tensor in state.items() if tensor is not weight}
    return [part, *split_replicated(rest, rank, world_size)]


def ranges_of_weight(directory):
    fields = unseal((directory / "manifest.json").read_bytes(), directory / "manifest.json")
    return fields["tensors"]["layers.0.mixer.weight"]["ranges"]


def written_beside_training(root, step, state):
    saves = BackgroundSaves()
    saves.begin(lambda shards: save_checkpoint(root, step, shards, {}), whole_tensors(state))
    return saves.take(wait=True).path


def other_save(directory, tools):
    return tools.write_by_hand(directory.parent / "elsewhere", 30, tools.make_state(3), 2, 9)


def swap(one, two):
    one.rename(one.with_name("third"))
    two.rename(one)
    one.with_name("third").rename(two)


def zero_tail(path, size):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - size)
        file.truncate(path.stat().st_size + size)


def edit_manifest(directory, edit):
    path = directory / "manifest.json"
    fields = unseal(path.read_bytes(), path)
    edit(fields)
    path.write_bytes(seal(fields))


def forge_header(directory):
    """Change a tensor name in a file's header, and adapt the header's checksum in the manifest."""
    path = directory / "rank_00001.safetensors"
    data = path.read_bytes()
    assert data.count(b'"tokens[0:13]"') == 1
    data = data.replace(b'"tokens[0:13]"', b'"tokenz[0:13]"')
    path.write_bytes(data)

    def edit(fields):
        record = fields["files"][1]
        header = np.frombuffer(data[: record["header_bytes"]], dtype=np.uint8)
        record["header_checksum"] = to_hex(crc32c(header))

    edit_manifest(directory, edit)


DAMAGE = {
    "one byte short": lambda d, t: os.truncate(d / "rank_00001.safetensors", size(d, 1) - 1),
    "half": lambda d, t: os.truncate(d / "rank_00001.safetensors", size(d, 1) // 2),
    "cut in the header": lambda d, t: os.truncate(d / "rank_00001.safetensors", 5),
    "empty": lambda d, t: os.truncate(d / "rank_00001.safetensors", 0),
    "zero tail": lambda d, t: zero_tail(d / "rank_00001.safetensors", 512),
    "one byte more": lambda d, t: (d / "rank_00001.safetensors").open("ab").write(b"\0"),
    "deleted": lambda d, t: (d / "rank_00001.safetensors").unlink(),
    "swapped": lambda d, t: swap(d / "rank_00000.safetensors", d / "rank_00001.safetensors"),
    "from another step": lambda d, t: shutil.copy(other_save(d, t) / "rank_00001.safetensors", d),
    "a symbolic link": lambda d, t: (
        (d / "rank_00001.safetensors").rename(d.parent / "elsewhere"),
        (d / "rank_00001.safetensors").symlink_to(d.parent / "elsewhere"),
    ),
    "a symbolic link to itself": lambda d, t: (
        (d / "rank_00001.safetensors").unlink(),
        (d / "rank_00001.safetensors").symlink_to(d / "rank_00001.safetensors"),
    ),
    "a directory": lambda d, t: (
        (d / "rank_00001.safetensors").unlink(),
        (d / "rank_00001.safetensors").mkdir(),
    ),
    "a pipe": lambda d, t: (
        (d / "rank_00001.safetensors").unlink(),
        os.mkfifo(d / "rank_00001.safetensors"),
    ),
    "manifest deleted": lambda d, t: (d / "manifest.json").unlink(),
    "manifest empty": lambda d, t: os.truncate(d / "manifest.json", 0),
    "manifest torn": lambda d, t: os.truncate(
        d / "manifest.json", (d / "manifest.json").stat().st_size - 1
    ),
    "manifest of another step": lambda d, t: shutil.copy(other_save(d, t) / "manifest.json", d),
    "manifest forged to leave the directory": lambda d, t: edit_manifest(
        d, lambda f: f["files"][1].update(name="../step_00000010/rank_00001.safetensors")
    ),
    "manifest forged to another save": lambda d, t: edit_manifest(
        d, lambda f: f.update(save_id="0" * 12)
    ),
    "header and manifest forged to other names": lambda d, t: forge_header(d),
    "the directory is a link": lambda d, t: (
        d.rename(d.parent / "away"),
        d.symlink_to(d.parent / "away"),
    ),
    "the directory is a copy": lambda d, t: (
        shutil.rmtree(d),
        shutil.copytree(d.parent / "step_00000010", d),
    ),
}


def size(directory, rank: int) -> int:
    return (directory / f"rank_{rank:05d}.safetensors").stat().st_size


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_is_loaded(tmp_path, tools, kind):
    old, new = tools.make_state(1), tools.make_state(2)
    tools.write_by_hand(tmp_path, 10, old, 2, 1)
    directory = tools.write_by_hand(tmp_path, 20, new, 2, 2)
    found, lines = tools.blank(new), []
    load_checkpoint(tmp_path, whole_tensors(found), warn=pytest.fail)
    assert tools.same_bytes(found, new)

    DAMAGE[kind](directory, tools)
    shutil.rmtree(tmp_path / "step_00000010")
    wanted = tools.blank(new)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path, whole_tensors(wanted), warn=lambda line: None)
    assert (
        "step_00000020" in str(error.value)
        and "expected" in str(error.value)
        and "found" in str(error.value)
    )
    assert all(tensor.reshape(-1).view(torch.uint8).eq(1).all() for tensor in wanted.values())

    tools.write_by_hand(tmp_path, 10, old, 2, 1)
    loaded = load_checkpoint(tmp_path, whole_tensors(found), warn=lines.append)
    assert loaded.step == 10 and tools.same_bytes(found, old)
    assert any("step_00000020" in line and "expected" in line and "found" in line for line in lines)


def test_a_file_of_another_step_says_so(tmp_path, tools):
    directory = tools.write_by_hand(tmp_path, 20, tools.make_state(2), 2, 2)
    DAMAGE["from another step"](directory, tools)
    with pytest.raises(
        CheckpointError,
        match=r"rank_00001.* \(the header of a file of run_id 'run', step '30', rank '1'\)",
    ):
        load_checkpoint(tmp_path, whole_tensors(tools.make_state(2)), warn=lambda line: None)


def test_a_file_that_changes_between_verification_and_copy_falls_back(tmp_path, tools, monkeypatch):
    """Check that the older checkpoint overwrites values that were copied from the newer one."""
    old, new = tools.make_state(1), tools.make_state(2)
    tools.write_by_hand(tmp_path, 10, old, 2, 1)
    directory = tools.write_by_hand(tmp_path, 20, new, 2, 2)
    opened = []
    original = ShardReader.__init__

    def open_and_damage(reader, path, record):
        opened.append(path.name)
        if len(opened) == 4:  # The fourth open is that of the second file in the copy pass.
            flip(path, record.header_bytes + 5000, 3)
        original(reader, path, record)

    monkeypatch.setattr(ShardReader, "__init__", open_and_damage)
    found, lines = tools.blank(new), []
    assert load_checkpoint(tmp_path, whole_tensors(found), warn=lines.append).step == 10
    assert tools.same_bytes(found, old) and "do not match their checksum" in "".join(lines)
    assert directory.exists()


def test_no_sound_checkpoint_lists_all_reasons(tmp_path, tools):
    state = tools.make_state()
    for sequence, step in enumerate((10, 20, 30), start=1):
        directory = tools.write_by_hand(tmp_path, step, state, 1, sequence)
        flip(directory / "rank_00000.safetensors", 3000, 1)
    (directory / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="the tensors must not be used") as error:
        load_checkpoint(tmp_path, whole_tensors(tools.blank(state)), warn=lambda line: None)
    assert all(f"step_000000{step}/" in str(error.value) for step in (10, 20, 30))


def test_read_tensor_verifies_what_it_reads(tmp_path, tools):
    state = tools.make_state()
    directory = tools.write_by_hand(tmp_path, 10, state, 2, 1)
    # The last byte of the file belongs to a uint8 or bool tensor.
    flip(directory / "rank_00001.safetensors", size(directory, 1) - 1, 0)
    damaged = 0
    for name, tensor in state.items():
        try:
            assert tools.same_bytes({name: read_tensor(directory, name)}, {name: tensor})
        except CheckpointError as error:
            damaged += "do not match their checksum" in str(error)
    assert damaged >= 1
    os.truncate(directory / "rank_00001.safetensors", 10)
    with pytest.raises(CheckpointError, match=r"expected .* bytes, found 10 bytes"):
        read_tensor(directory, "half")


def test_no_pickle_in_the_package():
    """Check that the package uses no pickle, which could run code from a file or another rank.

    torch's object collectives, which pickle their arguments, are also forbidden.
    """
    [folder] = megatron_packed.checkpoint.__path__
    sources = sorted(Path(folder).glob("*.py"))
    assert len(sources) > 10
    forbidden = {
        "pickle",
        "load",
        "save",
        "eval",
        "exec",
        "compile",
        "all_gather_object",
        "broadcast_object_list",
    }
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                assert not {"pickle", "marshal", "shelve"} & {alias.name for alias in node.names}, (
                    source
                )
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("torch", "dist")
            ):
                assert node.attr not in forbidden, source
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), source
