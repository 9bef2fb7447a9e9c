"""The isolation self-test of attention includes the moves of rows to a zigzag and back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers import context_parallel
from megatron_packed.models.isolation import check_isolation
from support import hybrid_cases as cases
from support.process_pools import WorkerPools

PERMUTE = context_parallel.permute_rows


def to_next_row(x_TW: Tensor, index_T: Tensor, inverse_T: Tensor) -> Tensor:
    """Move each row to the place after its own, the last row of a document to the next document."""
    return PERMUTE(x_TW, index_T.roll(1), inverse_T)


def gradient_to_next_row(x_TW: Tensor, index_T: Tensor, inverse_T: Tensor) -> Tensor:
    return PERMUTE(x_TW, index_T, inverse_T.roll(1))


def failed_checks(
    groups: ParallelGroups, pattern: str, moves: Any, communication: dict[str, str]
) -> list[tuple[str, str]]:
    """Return the failed checks of a model with these moves."""
    config = cases.tiny_config(pattern, position_embedding_type="rope")
    with mock.patch.object(context_parallel, "permute_rows", moves):
        results = check_isolation(config, "cpu", torch.float32, groups=groups, **communication)
    return [(result.symbol, result.quantity) for result in results if not result.passed]


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_a_leak_in_the_moves_of_rows_is_found(pools: WorkerPools, comm_type: str) -> None:
    zigzag = {"cp_comm_type": comm_type, "cp_partition_mode": "zigzag"}

    def failed(moves: Any) -> list[tuple[str, str]]:
        first, second = pools.run(failed_checks, 2, "M*-", moves, zigzag, layout={"cp_size": 2})
        assert first == second
        return first

    assert failed(PERMUTE) == []
    assert {("*", "outputs"), ("*", "loss"), ("*", "input gradients")} <= {*failed(to_next_row)}
    assert failed(gradient_to_next_row) == [("*", "input gradients")]
