"""Tests of heads that are exchanged in parts: order of the messages, and equal bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.config.exchanged_heads import number_of_parts
from megatron_packed.distributed import all_to_all, overlapped_exchange
from megatron_packed.distributed.all_to_all import EqualExchange
from megatron_packed.distributed.collectives import Started, start_exchange, wait_for
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.overlapped_exchange import compute_by_heads
from megatron_packed.distributed.testing import WorkerPools
from megatron_packed.models.isolation import check_isolation
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases
from support import rank_models
from support.recorder import Recorder

TOKENS, ALIGNMENT = 32, 8
LENGTHS = [1, 9, 3]
CHANGES = {
    "untie_embeddings_and_output_weights": False,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "mamba_num_heads": 256,
    "mamba_head_dim": 1,
    "mamba_num_groups": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 256,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 1,
    "position_embedding_type": "rope",
    "attention_output_gate": True,
    "qk_layernorm": True,
}
"""Sizes with 32 heads of a recurrence and 64 convolution channels in each of 8 parts.

Sums over the rows of a part then have the order of sums over the rows of all heads.
"""
LAYOUTS = [(2, {"cp_size": 2}), (4, {"tp_size": 2, "cp_size": 2})]


# -- order of the messages -------------------------------------------------------------------------


class _Noted(torch.autograd.Function):
    """Doubling that notes when it runs in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: int, events: list[str]) -> Tensor:
        ctx.part, ctx.events = part, events
        events.append(f"compute {part}")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(f"compute {ctx.part}")
        return 2 * dy, None, None


def exchanged(x: Tensor, group: dist.ProcessGroup, parts: int) -> tuple[list[str], list[str]]:
    """Return the events of the forward and of the backward pass."""
    events: list[str] = []

    def starting(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Started]:
        events.append("start")
        return start_exchange(x, group)

    def waiting(started: Started | None) -> None:
        if started is not None:
            events.append("wait")
        wait_for(started)

    def compute(part: int, columns_TW: Tensor) -> Tensor:
        return _Noted.apply(columns_TW.unflatten(1, (-1, 3)), part, events)

    with (
        mock.patch.object(all_to_all, "start_exchange", starting),
        mock.patch.object(overlapped_exchange, "wait_for", waiting),
    ):
        y = compute_by_heads([x], compute, EqualExchange(group), parts)
        forward = events[:]
        y.backward(torch.ones_like(y))
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full_like(x, 2))
    return forward, events[len(forward) :]


def orders(groups: ParallelGroups) -> list[tuple[list[str], list[str]]]:
    x = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(groups.rank))
    return [exchanged(x.clone().requires_grad_(), groups.cp_group, parts) for parts in (1, 2, 4)]


def test_the_next_part_is_on_its_way_before_a_part_is_computed(pools: WorkerPools) -> None:
    start, wait = "start", "wait"
    for rank in pools.run(orders, 2, layout={"cp_size": 2}):
        one, two, four = rank
        assert one == (["compute 0"], ["compute 0"])
        assert two == (
            [start, start, wait, "compute 0", start, wait, "compute 1", start, wait, wait],
            [start, start, wait, "compute 1", start, wait, "compute 0", start, wait, wait],
        )
        for events, first in zip(four, ("compute 0", "compute 3")):
            assert events[:6] == [start] * 4 + [wait, first]


@pytest.mark.parametrize(
    ("wanted", "ranks", "counts", "parts"),
    [
        (1, 2, (64, 8), 1),
        (4, 2, (64, 8), 4),
        (3, 2, (64, 8), 2),
        (8, 2, (64, 8), 4),
        (4, 8, (64, 8), 1),
        (4, 8, (64, 4), 1),
        (3, 2, (12, 6), 3),
        (2**31 - 1, 2, (64, 8), 4),  # a count up to this number would take minutes
    ],
)
def test_a_part_has_complete_groups_of_heads(
    wanted: int, ranks: int, counts: tuple[int, ...], parts: int
) -> None:
    assert number_of_parts(wanted, ranks, counts) == parts


# -- equal bits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Model and options of one run."""

    pattern: str
    comm_type: str = "a2a"
    mamba: str = "heads"
    sequence_parallel: bool = False
    changes: dict[str, Any] = field(default_factory=lambda: CHANGES)


def results(groups: ParallelGroups, run: Run, parts: int) -> tuple[dict[str, Tensor], list[int]]:
    """Return loss, losses of tokens and gradients, and the parts of each layer."""
    model = rank_models.build(
        run.pattern,
        run.changes,
        groups,
        dtype=torch.float32,
        cp_comm_type=run.comm_type,
        mamba_cp_comm_type=run.mamba,
        cp_comm_overlap_parts=parts,
        sequence_parallel=run.sequence_parallel,
    )
    documents = cases.make_documents(LENGTHS)
    batch = MicroBatch.build(
        documents, TOKENS, len(LENGTHS) + 2, (1 / 40, 1.0), alignment=ALIGNMENT
    )
    with Recorder() as recorder:
        output = model(batch)
        output.loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    mixers = [getattr(layer.mixer, "core_attn", layer.mixer) for layer in model.layers]
    found |= {"loss": output.loss.detach(), "tokens": output.per_token_loss_T.detach()}
    counts = [getattr(mixer, "parts", 0) for mixer in mixers]
    return found, [*counts, len(recorder.collectives())]


def differences(
    groups: ParallelGroups, runs: list[Run]
) -> list[tuple[list[str], list[int], list[int]]]:
    """Return what differs by a bit if heads are exchanged in parts, and both numbers of parts."""
    answers = []
    for run in runs:
        (whole, once), (split, often) = (results(groups, run, parts) for parts in (1, 4))
        wrong = [name for name, value in whole.items() if not torch.equal(split[name], value)]
        answers.append((wrong, once, often))
    return answers


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_parts_have_the_bits_of_the_whole(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    tp, cp = layout.get("tp_size", 1), layout["cp_size"]
    runs = [
        Run("M*G-", sequence_parallel=tp > 1),
        Run("MG*", "p2p"),
        Run("M*G", "a2a", "state"),
    ]
    most = 8 // tp // cp
    for rank in pools.run(differences, world_size, runs, layout=layout):
        (all_wrong, once, often), (ring_wrong, _, ring), (state_wrong, _, state) = rank
        assert all_wrong == ring_wrong == state_wrong == []
        assert once[:3] == [1, 1, 1] and often[:3] == [most] * 3
        # Two exchanges of three layers, forward and backward.
        assert often[-1] - once[-1] == 12 * (most - 1)
        assert ring[:3] == [most, most, 1] and state[:3] == [1, most, most]


def isolated(groups: ParallelGroups, comm_types: list[str]) -> list[list[str]]:
    """Return the failed checks of the isolation self-test with heads in two parts.

    With ``p2p`` attention exchanges no heads.
    """
    checked = (
        check_isolation(
            cases.tiny_config("M*G" if comm_type == "a2a" else "M", **CHANGES),
            "cpu",
            torch.float32,
            groups=groups,
            cp_comm_type=comm_type,
            cp_comm_overlap_parts=2,
        )
        for comm_type in comm_types
    )
    return [[str(result) for result in results if not result.passed] for results in checked]


def test_documents_in_parts_of_heads_are_isolated(pools: WorkerPools) -> None:
    for failed in pools.run(isolated, 2, ["a2a", "p2p"], layout={"cp_size": 2}):
        assert failed == [[], []]
