"""Callbacks of real runs: their state in checkpoints, requests of one rank to stop, and failures."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.config.exit_codes import ExitCode
from support.run_callbacks import (
    add_callbacks,
    averages,
    fails_on_rank_1,
    hash_of,
    printed_averages,
    rank_states,
    stops_on_rank_1,
)
from support.runs import (
    Data,
    assert_same_state,
    assert_same_tensors,
    final_state,
    in_folder,
    run,
    saved_steps,
    tiny_options,
)

HALF, END = 3, 6
ZERO1 = {"use_distributed_optimizer": True, "overlap_param_gather": True}
ZERO1 |= {"overlap_grad_reduce": True, "ddp_bucket_size": 2000}


def options(data: Data, folder: Path, **changes: Any) -> dict[str, Any]:
    length = {"train_iters": END, "lr_decay_iters": END}
    return {**tiny_options(data, **length), **in_folder(folder), **changes}


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        pytest.param(1, {"bf16": True}, id="bf16"),
        pytest.param(2, {**ZERO1, "bf16": True}, id="ZeRO-1"),
    ],
)
def test_a_weight_average_resumes_as_if_the_run_had_not_stopped(
    data: Data, tmp_path: Path, processes: int, changes: dict[str, Any]
) -> None:
    average = partial(add_callbacks, averages)
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    for interval in (HALF, None):
        choices = options(data, stopped, exit_interval=interval, **changes)
        assert run(choices, stopped, processes, average).exit_code == ExitCode.DONE
    assert run(options(data, straight, **changes), straight, processes, average).exit_code == 0
    assert_same_state(stopped / "checkpoints", straight / "checkpoints", END)
    tensors, metadata = final_state(straight / "checkpoints", END)
    [record] = metadata["callbacks"]["WeightAverage"]
    assert record["values"]["calls"] == END and not record["tensors"]
    for name in record["parameters"]:
        stored = tensors[f"callback/WeightAverage/{name}"]
        weight = tensors[f"model/{name.removeprefix('average/')}"].float()
        # The average moves with the weights, at a distance.
        assert stored.dtype == torch.float32 and stored.shape == weight.shape
        assert (stored - weight).abs().max() < 0.1
    assert any(
        not torch.equal(tensors[f"callback/WeightAverage/{name}"], tensors[f"model/{name[8:]}"])
        for name in record["parameters"]
    )


def test_a_repeated_step_is_averaged_once(data: Data, tmp_path: Path) -> None:
    """The average equals that of a run whose expert buffers have room for all rows."""
    average, split = partial(add_callbacks, averages), {"expert_model_parallel_size": 2}
    consoles = []
    for factor in (1.0, None):
        folder = tmp_path / str(factor)
        choices = options(data, folder, moe_expert_rank_capacity_factor=factor, **split)
        consoles.append(run(choices, folder, 2, average).console)
    assert ["the step is repeated" in console for console in consoles] == [True, False]
    repeated, direct = (
        final_state(tmp_path / name / "checkpoints", END)[0] for name in ("1.0", "None")
    )
    assert_same_tensors(repeated, direct)


def test_an_average_reads_the_weights_of_the_whole_step(data: Data, tmp_path: Path) -> None:
    """A gather of weights that overlaps with the next step is complete before the hook."""
    average = partial(add_callbacks, averages)
    for name, overlaps in (("overlaps", True), ("waits", False)):
        choices = options(data, tmp_path / name, bf16=True, exit_interval=HALF, **ZERO1)
        choices["overlap_param_gather"] = overlaps
        assert run(choices, tmp_path / name, 2, average).exit_code == ExitCode.DONE
    overlapped, waited = (
        final_state(tmp_path / name / "checkpoints", HALF)[0] for name in ("overlaps", "waits")
    )
    assert_same_tensors(overlapped, waited)


def test_an_average_loads_into_another_layout(data: Data, tmp_path: Path) -> None:
    average, printed = partial(add_callbacks, averages), partial(add_callbacks, printed_averages)
    split = options(data, tmp_path, tensor_model_parallel_size=2, exit_interval=HALF)
    assert run(split, tmp_path, 2, average).exit_code == ExitCode.DONE
    tensors, _ = final_state(tmp_path / "checkpoints", HALF)
    prefix = "callback/WeightAverage/average/"
    stored = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    finished = run(options(data, tmp_path, train_iters=4), tmp_path, 1, printed)
    assert finished.exit_code == ExitCode.DONE, finished.console
    assert stored and f"loaded {hash_of(stored)}" in finished.console


def test_state_of_single_ranks_loads_only_in_its_layout(data: Data, tmp_path: Path) -> None:
    state = partial(add_callbacks, rank_states)
    assert run(options(data, tmp_path, exit_interval=2), tmp_path, 2, state).exit_code == 0
    same = run(options(data, tmp_path, exit_interval=3), tmp_path, 2, state)
    assert same.exit_code == 0 and "loaded [0, 0] 0" in same.console
    assert "loaded [1, 1] 1" in (tmp_path / "output_1.txt").read_text()
    other = run(options(data, tmp_path), tmp_path, 1, state)
    assert other.exit_code == ExitCode.CHECKPOINT
    assert (
        "has tensors of single ranks (tensor) in the state of the callback RankState"
        in other.console
    )
    without = run(options(data, tmp_path, exit_interval=4), tmp_path, 1)
    assert without.exit_code == 0
    assert "has state of the callback RankState, which this run does not have" in without.console


def test_one_rank_stops_all_ranks_with_a_save(data: Data, tmp_path: Path) -> None:
    finished = run(options(data, tmp_path), tmp_path, 2, partial(add_callbacks, stops_on_rank_1))
    assert finished.exit_code == ExitCode.PREEMPTED, finished.console
    # The metrics of step 2 arrive after step 3 is queued, and those of step 4 after step 5.
    assert saved_steps(tmp_path) == [5] and "Stopped on request." in finished.console


def test_an_error_names_the_callback(data: Data, tmp_path: Path) -> None:
    finished = run(options(data, tmp_path), tmp_path, 2, partial(add_callbacks, fails_on_rank_1))
    assert finished.exit_code == ExitCode.UNFORESEEN
    reason = "unexpected KeyError on rank 1 in step 3: callback FailOnRank, on_metrics: KeyError: 'no such metric'."
    assert reason in finished.console
