"""Real runs with expert parallelism: the log of one process, and steps that are repeated."""

from pathlib import Path
from typing import Any

from support.runs import Data, assert_same_log, final_state, tiny_options, trained

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

    After the resume the experts are not split by tensor parallelism. Every run includes the
    isolation self-test.
    """
    options = tiny_options(
        data,
        **GATED_DELTA_NET,
        train_iters=LAST,
        valid_data_path=data.valid,
        eval_interval=3,
        no_isolation_self_test=None,
    )
    alone, together = tmp_path / "alone", tmp_path / "together"
    said = trained(alone, 1, options)
    [model] = [line for line in said.splitlines() if "parameters" in line]
    said = trained(
        together, 2, options, exit_interval=3, moe_token_dispatcher_type="alltoall", **EXPERTS
    )
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
        if f"step {number} needed a larger expert buffer" in said
    ]
    assert 1 < len(again) < LAST, said
    assert_same_log(small, large)
    state, expected = (final_state(folder / "checkpoints", LAST)[0] for folder in (small, large))
    for name in expected:
        if not name.startswith("rng/"):
            assert (state[name] - expected[name]).abs().max() <= 1e-4 * expected[
                name
            ].abs().max(), name
