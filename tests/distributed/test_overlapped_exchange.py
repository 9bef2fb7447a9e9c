"""Tests of heads that are exchanged in parts: order of the messages, and equal results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.config.exchanged_heads import number_of_parts
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed import all_to_all
from megatron_packed.distributed.all_to_all import (
    EqualExchange,
    compute_by_heads,
    heads_to_rows,
    rows_to_columns,
)
from megatron_packed.distributed.collectives import Started, start_exchange, wait_for
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers import head_parallel
from megatron_packed.models.isolation import check_isolation
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases
from support import rank_models
from support.process_pools import WorkerPools
from support.recorder import Recorder

TOKENS, ALIGNMENT = 32, 8
LENGTHS = [1, 9, 3]
CHANGES = {
    "untie_embeddings_and_output_weights": False,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "mamba_num_heads": 16,
    "mamba_head_dim": 4,
    "mamba_num_groups": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 4,
    "position_embedding_type": "rope",
    "attention_output_gate": True,
    "qk_layernorm": True,
}
ROUNDING = 4 * TOKENS * torch.finfo(torch.float32).eps
"""Largest difference of parts from the whole, relative to the largest value of a tensor.

The matrix products of a part have other shapes. On some CPUs they add in another order, and the
gradient of a head's parameter adds such differences over all tokens: by measurement 4.3e-6.
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
        mock.patch.object(all_to_all, "wait_for", waiting),
    ):
        y = compute_by_heads([x], compute, EqualExchange(group), parts)
        forward = events[:]
        y.backward(torch.ones_like(y))
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full_like(x, 2))
    return forward, events[len(forward) :]


def orders(groups: ParallelGroups) -> list[tuple[list[str], list[str]]]:
    x = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(groups.rank))
    return [exchanged(x.clone().requires_grad_(), groups.cp.group, parts) for parts in (1, 2, 4)]


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


# -- equal results ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Model and options of one run."""

    pattern: str
    comm_type: str = "a2a"
    mamba: str = ParallelConfig.mamba_cp_comm_type
    linear: str = ParallelConfig.linear_cp_mode
    sequence_parallel: bool = False
    changes: dict[str, Any] = field(default_factory=lambda: CHANGES)


def computed_in_turn(
    tensors: Sequence[Tensor],
    compute: Callable[[int, Tensor], Tensor],
    exchange: EqualExchange,
    parts: int,
) -> Tensor:
    """Exchange all heads in one message each way, and compute the parts between the two.

    The products have the shapes and strides of `compute_by_heads`, so the results have its bits.
    """
    widths = [x[0].numel() // exchange.size for x in tensors]
    split = [x.chunk(parts, 1) for x in rows_to_columns(tensors, exchange).split(widths, 1)]
    results = [compute(part, torch.cat(x, dim=1)) for part, x in enumerate(zip(*split))]
    for y in results:
        y.register_hook(Tensor.contiguous)  # a message is contiguous, a slice of the gradient not
    return heads_to_rows([torch.cat(results, dim=1)], exchange)[0]


def in_turn() -> contextlib.ExitStack:
    """Return a ``with`` block in which layers compute parts by `computed_in_turn`."""
    stack = contextlib.ExitStack()
    for module in (all_to_all, head_parallel):
        stack.enter_context(mock.patch.object(module, "compute_by_heads", computed_in_turn))
    return stack


def results(groups: ParallelGroups, run: Run, parts: int) -> tuple[dict[str, Tensor], list[int]]:
    """Return loss, losses of tokens and gradients, and the parts of each layer."""
    model = rank_models.build(
        run.pattern,
        run.changes,
        groups,
        dtype=torch.float32,
        cp_comm_type=run.comm_type,
        mamba_cp_comm_type=run.mamba,
        linear_cp_mode=run.linear,
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
    exchanging = [getattr(mixer, "over_ranks", mixer) for mixer in mixers]
    counts = [getattr(one, "parts", 1) for one in exchanging]
    return found, [*counts, len(recorder.collectives())]


class Compared(NamedTuple):
    """Comparison of heads that are exchanged in parts with one exchange of all heads."""

    other_bits: list[str]
    """Results with other bits than the same parts between two exchanges of all heads."""
    beyond_rounding: dict[str, float]
    """Results that differ by more than `ROUNDING` from those of all heads together."""
    once: list[int]
    """Parts of each layer, and number of collectives, with one part."""
    often: list[int]
    """The same with several parts."""


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return max |difference| / max |value|; 0 for two tensors of zeros."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def compare(groups: ParallelGroups, runs: list[Run]) -> list[Compared]:
    answers = []
    for run in runs:
        (whole, once), (split, often) = (results(groups, run, parts) for parts in (1, 4))
        with in_turn():
            same, _ = results(groups, run, 4)
        moved = {name: relative_difference(split[name], value) for name, value in whole.items()}
        answers.append(
            Compared(
                [name for name, value in same.items() if not torch.equal(split[name], value)],
                {name: ratio for name, ratio in moved.items() if not ratio <= ROUNDING},
                once,
                often,
            )
        )
    return answers


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_parts_equal_the_whole(pools: WorkerPools, world_size: int, layout: dict[str, int]) -> None:
    tp, cp = layout.get("tp_size", 1), layout["cp_size"]
    runs = [
        Run("M*G-", "a2a", "heads", "headwise", tp > 1),
        Run("MG*", "p2p", "heads", "headwise"),
        Run("M*G"),
    ]
    most = 8 // tp // cp
    for rank in pools.run(compare, world_size, runs, layout=layout):
        for compared in rank:
            assert (compared.other_bits, compared.beyond_rounding) == ([], {})
        heads, ring, state = rank
        assert heads.once[:3] == [1, 1, 1] and heads.often[:3] == [most] * 3
        # Two exchanges of three layers, forward and backward.
        assert heads.often[-1] - heads.once[-1] == 12 * (most - 1)
        assert ring.often[:3] == [most, most, 1] and state.often[:3] == [1, most, 1]


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
            mamba_cp_comm_type="heads",
            linear_cp_mode="headwise",
            cp_comm_overlap_parts=2,
        )
        for comm_type in comm_types
    )
    return [[str(result) for result in results if not result.passed] for results in checked]


def test_documents_in_parts_of_heads_are_isolated(pools: WorkerPools) -> None:
    for failed in pools.run(isolated, 2, ["a2a", "p2p"], layout={"cp_size": 2}):
        assert failed == [[], []]
