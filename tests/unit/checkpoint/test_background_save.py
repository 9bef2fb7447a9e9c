"""Background saves: they store the state at their beginning, run one at a time and report errors.

A process that is killed during a background save leaves the previous checkpoint intact.
"""

import os
import signal
import threading
from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import torch

from megatron_packed.checkpoint.background_save import BackgroundSaves, Staging
from megatron_packed.checkpoint.load import find_checkpoints, load_checkpoint
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard, whole_tensors


def write(root, step: int, on_site=lambda site: None):
    """Return the function that a background save calls with the shards."""
    return partial(_write, root, step, on_site)


def _write(root, step, on_site, shards):
    return save_checkpoint(root, step, shards, {"step": step}, run_id="run", on_site=on_site)


@pytest.fixture
def gate():
    """Provide an event; a save waits for it at the point ``shard.opened``."""
    opened = threading.Event()

    def on_site(site: str) -> None:
        if site == "shard.opened":
            assert opened.wait(20)

    opened.on_site = on_site
    yield opened
    opened.set()


def columns_of_rows() -> TensorShard:
    """Return a shard of two columns of each of the three rows of a (3, 5) tensor."""
    tensor = torch.arange(6, dtype=torch.float64)
    return TensorShard(
        name="c", global_shape=(3, 5), start=1, end=3, rows=3, stride=5, tensor=tensor
    )


def test_the_same_bytes_as_a_save_that_waits_and_no_later_ones(tmp_path, tools, gate):
    state = tools.make_state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    waited = save_checkpoint(tmp_path / "one", 10, whole_tensors(state), {"step": 10}, run_id="run")
    saves = BackgroundSaves()
    saves.begin(write(tmp_path / "two", 10, gate.on_site), whole_tensors(state))
    # Simulate the next optimizer step while the file is still empty.
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8).fill_(1)
    assert saves.take(wait=False) is None
    assert find_checkpoints(tmp_path / "two") == []
    gate.set()
    saved = saves.take(wait=True)
    assert saved.path == tmp_path / "two" / "step_00000010"
    assert saves.take(wait=True) is None  # The result is returned only once.
    one, two = (read_manifest(path) for path in (waited.path, saved.path))
    assert one.tensors == two.tensors
    # Headers contain the random identifier of the save, so their checksums differ.
    without_names = partial(replace, header_checksum="")
    assert [without_names(f) for f in one.files] == [without_names(f) for f in two.files]
    found = tools.blank(state)
    load_checkpoint(tmp_path / "two", whole_tensors(found), warn=pytest.fail)
    assert tools.same_bytes(found, before)


def test_staging_memory_is_used_again(tools):
    staging = Staging()
    state = tools.make_state()
    shards = [*whole_tensors(state), columns_of_rows()]
    first = staging.copy(shards)
    address = first[0].tensor.data_ptr()
    for shard, copied in zip(shards, first):
        assert copied.key == shard.key and copied.global_shape == shard.global_shape
        assert copied.dtype == shard.dtype
        assert copied.tensor.data_ptr() != shard.tensor.data_ptr() or not shard.tensor.numel()
        assert torch.equal(copied.tensor.view(torch.uint8), shard.tensor.view(torch.uint8))
    assert staging.copy(shards[:5])[0].tensor.data_ptr() == address
    assert (
        staging.copy(whole_tensors({**state, "more": torch.zeros(1000)}))[0].tensor.numel()
        == 37 * 71
    )


def test_an_error_of_a_save_is_raised_by_take_and_the_next_save_succeeds(tmp_path, tools):
    def full(site: str) -> None:
        if site == "shard.synced":
            raise OSError(28, "No space left on device")

    state, saves = tools.make_state(), BackgroundSaves()
    saves.begin(write(tmp_path, 10), whole_tensors(state))
    assert saves.take(wait=True).step == 10
    saves.begin(write(tmp_path, 20, full), whole_tensors(state))
    with pytest.raises(Exception, match=r"rank 0: OSError: \[Errno 28\] No space left on device"):
        saves.take(wait=True)
    assert [found.manifest.step for found in find_checkpoints(tmp_path)] == [10]
    saves.begin(write(tmp_path, 30), whole_tensors(state))
    assert saves.take(wait=True).step == 30


def save_and_die(root, state: bytes, site: str) -> None:
    """Run a background save of step 20 and kill the process when the save reaches ``site``."""
    saves = BackgroundSaves()
    kill = lambda passed: os.kill(os.getpid(), signal.SIGKILL) if passed == site else None  # noqa: E731
    saves.begin(write(root, 20, kill), whole_tensors(safetensors.torch.load(state)))
    saves.take(wait=True)


@pytest.mark.parametrize(
    "site", ["shard.piece_written", "shard.directory_synced", "manifest.renamed"]
)
def test_a_save_that_is_killed_is_never_the_newest(tmp_path, tools, site):
    old, new = tools.make_state(1), tools.make_state(2)
    _write(tmp_path, 10, lambda site: None, whole_tensors(old))
    assert (
        tools.exit_code_of(save_and_die, tmp_path, safetensors.torch.save(new), site)
        == -signal.SIGKILL
    )
    found = tools.blank(old)
    assert load_checkpoint(tmp_path, whole_tensors(found), warn=pytest.fail).step == 10
    assert tools.same_bytes(found, old)
    _write(tmp_path, 30, lambda site: None, whole_tensors(new))
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step_00000010", "step_00000030"]
