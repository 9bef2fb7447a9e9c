"""A flipped bit of a weight on one rank ends the run before the step that used it updates weights."""

import json
from functools import partial
from pathlib import Path

from support.faults import flip_weight
from support.runs import Data, in_folder, run, saved_steps, steps, tiny_options

REPLICAS_DIFFER = 24


def test_a_flip_before_a_checked_step(data: Data, tmp_path: Path) -> None:
    """A flipped bit in gathered bf16 weights of rank 1 is found by the weight check.

    The gradient sums are checked in every step and are correct.
    """
    options = tiny_options(
        data,
        train_iters=8,
        save_interval=1,
        bf16=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        check_weight_hash_across_dp_replicas_interval=2,
        check_grad_hash_across_dp_replicas_interval=1,
        **in_folder(tmp_path),
    )
    finished = run(options, tmp_path, 2, partial(flip_weight, 6, 1, "layers.1.norm.weight", 3))
    assert finished.exit_code == REPLICAS_DIFFER, finished.console
    said = "replicas in step 6: weights or optimizer state have wrong bits: "
    assert finished.console.count(said) == 1 and "Traceback" not in finished.console
    assert (
        "layers.1.norm.weight: other bits on rank 1 than the rounded masters of rank"
        in finished.console
    )
    status = json.loads((tmp_path / "checkpoints" / "STATUS.json").read_text())
    assert (status["exit_code"], status["rank"], status["step"]) == (REPLICAS_DIFFER, None, 6)
    assert saved_steps(tmp_path)[0] == 5
    assert [line["iteration"] for line in steps(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5]
