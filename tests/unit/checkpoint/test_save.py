"""Saving by one process: round trips, replacement, retention, killed saves, locks, disks, memory."""

import errno
import os
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file

from megatron_packed.checkpoint.directory import RootLock
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.latest_hint import read_hint
from megatron_packed.checkpoint.load import find_checkpoints, load_checkpoint
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.shard_file import to_hex, write_shard_file
from megatron_packed.checkpoint.tensor_shard import TensorShard, whole_tensors
from megatron_packed.files.checksums import crc32c


def names(root) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root))


@pytest.fixture
def load(tools):
    def load(root, like) -> tuple[dict, int]:
        state = tools.blank(like)
        return state, load_checkpoint(root, whole_tensors(state), warn=pytest.fail).step

    return load


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, tools, load):
    state = tools.make_state()
    state["odd bits".replace(" ", "_")] = torch.tensor(
        [0x7F800000 - 1, 1, -(1 << 31)], dtype=torch.int32
    ).view(torch.float32)  # largest finite, smallest denormal, minus zero
    metadata = {
        "plan": {"step": 3, "epoch": 0},
        "text": "\u00e9\n",
        "float": 0.1,
        "none": None,
        "list": [1, [True]],
    }
    saved = save_checkpoint(
        tmp_path / "new" / "root", 10, whole_tensors(state), metadata, run_id="r", config_hash="h"
    )
    found, _ = load(tmp_path / "new" / "root", state)
    assert tools.same_bytes(found, state)
    loaded = load_checkpoint(saved.path, whole_tensors(found))
    assert (loaded.metadata, loaded.run_id, loaded.config_hash) == (metadata, "r", "h")
    assert saved.path == tmp_path / "new" / "root" / "step_00000010" == loaded.path
    assert names(saved.path) == ["manifest.json", "rank_00000.safetensors"]
    assert saved.num_bytes == (saved.path / "rank_00000.safetensors").stat().st_size
    by_library = load_file(saved.path / "rank_00000.safetensors")
    assert torch.equal(by_library["half[0:15]"].view(5, 3), state["half"])


def test_checksums_are_those_of_the_files_bytes_block_by_block(tmp_path):
    shards = whole_tensors({"w": torch.randn(5000), "v": torch.randn(1024), "u": torch.randn(3)})
    record = write_shard_file(tmp_path / "f", 0, shards, {}, lambda site: None, block_bytes=4096)
    data = (tmp_path / "f").read_bytes()
    assert len(data) == record.size and record.data_bytes == 6027 * 4

    def crc(part: bytes) -> str:
        return to_hex(crc32c(part))

    assert crc(data[: record.header_bytes]) == record.header_checksum
    blocks = [data[i : i + 4096] for i in range(record.header_bytes, len(data), 4096)]
    assert [crc(block) for block in blocks] == list(record.block_checksums) and len(blocks) == 6


def test_a_save_of_nothing_is_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 3, [], {"only": "metadata"})
    assert load_checkpoint(tmp_path, []).metadata == {"only": "metadata"}


def test_keep_last_counts_this_run_alone_and_the_last_published(tmp_path, tools, load):
    state = tools.make_state()
    save_checkpoint(tmp_path, 1000, whole_tensors(state), {}, run_id="other")
    for step in (10, 20, 30, 25):  # After step 30 the run resumes from step 20 and saves step 25.
        saved = save_checkpoint(
            tmp_path, step, whole_tensors(state), {}, run_id="mine", keep_last=2
        )
    assert saved.removed == ("step_00000020",)
    assert names(tmp_path) == [".lock", "latest", "step_00000025", "step_00000030", "step_00001000"]
    assert [c.manifest.step for c in find_checkpoints(tmp_path)] == [25, 30, 1000]
    assert load(tmp_path, state)[1] == 25
    assert read_hint(tmp_path) == {"checkpoint": "step_00000025", "sequence": 5}


def test_keep_every_keeps_multiples_beside_the_newest(tmp_path, tools):
    state = tools.make_state()
    for step in (5, 10, 15, 20, 25):
        save_checkpoint(tmp_path, step, whole_tensors(state), {}, keep_last=1, keep_every=10)
    assert [c.manifest.step for c in find_checkpoints(tmp_path)] == [25, 20, 10]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path, tools):
    state = tools.make_state()
    for step in (10, 20):
        save_checkpoint(tmp_path, step, whole_tensors(state), {})
    os.truncate(tmp_path / "step_00000020" / "rank_00000.safetensors", 100)
    saved = save_checkpoint(tmp_path, 30, whole_tensors(state), {}, keep_last=2)
    assert saved.removed == ()  # Only 30 and 10 can be loaded, so both are kept.


def test_the_same_step_again_replaces_it(tmp_path, tools, load):
    old, new = tools.make_state(1), tools.make_state(2)
    save_checkpoint(tmp_path, 10, whole_tensors(old), {})
    # Damage the checkpoint, as after a fallback to an earlier checkpoint.
    os.truncate(tmp_path / "step_00000010" / "manifest.json", 40)
    save_checkpoint(tmp_path, 10, whole_tensors(new), {})
    saved = save_checkpoint(tmp_path, 10, whole_tensors(old), {})
    assert tools.same_bytes(load_and_ignore(tmp_path, tools, new), old)
    assert len(saved.removed) == 1 and saved.removed[0].startswith("step_00000010.replaced-")
    # The directory without a valid manifest belongs to no run, so it is not removed.
    assert sum("replaced" in name for name in names(tmp_path)) == 1


def load_and_ignore(root, tools, like):
    state = tools.blank(like)
    load_checkpoint(root, whole_tensors(state), warn=lambda line: None)
    return state


def test_leftovers_of_dead_saves_are_removed_and_nothing_else(tmp_path, tools):
    dead = ["step_00000010.tmp-0123456789ab", "step_00000010.deleting-0123456789ab"]
    kept = [
        "step_00000010.tmp-xyz",
        "step_1.tmp-0123456789ab",
        "notes.tmp-0123456789ab",
        "step_00000010.tmp",
    ]
    for name in dead + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "latest.tmp-0123456789ab").write_text("x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "step_00000077.tmp-0123456789ab").symlink_to(tmp_path / "outside")
    save_checkpoint(tmp_path, 20, whole_tensors(tools.make_state()), {})
    assert names(tmp_path) == sorted([".lock", "latest", "outside", "step_00000020", *kept])


def test_two_jobs_cannot_save_into_one_directory(tmp_path, tools):
    lock = RootLock(tmp_path)
    with pytest.raises(
        CheckpointError, match="another process is saving a checkpoint in this directory"
    ):
        save_checkpoint(tmp_path, 20, whole_tensors(tools.make_state()), {})
    lock.close()
    save_checkpoint(tmp_path, 20, whole_tensors(tools.make_state()), {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step must be an integer"),
        ({"step": 1.0}, "step must be an integer"),
        ({"keep_last": 0}, "keep_last must be None"),
        ({"metadata": {"x": (1, 2)}}, "would change when written as JSON"),
        ({"metadata": {1: 2}}, "would change when written as JSON"),
        ({"metadata": {"x": float("nan")}}, "cannot be written as JSON"),
        ({"metadata": {"x": torch.zeros(1)}}, "cannot be written as JSON"),
        (
            {"shards": whole_tensors({"a": torch.zeros(3)}) * 2},
            r"a\[0:3\] occurs twice in the shards of rank 0",
        ),
        (
            {
                "shards": [
                    TensorShard(name="a", global_shape=(4,), start=0, end=3, tensor=torch.zeros(3))
                ]
            },
            "ranges of tensor a end early",
        ),
    ],
)
def test_wrong_arguments_publish_nothing(tmp_path, arguments, message):
    good = {"step": 1, "shards": whole_tensors({"a": torch.zeros(3)}), "metadata": {}}
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, **{**good, **arguments})
    assert set(names(tmp_path)) <= {".lock"}


def save_with_little_room(root) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
    shards = whole_tensors({"w": torch.zeros(5000)})
    with pytest.raises(
        CheckpointError, match=r"(?s)step_00000020\.tmp-.*nothing was published.*rank 0: OSError"
    ) as error:
        save_checkpoint(root, 20, shards, {}, keep_last=1)
    assert os.strerror(errno.EFBIG) in str(error.value)


def test_a_full_disk_is_an_error_that_names_the_path_and_publishes_nothing(tmp_path, tools, load):
    """Check the error of a full disk, with a limit of 6,000 bytes per file.

    The operating system first shortens a write and then fails the next one.
    """
    state = tools.make_state()
    save_checkpoint(tmp_path, 10, whole_tensors(state), {}, keep_last=1)
    assert tools.exit_code_of(save_with_little_room, tmp_path) == 0
    assert names(tmp_path) == [".lock", "latest", "step_00000010"]
    assert load(tmp_path, state)[1] == 10


def save_and_load_48_mib(root) -> None:
    tensor = torch.full((12 << 20,), 1.25)
    small = {"w": torch.ones(1)}  # imports modules, which take memory too
    save_checkpoint(root / "small", 1, whole_tensors(small), {})
    load_checkpoint(root / "small", whole_tensors(small))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save_checkpoint(root, 1, whole_tensors({"w": tensor}), {})
    tensor.fill_(0)
    load_checkpoint(root, whole_tensors({"w": tensor}))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 24 << 10, f"{grown} KiB"
    assert bool((tensor == 1.25).all())


def test_memory_does_not_double(tmp_path, tools):
    """Check that the peak memory grows by less than 24 MiB when 48 MiB are saved and loaded.

    The package needs two buffers of 4 MiB.
    """
    assert tools.exit_code_of(save_and_load_48_mib, tmp_path) == 0


def test_a_file_that_rank_0_does_not_see_as_written_is_not_published(tmp_path, tools, load):
    """Check that file sizes are compared before the publication.

    Sizes differ if the ranks do not share a directory, or if the file system drops data.
    """
    state = tools.make_state()
    save_checkpoint(tmp_path, 10, whole_tensors(state), {}, keep_last=1)

    def drop(site: str) -> None:
        if site == "save.gathered":
            [temporary] = (entry for entry in os.scandir(tmp_path) if ".tmp-" in entry.name)
            os.unlink(os.path.join(temporary, "rank_00000.safetensors"))

    with pytest.raises(
        CheckpointError,
        match=r"rank_00000\.safetensors: rank 0 finds the file of rank 0 missing or with another size: expected",
    ):
        save_checkpoint(tmp_path, 20, whole_tensors(state), {}, keep_last=1, on_site=drop)
    assert names(tmp_path) == [".lock", "latest", "step_00000010"]
    assert load(tmp_path, state)[1] == 10
