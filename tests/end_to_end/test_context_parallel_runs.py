"""Real runs with context parallelism: their logs equal the log of one process."""

import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_packed.checkpoint.manifest import read_manifest
from support.runs import (
    Data,
    assert_same_log,
    assert_same_state,
    final_state,
    in_folder,
    run,
    tiny_options,
    trained,
)

THIRD, LAST = 2, 6
GATED_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
OPTIONS: dict[str, Any] = {
    "train_iters": LAST,
    "eval_interval": THIRD,
    "no_isolation_self_test": None,
    "num_attention_heads": 4,
    "hybrid_layer_pattern": "MG*-E",
    **GATED_DELTA_NET,
}
A2A: dict[str, Any] = {"context_parallel_size": 2}
RING: dict[str, Any] = {"context_parallel_size": 2, "cp_comm_type": "p2p"}
IN_ORDER: dict[str, Any] = {
    "context_parallel_size": 2,
    "cp_comm_type": "all_gather",
    "cp_partition_mode": "contiguous",
}


def test_a_run_that_changes_its_partition_is_the_run_of_one_process(
    data: Data, tmp_path: Path
) -> None:
    """A run with a2a on two processes resumes with contiguous keys, then with p2p on four processes.

    It equals a run of one process. The four processes also use tensor parallelism of 2, and pass the
    states of Mamba layers and of gated delta nets. A tensor-parallel rank has one key head, which two
    ranks could not share.
    """
    options = tiny_options(data, valid_data_path=data.valid, **OPTIONS)
    alone, together = tmp_path / "alone", tmp_path / "together"
    untested = {**options, "no_isolation_self_test": True}
    said = trained(alone, 1, untested, pad_packed_seq_alignment=4)
    [padding] = [
        line for line in said.splitlines() if "Documents begin at multiples of 4 slots" in line
    ]
    for number, (name, way) in enumerate(
        {"a2a": A2A, "all_gather of contiguous rows": IN_ORDER}.items(), 1
    ):
        end = number * THIRD
        said = trained(together, 2, options, pad_packed_seq_alignment=4, exit_interval=end, **way)
        assert f"1 tensor-parallel x 2 context-parallel by {name} x 1 data-parallel" in said
        assert "isolation self-test: 15 checks passed" in said and padding in said
    layout = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "mamba_cp_comm_type": "state",
        "linear_cp_mode": "chunkwise",
        **RING,
    }
    said = trained(
        together, 4, options, **layout
    )  # p2p on two ranks uses the same alignment without a flag.
    assert (
        f"(iteration {2 * THIRD})" in said
        and "isolation self-test: 15 checks passed" in said
        and padding in said
    )
    assert_same_log(together, alone)


def test_a_run_of_heads_goes_on_with_heads(data: Data, tmp_path: Path) -> None:
    """A checkpoint from before states were passed by default has the bits of a run that never stopped.

    A flag for states changes the bits.
    """
    options = tiny_options(
        data, train_iters=4, hybrid_layer_pattern="MG-E", **GATED_DELTA_NET, **A2A
    )
    never, resumed, states = (tmp_path / name for name in ("never", "resumed", "states"))
    heads = {"mamba_cp_comm_type": "heads", "linear_cp_mode": "headwise"}
    trained(never, 2, options, save_interval=2, **heads)
    for folder in (resumed, states):
        shutil.copytree(
            never / "checkpoints" / "step_00000002", folder / "checkpoints" / "step_00000002"
        )
    said = trained(resumed, 2, options)
    assert said.count("no effect in this run: --num-attention-heads") == 1
    assert "so that sums keep their order: --mamba-cp-comm-type heads" in said
    assert "--linear-cp-mode headwise" in said
    assert_same_state(resumed / "checkpoints", never / "checkpoints", 4)
    for option, value in {"mamba_cp_comm_type": "state", "linear_cp_mode": "chunkwise"}.items():
        trained(states, 2, options, **{**heads, option: value})
        expected, found = (final_state(run / "checkpoints", 4)[0] for run in (never, states))
        assert any(not torch.equal(found[name], tensor) for name, tensor in expected.items())
        shutil.rmtree(states / "checkpoints" / "step_00000004")


def test_another_alignment_is_another_plan(data: Data, tmp_path: Path) -> None:
    options = tiny_options(data, **{**OPTIONS, "eval_interval": None})
    trained(tmp_path, 2, options, exit_interval=THIRD, **A2A)
    zigzag = {**RING, "cp_partition_mode": "zigzag"}
    refused = run({**options, **in_folder(tmp_path), **zigzag}, tmp_path, 2)
    words = "another order of the data: --cp-comm-type p2p, was a2a; --cp-partition-mode zigzag, was auto"
    assert refused.exit_code == 4 and words in refused.console, refused.console
    said = trained(tmp_path, 2, options, **RING)
    assert "so that packs do not change: --cp-partition-mode contiguous" in said


def test_lengths_choose_the_partition_and_a_resumed_run_keeps_it(
    data: Data, tmp_path: Path
) -> None:
    """The documents are short, so a zigzag would pad them."""
    options = tiny_options(data, **{**OPTIONS, "eval_interval": None})
    given, chosen = tmp_path / "given", tmp_path / "chosen"
    trained(given, 2, options, cp_partition_mode="contiguous", **RING)
    said = trained(chosen, 2, options, exit_interval=THIRD, **RING)
    assert "--cp-partition-mode contiguous: a zigzag pads the documents by" in said
    [saved] = (chosen / "checkpoints").glob(f"step_*{THIRD}")
    stored = read_manifest(saved).metadata["config"]["parallel"]
    assert stored["cp_partition_mode"] == "contiguous"
    said = trained(chosen, 2, options, **RING)
    assert "so that packs do not change: --cp-partition-mode contiguous" in said
    assert "a zigzag pads" not in said
    assert_same_log(chosen, given)
    assert_same_state(chosen / "checkpoints", given / "checkpoints", LAST)
