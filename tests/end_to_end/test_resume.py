"""A run that is killed at any moment and resumed ends bit for bit like an undisturbed run."""

import json
import math
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.config.parser.parse import parse
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import build_data
from support.faults import LOG_SITE, SITES, kill_at, kill_in_save, tear_line
from support.runs import (
    LAST,
    Data,
    Run,
    assert_same_state,
    command_line,
    few_documents,
    final_state,
    in_folder,
    run,
    start,
    steps,
    tiny_options,
    trained,
    write_conversations,
)

KILLED = -9
SEED = 20
"""Seed of the steps and moments of the kills."""


def kill_some_time(started: Run, log: Path, draw: random.Random) -> None:
    """Kill all processes in random order, at a random moment after one of the next two steps."""
    trained = [record["iteration"] for record in steps(log) if "lm_loss" in record]
    started.wait_for_line(trained[-1] + draw.randint(1, 2), log)
    time.sleep(draw.uniform(0, 0.05))
    ranks = list(range(len(started.processes)))
    draw.shuffle(ranks)
    started.kill(*ranks)


def some_faults(processes: int, draw: random.Random) -> list[Callable[[], None]]:
    """Return one fault of every kind in random order: in steps, in saves and in a log line.

    Each fault happens at most five steps after a start, so all faults fit into the run.
    """
    faults: list[Callable[[], None]] = []
    for site in SITES:
        rank = 0 if site == LOG_SITE else draw.randrange(processes)
        faults.append(partial(kill_at, site, draw.randint(2, 5), rank))
    faults.append(partial(kill_in_save, "manifest.renamed", draw.randint(1, 2), 0))
    faults.append(partial(kill_in_save, "shard.synced", 1, processes - 1))
    faults.append(partial(tear_line, draw.randint(2, 4)))
    draw.shuffle(faults)
    return faults


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_again_and_again(
    processes: int,
    uninterrupted: Callable[[int], Path],
    dropout_options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A run that is killed many times ends like an undisturbed run.

    It is killed once at every kind of place, then twice at random times. The comparison covers
    random states, because every step draws dropout masks. It also covers expert biases, which are
    buffers, and validations. Only the killed run answers sample prompts, so they change no bit.
    """
    draw, log = random.Random(SEED + processes), tmp_path / "log.jsonl"
    (tmp_path / "prompts.txt").write_text("ask 1\nask 2\n")
    options = {**dropout_options, **in_folder(tmp_path), "sample_prompts": tmp_path / "prompts.txt"}
    options["sample_max_new_tokens"] = 3
    for fault in some_faults(processes, draw):
        finished = run(options, tmp_path, processes, fault)
        assert KILLED in finished.exit_codes, f"{fault} did not happen: {finished}"
    for _ in range(2):
        started = start(options, tmp_path, processes)
        kill_some_time(started, log, draw)
        started.wait()
    finished = run(options, tmp_path, processes)
    assert finished.exit_code == 0, finished.console
    assert "resuming from" in finished.console
    assert_same_state(tmp_path / "checkpoints", uninterrupted(processes) / "checkpoints", LAST)
    assert steps(log) == steps(uninterrupted(processes) / "log.jsonl")
    asked = [one for one in map(json.loads, log.read_text().splitlines()) if "samples" in one]
    assert [one["iteration"] for one in asked] == [*range(4, LAST, 4), LAST]


def test_killed_before_the_first_save(data: Data, tmp_path: Path) -> None:
    """The same command begins again by itself, and the lines of the killed run stay."""
    options = tiny_options(data, train_iters=4, **in_folder(tmp_path))
    finished = run(options, tmp_path, 2, partial(kill_at, LOG_SITE, 2, 0))
    assert KILLED in finished.exit_codes
    first = (tmp_path / "log.jsonl").read_bytes()
    finished = run(options, tmp_path, 2)
    assert finished.exit_code == 0, finished.console
    assert f"is now {tmp_path}/log.1.jsonl" in finished.console
    assert (tmp_path / "log.1.jsonl").read_bytes() == first and first.count(b"\n") >= 1
    assert [one["iteration"] for one in steps(tmp_path / "log.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("begun", "units", "last", "learning_rate"),
    [
        (4, {"train_iters": 11}, 11, lambda step, consumed: falling(step, 2, 11)),
        (
            8,
            {"train_samples": 70, "lr_warmup_iters": None, "lr_warmup_samples": 8},
            14,
            lambda step, consumed: falling(consumed, 8, 70),
        ),
    ],
    ids=["within an epoch, in iterations", "at its end, in samples"],
)
def test_another_batch_size(
    begun: int,
    units: dict[str, Any],
    last: int,
    learning_rate: Callable[[int, int], float],
    tmp_path: Path,
) -> None:
    """A run that changes from 4 to 6 packs a step trains on every pack once, in order.

    It also changes from one to two ranks. A second run that is interrupted after the change is
    equal bit for bit.
    """
    options = few_documents(tmp_path, eval_interval=4, hidden_dropout=0.1, **units)
    options["test_data_path"] = write_conversations(tmp_path / "test.jsonl", 12, seed=3)
    trained(tmp_path / "a", 1, options, exit_interval=begun)
    for other in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / other)
    options["global_batch_size"] = 6
    said = (
        f"--global-batch-size 6, was 4: {4 * begun} packs were trained on in {begun} steps; step {begun + 1} continues "
        f"with the next pack, with 6 packs a step instead of 4; the learning rate counts "
        f"{'samples' if 'train_samples' in units else 'steps'}, and the last step is {last}."
    )
    console = trained(tmp_path / "b", 2, options)
    assert (
        said in console and f"step {last}/{last} | " in console and "--train-iters" not in console
    )
    assert said in trained(tmp_path / "c", 2, options, exit_interval=last - 1)
    assert "packs were trained on" not in trained(
        tmp_path / "c", 2, options, exit_interval=last - 1
    )
    assert_same_state(tmp_path / "c" / "checkpoints", tmp_path / "b" / "checkpoints", last)
    log = steps(tmp_path / "c" / "log.jsonl")
    assert log == steps(tmp_path / "b" / "log.jsonl")
    assert [line["iteration"] for line in log if "valid_loss" in line] == [*range(4, last, 4), last]
    assert [line["iteration"] for line in log if "test_loss" in line] == [last]

    one_by_one = parse(command_line({**options, "global_batch_size": 1}), 1)
    plan = build_data(one_by_one, ParallelGroups.single(), lambda line: None).train.plan
    assert (
        len(plan.epoch(0)) == 32
        # One case changes the batch size within epoch 0, so that a step crosses the end of the epoch.
        # The other case changes the batch size at the end of epoch 0.
    )
    consumed = 0
    for done, line in enumerate(line for line in log if "lm_loss" in line):
        packs = [plan.step(pack) for pack in range(consumed, consumed + (4 if done < begun else 6))]
        assert line["iteration"] == done + 1 and line["epoch"] == packs[0].epoch
        assert line["learning_rate"] == pytest.approx(learning_rate(done, consumed))
        assert line["num_seqs"] == sum(pack.packs[0][0].size for pack in packs)
        assert line["real_tokens"] == sum(pack.global_tokens for pack in packs)
        assert line["target_tokens"] == sum(pack.global_targets for pack in packs)
        consumed += len(packs)
    assert (
        final_state(tmp_path / "c" / "checkpoints", last)[1]["progress"]["consumed_packs"]
        == consumed
    )


def falling(at: float, warmup: float, end: float) -> float:
    """Return the learning rate of the runs' cosine schedule."""
    return 3e-3 * (
        at / warmup
        if at <= warmup
        else (1 + math.cos(math.pi * (at - warmup) / (end - warmup))) / 2
    )


def test_a_finished_run_started_again_changes_nothing(
    uninterrupted: Callable[[int], Path], dropout_options: dict[str, Any], tmp_path: Path
) -> None:
    """A finished run that is started again changes neither checkpoints nor log.

    Launchers that restart jobs therefore need not know which jobs are finished.
    """
    shutil.copytree(uninterrupted(1), tmp_path, dirs_exist_ok=True)
    written = (tmp_path / "checkpoints" / "latest").read_bytes()
    finished = run({**dropout_options, **in_folder(tmp_path)}, tmp_path)
    assert finished.exit_code == 0, finished.console
    assert f"(iteration {LAST})" in finished.console
    assert (tmp_path / "checkpoints" / "latest").read_bytes() == written
    assert (tmp_path / "log.jsonl").read_bytes() == (uninterrupted(1) / "log.jsonl").read_bytes()


def test_the_comparison_sees_everything_that_must_be_restored(
    uninterrupted: Callable[[int], Path],
) -> None:
    tensors, metadata = final_state(uninterrupted(2) / "checkpoints", LAST)
    names = " ".join(tensors)
    restored = (
        "model/layers.0.mixer.A_log",
        "expert_bias",
        "optimizer/exp_avg/",
        "optimizer/exp_avg_sq/",
        "optimizer/step",
        "rng/rank_0/torch",
        "rng/rank_1/torch",
        "rng/rank_1/numpy",
        "rng/rank_1/python",
    )
    for part in restored:
        assert part in names, part
    assert metadata["progress"]["iteration"] == LAST
    assert not tensors["rng/rank_0/torch"].equal(tensors["rng/rank_1/torch"])
    assert any(
        tensor.abs().sum() > 0 for name, tensor in tensors.items() if name.endswith("expert_bias")
    )
