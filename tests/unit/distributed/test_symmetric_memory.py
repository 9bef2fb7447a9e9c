"""Symmetric memory: reasons against it, agreement of all ranks, and the life of its workspace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed import symmetric_memory
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.symmetric_memory import (
    SymmetricMemory,
    connect,
    dtype_reasons,
    not_supported_reasons,
    own_facts,
    workspace_bytes,
)

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16


class Group:
    """Stand-in for the process group of two ranks."""

    group_name = "7"


def facts(number: int, **changes: Any) -> dict[str, Any]:
    return {"host": "a", "device": number, "peers": [True] * 8, "shares": False, **changes}


PAIR = [facts(0), facts(1)]


def test_a_group_of_gpus_that_access_each_other_is_supported() -> None:
    assert not_supported_reasons(CUDA, PAIR) == []
    assert not_supported_reasons(CUDA, [facts(number) for number in range(8)]) == []
    assert workspace_bytes(4096, 2048, BF16) == 2 * 4096 * 2048 * 2


@pytest.mark.parametrize(
    "device, members, reason",
    [
        (
            torch.device("cpu"),
            PAIR,
            "symmetric memory needs CUDA GPUs, but the device is cpu",
        ),
        (
            CUDA,
            [facts(number) for number in range(9)],
            "the group has 9 ranks, but symmetric memory is used for at most 8",
        ),
        (CUDA, [facts(0), facts(1, host="b")], "the ranks of the group are on 2 hosts"),
        (
            CUDA,
            [facts(0), facts(0)],
            "ranks of the group have the same GPU number; make all GPUs of the host visible to each",
        ),
        (
            CUDA,
            [facts(0), facts(1, peers=[False, True])],
            "GPU 1 cannot access GPU 0",
        ),
        (CUDA, [facts(0, peers=[True]), facts(1)], "GPU 0 cannot access GPU 1"),
    ],
)
def test_reasons_name_the_fact_against_it(
    device: torch.device, members: list[dict[str, Any]], reason: str
) -> None:
    assert reason in not_supported_reasons(device, members)


def test_products_are_fused_in_bfloat16_only() -> None:
    assert dtype_reasons(BF16) == []
    assert dtype_reasons(torch.float32) == [
        "fused products are checked in bfloat16 only, but the dtype is float32"
    ]


def test_ranks_may_share_a_gpu_in_tests_only() -> None:
    shared = [facts(0, shares=True), facts(0, shares=True)]
    assert not_supported_reasons(CUDA, shared) == []
    assert own_facts(torch.device("cpu"))["peers"] == []


def test_a_torch_without_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("no module")

    monkeypatch.setattr(symmetric_memory, "symmetric_memory", absent)
    reason = f"torch {torch.__version__} has no symmetric memory"
    assert not_supported_reasons(CUDA, PAIR) == [reason]


class Torch:
    """Stand-in for torch's module: one workspace for each group, which grows on request."""

    def __init__(self, error: str = "") -> None:
        self._group_name_to_workspace_tensor: dict[str, Tensor] = {}
        self._error = error

    def get_symm_mem_workspace(self, group_name: str, min_size: int) -> None:
        if self._error:
            raise RuntimeError(self._error)
        self._group_name_to_workspace_tensor[group_name] = torch.zeros(min_size)


def test_the_workspace_lives_until_close(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Torch()
    monkeypatch.setattr(symmetric_memory, "symmetric_memory", lambda: stand_in)
    memory = SymmetricMemory(Group(), 64)  # type: ignore[arg-type]
    workspace = memory.workspace
    assert memory.holds(64) and not memory.holds(65)
    # A larger product elsewhere makes torch replace the workspace; graphs still contain this one.
    stand_in.get_symm_mem_workspace("7", 128)
    assert memory.workspace is workspace
    memory.close()
    assert not memory.holds(1) and "7" in stand_in._group_name_to_workspace_tensor
    again = SymmetricMemory(Group(), 64)  # type: ignore[arg-type]
    again.close()
    again.close()
    assert stand_in._group_name_to_workspace_tensor == {}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> ParallelGroups:
    """Return the groups of one process, whose stand-in for a group has this rank only."""
    monkeypatch.setattr(symmetric_memory, "own_facts", lambda device: facts(0))
    monkeypatch.setattr(symmetric_memory, "global_ranks", lambda group: [0])
    monkeypatch.setattr(symmetric_memory, "not_supported_reasons", lambda *_: [])
    size = SimpleNamespace(get_world_size=lambda group: 1, get_rank=lambda group: 0)
    monkeypatch.setattr(symmetric_memory, "dist", size)
    return ParallelGroups.single()


def test_a_refused_mapping_is_a_reason(
    alone: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_memory, "symmetric_memory", lambda: Torch("no handle\nmore"))
    assert connect(Group(), alone, BF16, 64) == (  # type: ignore[arg-type]
        "the ranks cannot map each other's memory (RuntimeError: no handle)"
    )


@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_numbers_are_a_reason(
    alone: ParallelGroups, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    stand_in = Torch()
    monkeypatch.setattr(symmetric_memory, "symmetric_memory", lambda: stand_in)

    def gathered(self: Any, own: Tensor, matrix: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
        return own, own @ matrix

    def scattered(self: Any, x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix * (2 if wrong else 1)

    monkeypatch.setattr(SymmetricMemory, "all_gather_matmul", gathered)
    monkeypatch.setattr(SymmetricMemory, "matmul_reduce_scatter", scattered)
    found = connect(Group(), alone, BF16, 64)  # type: ignore[arg-type]
    if wrong:
        assert found == "matmul_reduce_scatter over symmetric memory gives wrong numbers"
        assert stand_in._group_name_to_workspace_tensor == {}
    else:
        assert isinstance(found, SymmetricMemory) and found.holds(64)
