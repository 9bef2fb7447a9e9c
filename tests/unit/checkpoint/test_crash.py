"""A crash at any point of the commit protocol leaves the previous or the new checkpoint complete."""

import os
import shutil
import signal
import stat

import pytest
import safetensors.torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.save_sites import SAVE_SITES
from megatron_packed.checkpoint.tensor_shard import whole_tensors

PUBLISHED = SAVE_SITES.index("save.published")


class Crash(BaseException):
    """Exception that no handler of the package catches, to simulate the end of the process."""


def save(root, step, state, on_site=lambda site: None):
    return save_checkpoint(
        root,
        step,
        whole_tensors(state),
        {"step": step},
        keep_last=1,
        on_site=on_site,
        attached={"tokenizer.json": f"of step {step}"},
    )


def at(site: str, action):
    def on_site(passed: str) -> None:
        if passed == site:
            action()

    return on_site


def save_and_die(root, step: int, state: bytes, site: str) -> None:
    save(
        root,
        step,
        safetensors.torch.load(state),
        at(site, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    )


def throw(error: BaseException):
    def action() -> None:
        raise error

    return action


class Disk:
    """Record of synced files and names; ``lose_power`` removes all data that was not synced.

    This data is the contents of files, and the names of files in checkpoint directories.
    """

    def __init__(self, monkeypatch) -> None:
        self.files: dict[int, int] = {}
        self.names: dict[int, set[str]] = {}
        self.sync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self.names[status.st_ino] = set(os.listdir(descriptor))
        else:
            self.files[status.st_ino] = status.st_size

    def lose_power(self, root) -> int:
        lost = 0
        for folder, _, files in os.walk(root):
            synced = (
                self.names.get(os.stat(folder).st_ino, set()) if folder != str(root) else set(files)
            )
            for name in files:
                path = os.path.join(folder, name)
                status = os.stat(path)
                if name not in synced:
                    os.unlink(path)
                    lost += 1
                elif self.files.get(status.st_ino) != status.st_size and name != ".lock":
                    os.truncate(path, status.st_size // 2)
                    lost += 1
        return lost


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
@pytest.mark.parametrize("site", SAVE_SITES)
@pytest.mark.parametrize("death", ["power", "SIGKILL", "ENOSPC"])
def test_crash_matrix(tmp_path, tools, monkeypatch, death, site, again):
    old, new = tools.make_state(1), tools.make_state(2)
    step = 10 if again else 20
    disk = Disk(monkeypatch)
    save(tmp_path, 10, old)
    passed = []
    reached = site != "save.old_moved" or again  # A save of a new step moves no old checkpoint.
    if death == "power":
        try:
            save(tmp_path, step, new, lambda s: (passed.append(s), at(site, throw(Crash()))(s)))
        except Crash:
            disk.lose_power(tmp_path)
    elif death == "SIGKILL":
        code = tools.exit_code_of(save_and_die, tmp_path, step, safetensors.torch.save(new), site)
        assert code == (-signal.SIGKILL if reached else 0)
    else:
        try:
            saved = save(
                tmp_path, step, new, at(site, throw(OSError(28, "No space left on device")))
            )
            after_publication = site.startswith("latest.") or site == "save.old_removed"
            assert not reached or ("No space left" in saved.warnings[0] and after_publication)
        except CheckpointError as error:
            assert "rank 0: OSError: [Errno 28] No space left on device" in str(error)
            assert ("nothing was published" in str(error)) == (SAVE_SITES.index(site) < PUBLISHED)
        # A process that survives the failure removes its temporary directory.
        assert not any(".tmp-" in entry.name for entry in os.scandir(tmp_path))
    if death == "power":
        assert (passed[-1] == site) == reached

    found = tools.blank(old)
    loaded = load_checkpoint(tmp_path, whole_tensors(found), warn=lambda line: None)
    is_new = tools.same_bytes(found, new)
    assert is_new or tools.same_bytes(found, old)
    assert loaded.metadata == {"step": step if is_new else 10}
    assert is_new == (SAVE_SITES.index(site) >= PUBLISHED or not reached)

    save(tmp_path, 30, old)  # The next save succeeds and removes files of the killed save.
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step_00000030"]


def test_every_site_is_passed_in_order_and_none_is_unnamed(tmp_path, tools):
    """Check that `SAVE_SITES` lists all points, so that the test matrix above covers each point.

    A save that replaces and removes a checkpoint reaches all points, for the first time in order.
    """
    state = tools.make_state()
    passed: list[str] = []
    save(tmp_path, 10, state)
    save(tmp_path, 10, state, passed.append)
    assert list(dict.fromkeys(passed)) == list(SAVE_SITES)


def test_names_are_durable_before_the_next_step_relies_on_them(tmp_path, tools, monkeypatch):
    disk = Disk(monkeypatch)
    seen: dict[str, list[str]] = {}

    def on_site(site: str) -> None:
        if site in ("shard.directory_synced", "manifest.durable"):
            [temporary] = (entry for entry in os.scandir(tmp_path) if ".tmp-" in entry.name)
            seen[site] = sorted(disk.names.get(temporary.inode(), ()))
        elif site in ("save.durable", "latest.durable"):
            seen[site] = sorted(disk.names.get(os.stat(tmp_path).st_ino, ()))

    save(tmp_path, 10, tools.make_state(), on_site)
    assert seen == {
        "shard.directory_synced": ["rank_00000.safetensors", "tokenizer.json"],
        "manifest.durable": ["manifest.json", "rank_00000.safetensors", "tokenizer.json"],
        "save.durable": [".lock", "step_00000010"],
        "latest.durable": [".lock", "latest", "step_00000010"],
    }


def test_a_checkpoint_half_removed_is_no_checkpoint(tmp_path, tools, monkeypatch):
    old, new = tools.make_state(1), tools.make_state(2)
    save(tmp_path, 10, old)

    def die(path):
        os.unlink(path / "rank_00000.safetensors")
        raise Crash

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(Crash):
        save(tmp_path, 20, new)
    monkeypatch.undo()
    assert {name.split("-")[0] for name in os.listdir(tmp_path)} == {
        ".lock",
        "latest",
        "step_00000010.deleting",
        "step_00000020",
    }
    found = tools.blank(old)
    # The load does not warn about the partly removed checkpoint.
    load_checkpoint(tmp_path, whole_tensors(found), warn=pytest.fail)
    assert tools.same_bytes(found, new)
