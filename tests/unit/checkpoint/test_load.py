"""Loading by one process: strictness, ranges, choice of the checkpoint, ``latest``, single tensors."""

import os
import shutil

import pytest
import torch

from megatron_packed.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    NoCheckpointError,
)
from megatron_packed.checkpoint.load import find_checkpoints, load_checkpoint, newest_checkpoint
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard, whole_tensors


@pytest.mark.parametrize("writers", [1, 2, 5])
def test_any_ranges_are_put_together_from_any_files(tmp_path, tools, writers):
    state = tools.make_state()
    tools.write_by_hand(tmp_path, 10, state, writers, 1)
    for readers in (1, 2, 3):
        found = tools.blank(state)
        for reader in range(readers):
            wanted = []
            for name, tensor in found.items():
                flat = tensor.view(-1)
                # Readers divide each tensor separately, while writers divide all bytes together.
                cuts = [i * flat.numel() // readers for i in range(readers + 1)]
                start, end = cuts[reader], cuts[reader + 1]
                if start < end:
                    part = flat[start:end]
                    shape = tuple(tensor.shape)
                    wanted.append(
                        TensorShard(
                            name=name, global_shape=shape, start=start, end=end, tensor=part
                        )
                    )
            told = []
            load_checkpoint(
                tmp_path,
                wanted,
                allow_extra=("",),
                on_read=lambda *one, told=told: told.append(one),
            )
            assert told == sorted(told) and told[-1][0] == told[-1][1] > sum(
                shard.tensor.nbytes for shard in wanted
            )
        assert tools.same_bytes(found, state)
    for name, tensor in state.items():
        one = read_tensor(tmp_path / "step_00000010", name)
        assert tools.same_bytes({name: one}, {name: tensor})


def test_only_what_is_wanted_is_touched(tmp_path, tools):
    state = tools.make_state()
    tools.write_by_hand(tmp_path, 10, state, 2, 1)
    flat = torch.zeros(37 * 71)
    part = TensorShard(
        name="layers.0.mixer.weight",
        global_shape=(37, 71),
        start=1000,
        end=1003,
        tensor=flat[1000:1003],
    )
    load_checkpoint(tmp_path, [part], allow_extra=("",))
    expected = torch.zeros(37 * 71)
    expected[1000:1003] = state["layers.0.mixer.weight"].view(-1)[1000:1003]
    assert torch.equal(flat, expected)


def test_a_shape_that_lost_its_dimensions_and_every_other_difference_is_an_error(tmp_path, tools):
    state = tools.make_state()
    tools.write_by_hand(tmp_path, 10, state, 2, 1)
    tools.write_by_hand(tmp_path, 20, state, 2, 2)
    wrong = tools.blank(state)
    wrong["half"] = wrong["half"].view(3, 5)
    wrong["tokens"] = wrong["tokens"].int()
    wrong["new"] = torch.zeros(1)
    del wrong["ids"]
    before = {name: tensor.clone() for name, tensor in wrong.items()}
    lines = []
    with pytest.raises(CheckpointMismatchError) as error:
        load_checkpoint(tmp_path, whole_tensors(wrong), warn=lines.append)
    for part in (
        "step_00000020",
        "new is missing",
        "ids is extra",
        "half is F16 [5, 3], but this run needs F16 [3, 5]",
        "tokens is I64 [13], but this run needs I32 [13]",
        "no tensor was loaded",
        "allow missing and extra tensors by --dist-ckpt-strictness log_all",
    ):
        assert part in str(error.value)
    # No older checkpoint was tried, and no tensor was written.
    assert lines == [] and tools.same_bytes(wrong, before)


def test_names_may_be_allowed_to_differ_by_prefix(tmp_path, tools):
    state = tools.make_state()
    tools.write_by_hand(tmp_path, 10, state, 2, 1)
    wanted = tools.blank(state)
    wanted["rng/rank_1/torch"] = torch.full((4,), 7, dtype=torch.uint8)
    del wanted["rng/rank_0/torch"]
    loaded = load_checkpoint(
        tmp_path, whole_tensors(wanted), allow_missing=("rng/",), allow_extra=("rng/",)
    )
    assert (loaded.missing, loaded.unused) == (("rng/rank_1/torch",), ("rng/rank_0/torch",))
    assert wanted["rng/rank_1/torch"].tolist() == [7] * 4
    with pytest.raises(CheckpointMismatchError, match="rng/rank_1/torch is missing"):
        load_checkpoint(
            tmp_path, whole_tensors(wanted), allow_missing=("r/",), allow_extra=("rng/",)
        )
    with pytest.raises(CheckpointMismatchError, match="rng/rank_0/torch is extra"):
        load_checkpoint(tmp_path, whole_tensors(wanted), allow_missing=("rng/",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_unless_allowed(tmp_path, tools, dtype, value):
    good = {"w": torch.zeros(5000, dtype=dtype), "v": torch.zeros(3)}
    tools.write_by_hand(tmp_path, 10, good, 1, 1)
    bad = {**good, "w": good["w"].clone()}
    bad["w"][4321] = value
    tools.write_by_hand(tmp_path, 20, bad, 2, 2)
    found = tools.blank(good)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"w\[\d+:\d+\] has values that are not finite: expected finite, found",
    ):
        load_checkpoint(tmp_path, whole_tensors(found))
    assert tools.same_bytes(found, tools.blank(good))
    load_checkpoint(tmp_path, whole_tensors(found), check_finite=False)
    assert tools.same_bytes(found, bad)


def test_a_boolean_that_is_neither_0_nor_1_is_damage(tmp_path, tools):
    state = {"flags": torch.full((9,), 2, dtype=torch.uint8).view(torch.bool)}
    tools.write_by_hand(tmp_path, 10, state, 1, 1)
    with pytest.raises(CheckpointError, match="expected booleans 0 and 1"):
        load_checkpoint(tmp_path, whole_tensors(tools.blank(state)), check_finite=False)


def test_newest_means_published_last_and_a_step_can_be_requested(tmp_path, tools):
    for sequence, step in enumerate((10, 30, 20), start=1):
        tools.write_by_hand(tmp_path, step, {"w": torch.tensor(step)}, 1, sequence)
    assert [candidate.manifest.step for candidate in find_checkpoints(tmp_path)] == [20, 30, 10]
    found = torch.tensor(0)
    for step, expected in ((None, 20), (30, 30), (10, 10)):
        assert (
            load_checkpoint(tmp_path, whole_tensors({"w": found}), step=step).step
            == found.item()
            == expected
        )
    assert load_checkpoint(tmp_path / "step_00000030", whole_tensors({"w": found})).step == 30
    # The path that the caller passes may be a symbolic link.
    (tmp_path / "alias").symlink_to(tmp_path / "step_00000010")
    assert (
        load_checkpoint(tmp_path / "alias", whole_tensors({"w": found})).step == found.item() == 10
    )
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 15"):
        load_checkpoint(tmp_path, [], step=15)


LOST = {
    "a changed manifest": lambda step: os.truncate(step / "manifest.json", 90),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "no folder": shutil.rmtree,
}


@pytest.mark.parametrize("kind", LOST)
def test_an_older_checkpoint_never_replaces_the_newest_without_a_word(tmp_path, tools, kind):
    for step in (10, 20):
        save_checkpoint(tmp_path, step, whole_tensors(tools.make_state(step)), {})
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000020"
    LOST[kind](tmp_path / "step_00000020")
    cure = f"--load {tmp_path}/step_00000010 is the newest readable checkpoint"
    with pytest.raises(CheckpointError, match=f"step_00000020.*; {cure}$"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "step_00000010") == tmp_path / "step_00000010"
    assert newest_checkpoint(tmp_path, 10) == tmp_path / "step_00000010"
    reason = "no checkpoint of step 20.*; name a directory" if kind == "no folder" else "manifest"
    with pytest.raises(CheckpointError, match=reason):
        newest_checkpoint(tmp_path, 20)
    # Without the file ``latest``, the name of the damaged folder says that it was newer.
    (tmp_path / "latest").unlink()
    if kind != "no folder":
        with pytest.raises(CheckpointError, match=f"step_00000020.*; {cure}$"):
            newest_checkpoint(tmp_path)


def test_damage_of_an_older_checkpoint_or_of_the_hint_is_no_fault_of_the_newest(tmp_path, tools):
    for step in (10, 20):
        save_checkpoint(tmp_path, step, whole_tensors(tools.make_state(step)), {})
    LOST["no manifest"](tmp_path / "step_00000010")
    (tmp_path / "latest").write_text("{}")
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000020"


@pytest.mark.parametrize("folder, found", [("", "none"), ("absent", "no such directory")])
def test_a_folder_without_checkpoints_is_refused_with_a_cure(tmp_path, folder, found):
    cure = "name a directory that a run saved checkpoints to"
    for read in (newest_checkpoint, lambda path: load_checkpoint(path, [])):
        with pytest.raises(NoCheckpointError, match=f"found {found}; {cure}$"):
            read(tmp_path / folder)


def test_a_folder_of_peft_is_refused_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NoCheckpointError, match=r"is a folder of PEFT.*convert --from-peft"):
        newest_checkpoint(tmp_path)


def test_a_file_of_another_size_has_the_cure_of_a_reader(tmp_path, tools):
    """A save has another cure: the ranks may not share the directory."""
    state = tools.make_state()
    path = save_checkpoint(tmp_path, 10, whole_tensors(state), {}).path
    os.truncate(path / "rank_00000.safetensors", 9)
    said = "the file is missing or has another size .*; use another checkpoint, or restore the file"
    with pytest.raises(CheckpointError, match=f"rank_00000.safetensors: {said}$"):
        read_tensor(path, next(iter(state)))


def test_a_requested_step_has_no_substitute(tmp_path, tools):
    for sequence, step in enumerate((10, 20), start=1):
        tools.write_by_hand(tmp_path, step, {"w": torch.tensor(step)}, 1, sequence)
    os.truncate(tmp_path / "step_00000020" / "rank_00000.safetensors", 9)
    for path, step in ((tmp_path, 20), (tmp_path / "step_00000020", None)):
        with pytest.raises(CheckpointError, match="the wrong size") as error:
            load_checkpoint(
                path, whole_tensors({"w": torch.tensor(0)}), step=step, warn=lambda line: None
            )
        assert not isinstance(error.value, NoCheckpointError)


def test_a_missing_checkpoint_is_distinguished_from_a_damaged_one(tmp_path, tools):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NoCheckpointError):
            load_checkpoint(path, [])
    (tmp_path / "step_00000010.tmp-0123456789ab").mkdir()
    (tmp_path / "step_10").mkdir()
    with pytest.raises(NoCheckpointError):
        load_checkpoint(tmp_path, [])
    directory = tools.write_by_hand(tmp_path, 10, {}, 1, 1)
    (directory / "manifest.json").unlink()
    for path in (tmp_path, directory):
        with pytest.raises(
            CheckpointError, match=r"manifest\.json: the file cannot be opened"
        ) as error:
            load_checkpoint(path, [], warn=lambda line: None)
        # NoCheckpointError would allow the caller to start from scratch.
        assert not isinstance(error.value, NoCheckpointError)


GARBAGE = {
    "empty": lambda good: b"",
    "torn": lambda good: good[: len(good) // 2],
    "binary": lambda good: bytes(range(256)),
    "a number": lambda good: b"12",
    "future": lambda good: good.replace(b"step_00000020", b"step_99999999"),
    "negative": lambda good: b"-1\n",
    "huge": lambda good: good * 10_000,
}


@pytest.mark.parametrize("kind", [*GARBAGE, "missing", "dangling", "loop", "directory", "lost"])
def test_the_hint_has_no_power(tmp_path, tools, kind):
    """Check that a damaged ``latest`` causes a warning, and the newest intact checkpoint is loaded."""
    for sequence, step in enumerate((10, 20), start=1):
        tools.write_by_hand(tmp_path, step, {"w": torch.tensor(step)}, 1, sequence)
    latest = tmp_path / "latest"
    good = latest.read_bytes()
    latest.unlink()
    if kind in GARBAGE:
        latest.write_bytes(GARBAGE[kind](good))
    elif kind == "dangling":
        latest.symlink_to(tmp_path / "step_00000030")
    elif kind == "loop":
        latest.symlink_to(latest)
    elif kind == "directory":
        latest.mkdir()
    elif kind == "lost":
        tools.write_by_hand(tmp_path, 30, {}, 1, 3)
        (tmp_path / "step_00000030").rename(tmp_path / "moved_away")
    found, lines = torch.tensor(0), []
    loaded = load_checkpoint(tmp_path, whole_tensors({"w": found}), warn=lines.append)
    assert loaded.step == found.item() == 20
    assert len(lines) == (kind != "missing") and all("latest" in line for line in lines)
    assert list(loaded.problems) == [line.removeprefix("WARNING: ") for line in lines]


def test_warnings_go_to_standard_error_by_default(tmp_path, tools, capsys):
    tools.write_by_hand(tmp_path, 10, {}, 1, 1)
    (tmp_path / "latest").write_text("1200")
    load_checkpoint(tmp_path, [])
    assert "WARNING" in capsys.readouterr().err


def test_a_tensor_that_is_not_there(tmp_path, tools):
    directory = tools.write_by_hand(tmp_path, 10, tools.make_state(), 2, 1)
    with pytest.raises(CheckpointMismatchError, match="no tensor 'x'"):
        read_tensor(directory, "x")
