"""Every way in which a run ends has its exit code, one clear sentence from one rank, no traceback."""

import json
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.checkpoint.directory import RUN_LOCK, RootLock
from megatron_packed.checkpoint.load import find_checkpoints
from support.faults import (
    full_console,
    full_disk,
    full_log,
    own_folder,
    poison_forward,
    unreadable_data,
)
from support.json_lines import read_json
from support.runs import (
    Data,
    Finished,
    final_state,
    in_folder,
    run,
    steps,
    tiny_options,
    torchrun,
    write_conversations,
)

DONE, USAGE, DATA, CHECKPOINT = 0, 2, 3, 4


def assert_ends(finished: Finished, code: int, sentence: str, folder: Path | None = None) -> None:
    assert finished.exit_code == code, finished.console
    assert finished.console.count(sentence) == 1, finished.console
    assert "Traceback" not in finished.console
    if folder is not None:
        status = read_json(folder / "checkpoints" / "STATUS.json")
        assert status["exit_code"] == code and sentence in status["reason"]


@pytest.fixture(scope="module")
def trained(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with two processes, and return the folder with checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    options = tiny_options(data, train_iters=4, save_interval=2, **in_folder(folder))
    assert run(options, folder, 2).exit_code == DONE
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


def wrong(data: Data, folder: Path) -> dict[str, Any]:
    return tiny_options(
        data,
        hidden_size=33,
        lr="abc",
        train_data_path=folder / "absent.jsonl",
        sequence_lenght=8,
        save=folder / "new",
    )


def assert_reported_once(console: str) -> None:
    assert console.count("problems in the configuration; nothing was started.") == 1, console
    for words in (
        "--hidden-size 33",
        "--lr 'abc'",
        "absent.jsonl",
        "--sequence-lenght 8",
        "--train-iters\n",
    ):
        assert console.count(words) == 1, (words, console)
    assert 'pretrain_hybrid.py", line' not in console and "megatron_packed/" not in console


def test_a_wrong_command_line(data: Data, tmp_path: Path) -> None:
    """Only rank 0 reports the problems of a command line, all at once, and no folder is created."""
    finished = run(wrong(data, tmp_path), tmp_path, 2)
    assert finished.exit_code == USAGE
    assert_reported_once(finished.console)
    assert not (tmp_path / "new").exists()


def test_a_wrong_command_line_under_torchrun(data: Data, tmp_path: Path) -> None:
    """torchrun shows the exit code and the error message of rank 0 as the root cause.

    torchrun kills the other ranks when one rank has ended.
    """
    console = torchrun(wrong(data, tmp_path), tmp_path, 2)
    root_cause = console.partition("Root Cause")[2]
    assert re.search(r"rank +: 0 ", root_cause) and re.search(r"exitcode +: 2 ", root_cause), (
        console
    )
    assert (
        "traceback : the configuration is refused; its problems are listed above.\n==="
        in root_cause
    ), console
    assert_reported_once(console)


@pytest.mark.parametrize("processes", [1, 2])
def test_data_without_a_usable_line(processes: int, data: Data, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": "hello"}\n' * 5 + "not json\n" * 5)
    options = tiny_options(data, train_iters=3, **in_folder(tmp_path)) | {
        "train_data_path": tmp_path / "bad.jsonl"
    }
    finished = run(options, tmp_path, processes)
    assert_ends(finished, DATA, "data error", tmp_path)
    assert "10" in finished.console and "malformed_json" in finished.console


def test_validation_data_without_a_line(data: Data, tmp_path: Path) -> None:
    """The error message names the validation data as the set without documents."""
    (tmp_path / "blank.jsonl").write_text("\n\n")
    options = tiny_options(
        data, train_iters=3, valid_data_path=tmp_path / "blank.jsonl", eval_interval=1
    )
    assert_ends(
        run(options, tmp_path),
        DATA,
        "--valid-data-path: the data contains no document: 2 lines, 2 blank",
    )


def test_data_in_which_nothing_is_learned(data: Data, tmp_path: Path) -> None:
    """If only the prompt of each document fits, the run ends before its first step."""
    line = json.dumps({"prompt": "p" * 300, "completion": "c" * 10})
    (tmp_path / "long.jsonl").write_text(f"{line}\n" * 20)
    options = tiny_options(data, train_iters=3, overlong_policy="truncate", **in_folder(tmp_path))
    finished = run(options | {"train_data_path": tmp_path / "long.jsonl"}, tmp_path)
    assert_ends(
        finished,
        DATA,
        "data error: the training data has no target left: 220 targets of 20",
        tmp_path,
    )
    assert "step 1/" not in finished.console


def test_data_that_one_rank_alone_cannot_use(data: Data, tmp_path: Path) -> None:
    """If one rank cannot read its data, all ranks end with the exit code for data errors.

    The other ranks neither wait for that rank nor fail with another error.
    """
    options = tiny_options(data, train_iters=3, **in_folder(tmp_path))
    finished = run(options, tmp_path, 2, partial(unreadable_data, 1))
    assert_ends(
        finished,
        DATA,
        "data error on rank 1: shard_7.jsonl cannot be read by this machine.",
        tmp_path,
    )


def _another_rate_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        sys.argv += ["--lr", "0.5"]


def test_flags_that_differ_between_ranks(data: Data, tmp_path: Path) -> None:
    """Rank 1 names its flag with the values of both ranks, before a folder is created."""
    options = tiny_options(data, train_iters=2, lr_warmup_iters=0, save=tmp_path / "new")
    finished = run(options, tmp_path, 2, prepare=_another_rate_on_rank_1)
    assert finished.exit_code == USAGE, finished.console
    refusal = "--lr 0.5: is 0.003 on rank 0; start all machines with the same flags."
    assert finished.console.count(refusal) == 1, finished.console
    assert not (tmp_path / "new").exists()


def test_nothing_to_load(data: Data, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    options = tiny_options(data, train_iters=3, load=tmp_path / "empty")
    assert_ends(run(options, tmp_path, 2), CHECKPOINT, "checkpoint error: ")
    own = {**options, "save": tmp_path / "empty"}
    finished = run(own, tmp_path)
    assert finished.exit_code == DONE and "starting from random weights" in finished.console
    assert_ends(run({**own, "ckpt_step": 7}, tmp_path), CHECKPOINT, "no checkpoint of step 7")


def test_damaged_checkpoints(data: Data, copy: Path) -> None:
    """With one of two checkpoints damaged, the run warns and resumes from the other checkpoint.

    With both damaged, the run does not start, and does not fall back to random weights.
    """
    options = tiny_options(data, train_iters=4, save_interval=2, **in_folder(copy))
    paths = [candidate.path for candidate in find_checkpoints(copy / "checkpoints")]
    flip_a_bit(paths[0] / "rank_00001.safetensors")
    finished = run(options, copy, 2)
    assert finished.exit_code == DONE, finished.console
    assert "step_00000004 is rejected" in finished.console and "(iteration 2)" in finished.console
    for path in paths:
        flip_a_bit(path / "rank_00000.safetensors")
    lines = (copy / "log.jsonl").read_bytes()
    assert_ends(run(options, copy, 2), CHECKPOINT, "is intact", copy)
    assert (copy / "log.jsonl").read_bytes() == lines


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def test_a_second_run_in_the_same_folder(data: Data, copy: Path) -> None:
    """A second run in the same folder ends before it reads or writes a file of the first run."""
    options = tiny_options(data, train_iters=6, **in_folder(copy))
    lines = (copy / "log.jsonl").read_bytes()
    lock = RootLock(copy / "checkpoints", RUN_LOCK)
    assert_ends(
        run(options, copy, 2), CHECKPOINT, "another run writes its checkpoints to this directory"
    )
    assert (copy / "log.jsonl").read_bytes() == lines
    assert read_json(copy / "checkpoints/STATUS.json") == {
        "exit_code": DONE
    }  # STATUS.json of the first run
    lock.close()
    finished = run({**options, "train_iters": 4}, copy, 2)
    assert finished.exit_code == DONE and "--train-iters 4 is reached" in finished.console
    finished = run({**options, "train_iters": 5}, copy, 2)
    assert finished.exit_code == DONE and "--train-iters 5, was 4" in finished.console


def test_a_folder_that_the_ranks_do_not_share(data: Data, tmp_path: Path) -> None:
    """Without the check, the run would train up to its first save, and lose all steps."""
    options = tiny_options(data, train_iters=4, save="ck")
    finished = run(options, tmp_path, 2, partial(own_folder, tmp_path))
    assert_ends(
        finished,
        CHECKPOINT,
        f"rank 1: {tmp_path}/rank_1/ck: on {socket.gethostname()} this is not the "
        "directory of rank 0; give --save a directory on a file system that all machines share.",
    )
    assert "step 1/4" not in finished.console and not os.listdir(tmp_path / "rank_1" / "ck")


def test_a_full_disk(data: Data, tmp_path: Path) -> None:
    """If the disk is full on one of two ranks, both end with the exit code for checkpoint errors.

    The previous checkpoint stays intact.
    """
    options = tiny_options(data, train_iters=6, save_interval=2, **in_folder(tmp_path))
    finished = run(options, tmp_path, 2, partial(full_disk, 2, 1))
    assert_ends(finished, CHECKPOINT, "checkpoint error in step 4: ", tmp_path)
    assert "No space left on device" in finished.console
    assert [
        found.manifest.step
        for found in find_checkpoints(tmp_path / "checkpoints")
        if found.manifest
    ] == [2]


def test_a_full_disk_under_the_log(data: Data, tmp_path: Path) -> None:
    """If the log or the report cannot be written, the run prints one warning and continues."""
    options = tiny_options(data, train_iters=5, **in_folder(tmp_path))
    finished = run(options, tmp_path, 1, partial(full_log, 2))
    assert_ends(finished, DONE, "No space left on device")
    assert [line["iteration"] for line in steps(tmp_path / "log.jsonl")] == [1, 4, 5]
    again = {**options, "log_jsonl": tmp_path / "new.jsonl", "report": tmp_path / "page.html"}
    assert_ends(run(again, tmp_path), DONE, "WARNING: the report cannot be written: ")


def test_a_console_that_cannot_be_written_ends_nothing(data: Data, tmp_path: Path) -> None:
    options = tiny_options(data, train_iters=3, save_interval=3, **in_folder(tmp_path))
    assert run(options, tmp_path, 1, full_console).exit_code == DONE
    assert read_json(tmp_path / "checkpoints" / "STATUS.json") == {"exit_code": DONE}
    assert [line["iteration"] for line in steps(tmp_path / "log.jsonl")] == [1, 2, 3]
    assert [
        found.manifest.step
        for found in find_checkpoints(tmp_path / "checkpoints")
        if found.manifest
    ] == [3]


def one_more_line(path: Path) -> None:
    content = path.read_text()
    path.write_text(content + content.splitlines()[0] + "\n")


def another_word(path: Path) -> None:
    """Replace a word by one of equal length, so that the pack plan stays the same."""
    assert len("north") == len("south")
    path.write_text(path.read_text().replace("north", "south", 2))


ANOTHER_PLACE = r"--train-data-path \S+, was (\S+); give --train-data-path \1 to resume, "
OTHER, ORDER = "was trained on other data: ", "was trained on another order of the data: "
CHANGES: dict[str, tuple[Callable[[Path], None] | dict[str, Any], str]] = {
    "one more line": (one_more_line, OTHER + ANOTHER_PLACE),
    "another word": (another_word, OTHER + ANOTHER_PLACE),
    "the tokenizer, with equal lengths": (
        {"tokenizer_type": "TrainedBPETokenizer", "tokenizer_vocab_size": 260},
        OTHER
        + r".*; --tokenizer-type TrainedBPETokenizer, was ByteTokenizer; --tokenizer-vocab-size 260, was 4096; "
        r"give --train-data-path \S+ --tokenizer-type ByteTokenizer and leave out --tokenizer-vocab-size to resume, ",
    ),
    "the seed": ({"seed": 5}, f"{ORDER}--seed 5, was 1234; leave out --seed to resume, "),
    "the pack": (
        {"seq_length": 120},
        f"{ORDER}--seq-length 120, was 128; give --seq-length 128 to resume, ",
    ),
    "the pack, by the batch": (
        {"micro_batch_size": 2, "global_batch_size": 8},
        f"{ORDER}--micro-batch-size 2, was 1; leave out --micro-batch-size to resume, ",
    ),
    "the packer": (
        {"packing_method": "sequential"},
        f"{ORDER}--packing-method sequential, was balanced; leave out --packing-method to resume, ",
    ),
}


def elsewhere(copy: Path, data: Data) -> dict[str, Any]:
    """Return options that resume from the checkpoint with the same data in another folder."""
    options = tiny_options(data, train_iters=6, **in_folder(copy))
    return options | {"train_data_path": Path(shutil.copy(data.train, copy))}


def test_the_same_data_elsewhere_is_the_same(copy: Path, data: Data) -> None:
    finished = run(elsewhere(copy, data), copy)
    assert finished.exit_code == DONE and "(iteration 4)" in finished.console


@pytest.mark.parametrize("change", CHANGES)
def test_another_order_of_the_data_under_a_checkpoint(change: str, copy: Path, data: Data) -> None:
    """A run with another order of the data refuses to resume, and the error names the cure.

    The position in the data of the checkpoint has no meaning in another order. The run can use only
    the weights (--finetune), or begin a phase.
    """
    options, (changed, said) = elsewhere(copy, data), CHANGES[change]
    if isinstance(changed, dict):
        options |= changed
    else:
        changed(options["train_data_path"])
    lines = (copy / "log.jsonl").read_bytes()
    finished = run(options, copy)
    assert_ends(finished, CHECKPOINT, "checkpoint error: ", copy)
    cures = "give --finetune to start a new run from these weights, or name another folder by --save and --load to "
    # A phase may have other data and packs, but keeps the tokenizer.
    phase = "give --begin-phase NAME with a new name to go on with the changed data or packs, "
    if "tokenizer" not in change:
        cures = phase + cures
    assert re.search(said + cures, finished.console), finished.console
    assert (copy / "log.jsonl").read_bytes() == lines


def test_another_batch_size_and_other_tokens(copy: Path, data: Data) -> None:
    """A change of tokens is found also if the batch size changes and the packs stay the same.

    The replaced tokens have the same lengths, so that the documents are packed in the same way.
    """
    options = elsewhere(copy, data) | {"global_batch_size": 2}
    another_word(options["train_data_path"])
    assert_ends(run(options, copy), CHECKPOINT, OTHER, copy)


def test_another_batch_size_and_a_schedule_in_two_units(copy: Path, data: Data) -> None:
    options = elsewhere(copy, data) | {"global_batch_size": 2, "lr_decay_samples": 24}
    finished = run(options, copy)
    assert_ends(
        finished,
        CHECKPOINT,
        "with another --global-batch-size (--global-batch-size 2, was 4)",
        copy,
    )
    assert "lengths in iterations and lengths in samples, which no longer agree" in finished.console
    finished = run(options | {"lr_warmup_iters": None, "lr_warmup_samples": 8}, copy)
    assert (
        finished.exit_code == DONE
        and "--global-batch-size 2, was 4: 16 packs were" in finished.console
    )
    assert [line["learning_rate"] for line in steps(copy / "log.jsonl")][4:] == pytest.approx(
        [3e-3 * (1 + math.cos(math.pi * (consumed - 8) / 16)) / 2 for consumed in (16, 18)]
    )


def test_another_batch_size_when_nothing_is_left(copy: Path, data: Data) -> None:
    """A run that has already trained on 16 samples ends at once if no batch is left.

    This happens with --train-samples 8 and batches of 1, and with --train-samples 20 and batches of
    6.
    """
    samples = {
        "train_iters": None,
        "lr_warmup_iters": None,
        "train_samples": 8,
        "global_batch_size": 1,
    }
    finished = run(
        elsewhere(copy, data) | samples | {"profile": True, "use_pytorch_profiler": True}, copy
    )
    assert finished.exit_code == DONE, finished.console
    assert (
        "--global-batch-size 1, was 4: 16 packs were trained on in 4 steps.\n"
        "no whole batch is left of --train-samples 8: there is nothing left to train.\n"
    ) in finished.console
    assert (
        "WARNING: --profile-step-start 10 is not reached: the run ends after step 4."
        in finished.console
    )
    finished = run(
        elsewhere(copy, data) | samples | {"train_samples": 20, "global_batch_size": 6}, copy
    )
    assert finished.exit_code == DONE, finished.console
    assert (
        "no whole batch is left of --train-samples 20: there is nothing left to train."
        in finished.console
    )
    assert [line["iteration"] for line in steps(copy / "log.jsonl")] == [1, 2, 3, 4]


def test_another_model_under_a_checkpoint(copy: Path, data: Data) -> None:
    """A run with another model refuses to resume, also if all tensors have the same shapes.

    The error names the options that differ, is printed by one rank only, and changes no file.
    """
    options = tiny_options(data, train_iters=6, **in_folder(copy)) | {
        "squared_relu": None,
        "rotary_base": 5e4,
    }
    lines = (copy / "log.jsonl").read_bytes()
    finished = run(options, copy, 2)
    assert_ends(
        finished,
        CHECKPOINT,
        "belongs to another model: --squared-relu is off, and the checkpoint was",
        copy,
    )
    assert "--rotary-base is 50000.0, and the checkpoint was made with 10000.0" in finished.console
    assert (copy / "log.jsonl").read_bytes() == lines
    wider = run({**options, "hidden_size": 64}, copy)
    assert_ends(wider, CHECKPOINT, "--hidden-size is 64, and the checkpoint was made with 32", copy)
    for changes in ({}, {"finetune": True, "save": None, "log_jsonl": None}):
        refused = run({**options, **changes, "bf16": True}, copy, 2)
        assert_ends(
            refused,
            CHECKPOINT,
            "was trained without --bf16, and a load does not change precisions",
            copy,
        )
        assert "this run needs" not in refused.console
    new = {"finetune": True, "save": copy / "new", "log_jsonl": None, "train_iters": 3}
    anew = run({**options, **new}, copy)
    assert anew.exit_code == DONE and "WARNING: " in anew.console, anew.console
    assert (
        "--squared-relu is off" in anew.console
        and "still loads these weights unchanged" in anew.console
    )


def test_a_pretrained_checkpoint_is_where_a_run_begins_once(
    trained: Path, data: Data, tmp_path: Path
) -> None:
    """The same command starts from the pretrained checkpoint once, then from its own checkpoint.

    A job that restarts therefore does not repeat any step.
    """
    options = tiny_options(data, train_iters=8, exit_interval=1, **in_folder(tmp_path)) | {
        "pretrained_checkpoint": trained / "checkpoints"
    }
    first, second = run(options, tmp_path), run(options, tmp_path)
    assert first.exit_code == second.exit_code == DONE, first.console + second.console
    assert "yet: starting from other weights." in first.console
    assert f"weights of {trained / 'checkpoints' / 'step_00000004'} (iteration 4)" in first.console
    assert (
        f"resuming from {tmp_path / 'checkpoints' / 'step_00000001'} (iteration 1)"
        in second.console
    )
    assert [line["iteration"] for line in steps(tmp_path / "log.jsonl")] == [1, 2]
    fresh, pretrained = (steps(folder / "log.jsonl")[0] for folder in (trained, tmp_path))
    assert pretrained["lm_loss"] < fresh["lm_loss"]
    counts = (
        "num_seqs",
        "real_tokens",
        "target_tokens",
        "consumed_tokens",
    )  # The first step uses the first packs of the data.
    assert [pretrained[name] for name in counts] == [fresh[name] for name in counts]


def test_finetuning_takes_the_weights_alone(trained: Path, data: Data, tmp_path: Path) -> None:
    """--finetune starts at step 1 on other data, with weights and expert biases of the checkpoint.

    All other state is new. A poisoned loss prevents the update of the first step, so that the saved
    checkpoint shows the initial state.
    """
    other = write_conversations(tmp_path / "other.jsonl", 60, seed=9)
    options = tiny_options(
        data, train_iters=8, on_nonfinite="skip", exit_interval=1, finetune=True
    ) | {
        "train_data_path": other,
        "save": tmp_path / "checkpoints",
        "load": trained / "checkpoints",
        "log_jsonl": tmp_path / "log.jsonl",
    }
    finished = run(options, tmp_path, 1, partial(poison_forward, 1, 0, float("nan")))
    assert finished.exit_code == DONE, finished.console
    assert (
        f"weights of {trained / 'checkpoints' / 'step_00000004'} (iteration 4)" in finished.console
    )
    assert [line["iteration"] for line in steps(tmp_path / "log.jsonl")] == [1]
    begun, metadata = final_state(tmp_path / "checkpoints", 1)
    source, _ = final_state(trained / "checkpoints", 4)
    weights = [name for name in source if name.startswith("model/")]
    assert any("expert_bias" in name for name in weights)
    assert all(begun[name].equal(source[name]) for name in weights)
    moments = [name for name in begun if name.startswith("optimizer/")]
    assert any(source[name].any() for name in moments) and not any(
        begun[name].any() for name in moments
    )
    assert (
        metadata["progress"]["consumed_tokens"] == steps(tmp_path / "log.jsonl")[0]["real_tokens"]
    )
