"""Only one run may use a directory; a second run is refused before its first step."""

import pytest

from megatron_packed.checkpoint.directory import claim_directory
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.tensor_shard import whole_tensors


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path, tools):
    first = claim_directory(tmp_path / "new" / "run")
    assert first is not None
    with pytest.raises(
        CheckpointError,
        match=r"another run writes its checkpoints to this directory.*its own --save directory",
    ):
        claim_directory(tmp_path / "new" / "run", patience=0)
    # The lock of the run does not prevent saves of the same run.
    save_checkpoint(tmp_path / "new" / "run", 20, whole_tensors(tools.make_state()), {})
    first.close()
    claim_directory(tmp_path / "new" / "run", patience=0).close()


def test_a_run_waits_for_the_end_of_a_previous_run(tmp_path, monkeypatch):
    first = claim_directory(tmp_path)
    monkeypatch.setattr(
        "megatron_packed.checkpoint.directory.time.sleep", lambda seconds: first.close()
    )
    claim_directory(tmp_path).close()


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"(?s)preparing .*file/run for checkpoints.*NotADirectoryError"
    ):
        claim_directory(tmp_path / "file" / "run")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_directory_was_moved_saves_nothing_more(tmp_path, tools, replaced):
    """Check that a save fails and changes nothing in a directory that replaced the run's own.

    Another run may have claimed the new directory.
    """
    root, moved = tmp_path / "run", tmp_path / "moved"
    lock = claim_directory(root)
    tensors = whole_tensors(tools.make_state())
    save_checkpoint(root, 1, tensors, {}, run_lock=lock)
    root.rename(moved)
    if replaced:
        claim_directory(root, patience=0)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        CheckpointError,
        match=r"run: this is no longer the directory that this run locked; it was moved",
    ):
        save_checkpoint(root, 2, tensors, {}, run_lock=lock)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_that_is_replaced_while_a_save_is_under_way(tmp_path, tools):
    root, lock = tmp_path / "run", claim_directory(tmp_path / "run")

    def exchange(site: str) -> None:
        if site == "save.gathered":
            (root / ".run.lock").rename(tmp_path / "taken away")
            claim_directory(root, patience=0)

    with pytest.raises(
        CheckpointError, match=r"(?s)nothing was published.*is no longer the directory"
    ):
        save_checkpoint(
            root, 1, whole_tensors(tools.make_state()), {}, run_lock=lock, on_site=exchange
        )
    assert sorted(path.name for path in root.iterdir()) == [".lock", ".run.lock"]


@pytest.mark.parametrize(
    "site", ["save.directory_made", "shard.synced", "save.gathered", "save.durable"]
)
def test_a_directory_that_is_moved_while_a_save_is_under_way(site, tmp_path, tools):
    """Check that the error names the moved directory, at any point of the save."""
    root, lock = tmp_path / "run", claim_directory(tmp_path / "run")
    move = lambda passed: root.rename(tmp_path / "moved") if passed == site else None  # noqa: E731
    with pytest.raises(
        CheckpointError,
        match=r"rank 0: \S+/run: this is no longer the directory that this run locked",
    ):
        save_checkpoint(root, 1, whole_tensors(tools.make_state()), {}, run_lock=lock, on_site=move)
    assert not root.exists()


def test_leftovers_of_the_last_save_are_gone_when_the_next_run_starts(tmp_path):
    names = [
        "step_00000010.deleting-0123456789ab",
        "step_00000020.tmp-0123456789ab",
        "latest.tmp-0123456789ab",
        "STATUS.json.tmp-0123456789ab",
    ]
    for name in names[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_text("x")
    for name in names[2:]:
        (tmp_path / name).write_text("x")
    (tmp_path / "step_00000010.mine").mkdir()
    claim_directory(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        ".run.lock",
        "step_00000010.mine",
    ]
