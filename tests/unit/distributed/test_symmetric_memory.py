"""Symmetric memory: reasons against it, agreement of all ranks, and the mapping of a buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed import symmetric_memory, symmetric_rows
from megatron_packed.distributed.collectives import PendingRows
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.symmetric_memory import (
    SharedBuffer,
    connect_over,
    not_supported_reasons,
    own_facts,
)
from megatron_packed.distributed.symmetric_rows import SymmetricRows, connect

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16


class Group:
    """Stand-in for the process group of one rank."""

    group_name = "7"


def facts(number: int, **changes: Any) -> dict[str, Any]:
    return {"host": "a", "device": number, "peers": [True] * 8, "shares": False, **changes}


PAIR = [facts(0), facts(1)]


def test_a_group_of_gpus_that_access_each_other_is_supported() -> None:
    assert not_supported_reasons(CUDA, PAIR) == []
    assert not_supported_reasons(CUDA, [facts(number) for number in range(8)]) == []


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
    """Stand-in for torch's module, its class and its mapping: one rank, bytes of the CPU."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self._SymmetricMemory = self

    def empty_strided_p2p(self, shape: tuple[int], *rest: Any) -> Tensor:
        if self._error:
            raise RuntimeError(self._error)
        self._bytes = torch.zeros(shape, dtype=torch.uint8)
        return self._bytes

    def rendezvous(self, own: Tensor) -> Torch:
        assert own is self._bytes
        return self

    def get_buffer(self, rank: int, shape: tuple[int], dtype: torch.dtype) -> Tensor:
        assert rank == 0 and dtype == torch.uint8
        return self._bytes.view(shape)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> ParallelGroups:
    """Return the groups of one process, whose stand-in for a group has this rank only."""
    monkeypatch.setattr(symmetric_memory, "own_facts", lambda device: facts(0))
    monkeypatch.setattr(symmetric_memory, "global_ranks", lambda group: [0])
    monkeypatch.setattr(symmetric_memory, "not_supported_reasons", lambda *_: [])
    size = SimpleNamespace(get_world_size=lambda group: 1)
    monkeypatch.setattr(symmetric_memory, "dist", size)
    return ParallelGroups.single()


def test_a_refused_mapping_is_a_reason(
    alone: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_memory, "symmetric_memory", lambda: Torch("no handle\nmore"))
    group: Any = Group()
    found = connect_over(group, alone, lambda: SharedBuffer(group, CUDA, 64), lambda _: [])  # type: ignore[type-var]
    assert found == "the ranks cannot map each other's memory (RuntimeError: no handle)"


def test_a_buffer_has_the_bytes_of_every_rank(
    alone: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_memory, "symmetric_memory", Torch)
    group: Any = Group()
    assert [rank.shape for rank in SharedBuffer(group, CUDA, 64).of_ranks] == [(64,)]


@pytest.mark.parametrize("wrong", ["", "all_gather", "start_scatter"])
def test_wrong_numbers_are_a_reason(
    alone: ParallelGroups, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    class OneRank(SymmetricRows):
        """Rows of one rank, whose exchanges give its own rows."""

        closed = False

        def __init__(self, group: Any, device: torch.device, nbytes: int) -> None:
            self.rank, self.size, self.device, self.nbytes = 0, 1, device, nbytes

        def all_gather_matmul(
            self, own_TI: Tensor, matrix_IO: Tensor, *, keep: bool
        ) -> tuple[Tensor, Tensor]:
            return own_TI * (2 if wrong == "all_gather" else 1), own_TI @ matrix_IO

        def matmul_reduce_scatter(self, x_TI: Tensor, matrix_IO: Tensor) -> Tensor:
            return x_TI @ matrix_IO

        def start_gather(self, own_TI: Tensor) -> PendingRows:
            return PendingRows(None, own_TI)

        def start_scatter(self, x_TI: Tensor) -> PendingRows:
            return PendingRows(None, x_TI * (float("nan") if wrong == "start_scatter" else 1))

        def close(self) -> None:
            OneRank.closed = True

    monkeypatch.setattr(symmetric_rows, "SymmetricRows", OneRank)
    found = connect(Group(), alone, BF16, 64)  # type: ignore[arg-type]
    if wrong:
        assert found == f"{wrong} over symmetric memory gives wrong numbers"
    else:
        assert isinstance(found, OneRank)
    assert OneRank.closed == bool(wrong)
