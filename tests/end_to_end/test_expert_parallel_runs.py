"""Real runs with expert parallelism: the log of one process, and steps that are repeated."""

import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_packed.checkpoint.sealed_json import seal, unseal
from support.runs import (
    Data,
    assert_close_state,
    assert_same_log,
    assert_same_state,
    final_state,
    steps,
    tiny_options,
    trained,
)

EXPERTS: dict[str, Any] = {"expert_model_parallel_size": 2}
GATED_DELTA_NET: dict[str, Any] = {
    "hybrid_layer_pattern": "G-*E",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    **dict.fromkeys(("mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "mamba_chunk_size")),
}
LAST = 6
FACTOR = 1.1
"""Capacity factor of the expert buffer. It suffices for some of the first steps and not for others.
"""


def test_a_run_that_changes_its_layout_is_the_run_of_one_process(
    data: Data, tmp_path: Path
) -> None:
    """A run of a gated delta net with EP2 that resumes with TP2 and EP4 equals one process.

    After the resume the experts are not split by tensor parallelism. The run with two processes
    includes the isolation self-test; the others do not.
    """
    options = tiny_options(
        data,
        **GATED_DELTA_NET,
        train_iters=LAST,
        valid_data_path=data.valid,
        eval_interval=3,
    )
    alone, together = tmp_path / "alone", tmp_path / "together"
    said = trained(alone, 1, options)
    [model] = [line for line in said.splitlines() if "parameters" in line]
    tested = {**options, "no_isolation_self_test": None, "moe_token_dispatcher_type": "alltoall"}
    said = trained(together, 2, tested, exit_interval=3, **EXPERTS)
    assert model in said  # the whole model's parameters, not a rank's
    assert "(experts 1 tensor-parallel x 2 expert-parallel x 1 data-parallel)" in said
    assert "isolation self-test: 12 checks passed" in said
    layout = {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 4,
    }
    said = trained(together, 4, options, use_distributed_optimizer=True, **layout)
    assert (
        "(iteration 3)" in said
        and "experts 1 tensor-parallel x 4 expert-parallel x 1 data-parallel" in said
    )
    assert "the expert buffer of a rank holds 256 rows" in said and "the worst case is 256" in said
    assert_same_log(together, alone)


def test_steps_whose_experts_have_no_room_are_done_again(data: Data, tmp_path: Path) -> None:
    """A run that repeats steps because of a small expert buffer equals a run with a large buffer.

    Repeats also happen around saves and at the end. Only one rank's buffer can overflow, because
    two ranks cannot both have more than an even share.
    """
    options = tiny_options(data, train_iters=LAST, save_interval=2, **EXPERTS)
    large, small = tmp_path / "large", tmp_path / "small"
    said = trained(large, 2, options)
    assert "is repeated" not in said and "holds 512 rows" in said
    said = trained(small, 2, options, moe_expert_rank_capacity_factor=FACTOR)
    again = [
        number
        for number in range(1, LAST + 1)
        if f"step {number} needed more room for experts" in said
    ]
    assert 1 < len(again) < LAST, said
    assert_same_log(small, large)
    assert_close_state(small, large, LAST, 1e-4)


def test_a_run_whose_bounds_follow_the_routing_resumes_across_an_overflow(
    data: Data, tmp_path: Path
) -> None:
    """A run with bounded parts of alltoall has the bits of a run that asks for all sizes.

    The learning rate makes the routing of step 4 uneven. The first process stops after step 5,
    and the second process begins with the raised bounds.
    """
    options = tiny_options(
        data,
        train_iters=LAST,
        lr=0.05,
        hidden_dropout=0.1,
        moe_token_dispatcher_type="alltoall",
        **EXPERTS,
    )
    asked, bounded = tmp_path / "asked", tmp_path / "bounded"
    trained(asked, 2, options)
    options["moe_expert_rank_capacity_factor"] = "auto"
    said = trained(bounded, 2, options, exit_interval=5)
    assert "expert buffers: the first packs need 1.22 of an even share" in said
    assert "the expert buffer of a rank follows the routing; the worst case is " in said
    assert said.count("is repeated") == 1 and "step 4 needed more room for experts" in said
    said = trained(bounded, 2, options)
    assert "first packs need" not in said and "is repeated" not in said
    assert_same_log(bounded, asked)
    bounds, repeats, loads = (
        [line[f"expert_{name}"] for line in steps(bounded / "log.jsonl")]
        for name in ("rank_bound", "repeats", "rank_load")
    )
    assert repeats == [0] * 3 + [1] * 3
    raised = round(1.2 * loads[3], 2)
    assert [round(bound, 2) for bound in bounds] == [1.46] * 4 + [raised] * 2 and raised > 1.46
    (state, metadata), (expected, _) = (
        final_state(folder / "checkpoints", LAST) for folder in (bounded, asked)
    )
    assert metadata["expert_bounds"]["repeats"] == 1
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def as_before_the_option(found: Path, name: str) -> None:
    """Remove an option of the model from the configuration in a checkpoint."""
    manifest = found / "manifest.json"
    fields = unseal(manifest.read_bytes(), manifest)
    del fields["metadata"]["config"]["model"][name]
    manifest.write_bytes(seal(fields))


def test_a_run_of_rows_goes_on_with_rows(data: Data, tmp_path: Path) -> None:
    """A checkpoint from before ``--moe-dispatch`` resumes with the bits of a run that never stopped.

    A flag for tokens changes the bits: the sums of two experts of a rank are then rounded to bf16.
    """
    options = tiny_options(
        data,
        train_iters=4,
        bf16=True,
        hybrid_layer_pattern="E",
        moe_router_topk=3,
        moe_token_dispatcher_type="alltoall",
        **dict.fromkeys(
            ("mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "mamba_chunk_size")
        ),
        **EXPERTS,
    )
    never, resumed, tokens = (tmp_path / name for name in ("never", "resumed", "tokens"))
    trained(never, 2, options, moe_dispatch="rows", save_interval=2)
    for folder in (resumed, tokens):
        saved = shutil.copytree(
            never / "checkpoints" / "step_00000002", folder / "checkpoints" / "step_00000002"
        )
        as_before_the_option(saved, "moe_dispatch")
    said = trained(resumed, 2, options)
    assert "so that sums keep their order: --moe-dispatch rows" in said
    assert_same_state(resumed / "checkpoints", never / "checkpoints", 4)
    trained(tokens, 2, options, moe_dispatch="tokens")
    expected, found = (final_state(run / "checkpoints", 4)[0] for run in (never, tokens))
    assert any(not torch.equal(found[name], value) for name, value in expected.items())
