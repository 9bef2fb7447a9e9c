"""Attached files: they come back as saved, are removed with their checkpoint, and damage is named."""

import os
from pathlib import Path

import pytest

from megatron_packed.checkpoint import save as save_module
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import load_checkpoint, read_attachments
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.sealed_json import seal, unseal
from megatron_packed.checkpoint.tensor_shard import whole_tensors

TEXTS = {"tokenizer.json": '{"é": "😀"}\n', "template.jinja": ""}


def save(root: Path, step: int, tools, texts: dict[str, str], **more) -> Path:
    shards = whole_tensors(tools.make_state(step))
    return save_checkpoint(root, step, shards, {"step": step}, attached=texts, **more).path


def test_attached_files_come_back_and_count(tmp_path, tools):
    shards = whole_tensors(tools.make_state(1))
    without = save_checkpoint(tmp_path / "a", 1, shards, {})
    saved = save_checkpoint(tmp_path / "b", 1, shards, {}, attached=TEXTS)
    assert saved.num_bytes - without.num_bytes == sum(len(t.encode()) for t in TEXTS.values())
    found = read_attachments(tmp_path / "b")
    assert (found.path, found.metadata, found.texts) == (saved.path, {}, TEXTS)
    assert read_attachments(without.path).texts == {}
    assert read_attachments(tmp_path / "none") is None
    assert read_attachments(tmp_path / "b", step=7) is None
    assert {entry.name for entry in saved.path.iterdir()} == {
        *TEXTS,
        "manifest.json",
        "rank_00000.safetensors",
    }


def test_a_manifest_of_an_earlier_version_has_no_attached_files(tmp_path, tools):
    path = save(tmp_path, 1, tools, {}) / "manifest.json"
    fields = unseal(path.read_bytes(), path)
    del fields["attached"]
    path.write_bytes(seal(fields))
    assert read_manifest(path.parent).attached == ()


DAMAGE = {
    "a changed byte": lambda file: file.write_bytes(file.read_bytes().replace(b'"', b"'", 1)),
    "one byte short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "deleted": lambda file: file.unlink(),
    "a symbolic link": lambda file: (
        file.rename(file.parents[1] / "away"),
        file.symlink_to(file.parents[1] / "away"),
    ),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_is_taken(tmp_path, tools, kind):
    save(tmp_path, 10, tools, {"tokenizer.json": "before"})
    DAMAGE[kind](save(tmp_path, 20, tools, TEXTS) / "tokenizer.json")
    lines: list[str] = []
    found = read_attachments(tmp_path, warn=lines.append)
    assert found.path.name == "step_00000010" and found.texts == {"tokenizer.json": "before"}
    state = tools.blank(tools.make_state(1))
    loaded = load_checkpoint(tmp_path, whole_tensors(state), warn=lines.append)
    assert loaded.step == 10
    assert len(lines) == 2
    for line in lines:
        assert "step_00000020/tokenizer.json" in line and "expected" in line and "found" in line
    with pytest.raises(
        CheckpointError, match=r"is intact.*\n.*step_00000020/tokenizer.json"
    ) as said:
        read_attachments(tmp_path, step=20, warn=lines.append)
    # The error alone names the file, and a process without others is no rank.
    assert len(lines) == 2 and str(said.value).count("tokenizer.json") == 1
    assert "rank" not in str(said.value)


def test_a_text_that_is_too_large_is_refused_before_a_save(tmp_path, tools, monkeypatch):
    monkeypatch.setattr(save_module, "MAX_ATTACHED_BYTES", 8)
    with pytest.raises(CheckpointError, match=r"tokenizer.json has 15 bytes, and .* at most 8"):
        save(tmp_path, 1, tools, TEXTS)
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../x"}, "not a plain name"),
        ({"name": "manifest.json"}, "is listed twice"),
        ({"name": "rank_00000.safetensors"}, "is listed twice"),
        ({"size": 1 << 40}, "tokenizer.json is inconsistent"),
        ({"sha256": "0"}, "tokenizer.json is inconsistent"),
        ({"size": None}, "field 'size'"),
    ],
)
def test_a_forged_record_is_refused(tmp_path, tools, change, message):
    path = save(tmp_path, 1, tools, TEXTS) / "manifest.json"
    fields = unseal(path.read_bytes(), path)
    fields["attached"][0] |= change
    path.write_bytes(seal(fields))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(path.parent)


def test_old_checkpoints_are_removed_with_their_attached_files(tmp_path, tools):
    for step in (1, 2, 3):
        save(tmp_path, step, tools, TEXTS, keep_last=1)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000003"]
