"""Killed at any moment and started again, a run ends where it would have ended, bit for bit."""

import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import LAST
from faults import SITES, kill_at, kill_in_save, tear_line

from runs import Run, assert_same_state, final_state, in_folder, run, start, steps

KILLED = -9
SEED = 20
"""Of the steps and moments of the kills."""


def kill_some_time(started: Run, log: Path, draw: random.Random) -> None:
    """All processes at a random time after a random step, the ranks in a random order."""
    started.wait_for_line(draw.randint(1, LAST - 2), log)
    time.sleep(draw.uniform(0, 0.3))
    ranks = list(range(len(started.processes)))
    draw.shuffle(ranks)
    started.kill(*ranks)


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_again_and_again(
    processes: int, uninterrupted: Callable[[int], Path], dropout_options: dict[str, Any], tmp_path: Path
) -> None:
    """Inside a step at every kind of place, in a save, in the middle of a line of the log, and whenever.

    Random states count: every step draws dropout masks. So do expert biases, which are buffers, and validations.
    """
    draw, log = random.Random(SEED + processes), tmp_path / "log.jsonl"
    options = {**dropout_options, **in_folder(tmp_path)}
    faults = [partial(kill_at, site, draw.randint(2, 6), draw.randrange(processes)) for site in SITES]
    faults.append(partial(kill_in_save, "manifest.renamed", draw.randint(1, 2), 0))
    faults.append(partial(kill_in_save, "shard.synced", 1, processes - 1))
    faults.append(partial(tear_line, draw.randint(2, 4)))
    draw.shuffle(faults)
    lives = 0
    for fault in [*faults, None, None]:
        started = start(options, tmp_path, processes, fault)
        if fault is None:
            kill_some_time(started, log, draw)
        finished = started.wait()
        if fault is not None:
            assert KILLED in finished.exit_codes, f"{fault} did not happen: {finished}"
        lives += 1
        if 0 in finished.exit_codes:
            break
    finished = run(options, tmp_path, processes)
    assert finished.exit_code == 0, finished.console
    assert "resuming from" in finished.console
    assert lives == len(faults) + 2
    assert_same_state(tmp_path / "checkpoints", uninterrupted(processes) / "checkpoints", LAST)
    assert steps(log) == steps(uninterrupted(processes) / "log.jsonl")


def test_the_log_of_the_uninterrupted_run(uninterrupted: Callable[[int], Path]) -> None:
    """What the comparison above compares: every step once, in order, validations behind their steps."""
    log = steps(uninterrupted(1) / "log.jsonl")
    trained = [record for record in log if "lm_loss" in record]
    assert [record["iteration"] for record in trained] == list(range(1, LAST + 1))
    assert [record["iteration"] for record in log if "valid_loss" in record] == [4, 8, 12, LAST]
    assert [record["iteration"] for record in log] == sorted(record["iteration"] for record in log)
    consumed = 0
    for record in trained:
        consumed += record["real_tokens"]
        assert record["consumed_tokens"] == consumed
        assert record["real_tokens"] + record["padded_tokens"] == 4 * 128
        assert 0 < record["target_tokens"] < record["real_tokens"] and record["num_seqs"] >= 4
        assert record["plan_hash"] == trained[0]["plan_hash"]
    for name in ("grad_norm", "learning_rate", "step_time_ms", "pack_fill", "tokens_per_second"):
        assert name in json.loads((uninterrupted(1) / "log.jsonl").read_text().splitlines()[0])


def test_the_comparison_sees_everything_that_must_be_restored(uninterrupted: Callable[[int], Path]) -> None:
    tensors, metadata = final_state(uninterrupted(2) / "checkpoints", LAST)
    names = " ".join(tensors)
    restored = (
        "model/layers.0.mixer.A_log", "expert_bias", "optimizer/exp_avg/", "optimizer/exp_avg_sq/", "optimizer/step",
        "rng/rank_0/torch", "rng/rank_1/torch", "rng/rank_1/numpy", "rng/rank_1/python",
    )  # fmt: skip
    for part in restored:
        assert part in names, part
    assert metadata["progress"]["iteration"] == LAST
    assert not tensors["rng/rank_0/torch"].equal(tensors["rng/rank_1/torch"])
    assert any(tensor.abs().sum() > 0 for name, tensor in tensors.items() if name.endswith("expert_bias"))
