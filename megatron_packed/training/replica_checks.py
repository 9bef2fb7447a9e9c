"""Checks that data-parallel replicas hold the same bits, and that sums of gradients are the sums of
what was added.

A defective GPU or link can change a weight or a gradient on one rank, and the loss would not show
it.

[Note: when weights are compared]
Between two updates nothing writes a weight: bf16 weights are the rounded float32 masters of their
owner, and every replica holds the same bits. A checked step compares both when its gradients are
complete and before it updates anything. So a weight that changed since the last update is found
before the cast from the masters or the gather overwrites it, and before the gradient that it
spoiled is applied. A second comparison follows the update, before anything is saved.

[Note: how a sum of gradients is checked]
Sums of floating-point numbers depend on their order, so a second sum need not have the same bits.
Rows of ``ROW`` gradients are therefore added up in float64 on each rank before the collective, and
these sums over ranks. Afterwards the rows of the result must add up to them but for the rounding of
the collective: at most half an ulp of the sum of absolute values, for each rank beyond the first.
After an all-reduce all replicas must hold the same bits, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import GRAIN_ELEMENTS, ParamSlot
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.training.replica_hashes import (
    CHUNK,
    against_masters,
    bit_hash,
    digest,
    mismatches,
    on_host,
)

ROW = 512
"""Gradients that are added up together."""
assert GRAIN_ELEMENTS % ROW == 0, "a rank owns whole rows"
_NAMED = 8
"""Differences that a message names."""


class ReplicaMismatchError(RuntimeError):
    """Ranks hold other bits than those that should hold the same."""


class OwnedSpan(NamedTuple):
    """Elements ``[start, end)`` of the gradient buffer: the part of one parameter that one rank
    owns.
    """

    slot: ParamSlot
    owner: int
    """Rank in the group of owners."""
    start: int
    end: int

    @property
    def name(self) -> str:
        whole = (self.start, self.end) == (self.slot.start, self.slot.end)
        return self.slot.name + (
            "" if whole else f"[{self.start - self.slot.start}:{self.end - self.slot.start}]"
        )


class StepChecks(NamedTuple):
    """Checks of one step; None: not in this one."""

    weights: Callable[[], None] | None = None
    """Called when all gradients are there, before anything is updated."""
    gradients: Callable[[Callable[[], None]], None] | None = None
    """Called with the sum of gradients over replicas, which it runs."""


UNCHECKED = StepChecks()
"""Nothing, as in most steps."""


class ReplicaCheck:
    """Comparison of what the ranks of a job should hold alike.

    See [Note: when weights are compared] and [Note: how a sum of gradients is checked].
    Every method is a collective of all ranks that waits for the device.

    Args:
        model: the model.
        optimizer: of its parameters.
        groups: process groups of this rank.
        resting: entered before the host waits for the device and for other ranks.
    """

    def __init__(
        self,
        model: HybridModel,
        optimizer: Optimizer,
        groups: ParallelGroups,
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.buffers = optimizer.buffers
        self.groups = groups
        self._resting = resting
        self._spans = list(self._cut())

    def weights(self) -> None:
        """Compare weights with the rounded masters of their owner, and whatever replicas hold
        alike.

        Raises:
            ReplicaMismatchError: on all ranks, naming what differs and where.
        """
        # A gather of parameters may still be under way, and would be compared half done.
        self.buffers.wait_params()
        held: dict[tuple[bool, str], Tensor] = {}
        for span in self._spans:
            held[span.slot.part.expert, span.name] = bit_hash(self._held(span))
        due = list(self._hashes_of_masters())
        state = {key: bit_hash(tensor) for key, tensor in self._replicated_state()}
        with self._resting():
            numbers = on_host([*held.values(), *due, *state.values()])
            hashes = dict(
                zip([*held, *state], [*numbers[: len(held)], *numbers[len(held) + len(due) :]])
            )
            wrong = {
                self._called(span.slot.part.expert, span.name): self._masters_of(span)
                for span, found, wanted in zip(self._spans, numbers, numbers[len(held) :])
                if span.slot.dtype == torch.bfloat16 and found != wanted
            }
            self._compare("weights or optimizer state", hashes, wrong)

    def gradients(self, reduce: Callable[[], None]) -> None:
        """Run ``reduce``, which sums the flat gradients over replicas, and check the sums.

        Raises:
            ReplicaMismatchError: on all ranks, naming the gradients that are wrong and where.
        """
        # Before the collective, in float64: a sum of the sums is known without trusting it.
        expected = self._sums_of_rows()
        experts = self.buffers.layout.expert_numel // ROW
        if experts:
            all_reduce_sum(expected[:experts], self.groups.expert_dp_group)
        all_reduce_sum(expected[experts:], self.groups.dp_cp_group)
        reduce()
        wrong_rows = self._wrong_rows(expected, self._sums_of_rows())
        summed = {
            (slot.part.expert, f"gradient of {slot.name}"): self._hash_of_sum(slot)
            for slot in self.buffers.layout.slots
            if self.buffers.owners(slot.part).size == 1
        }
        # They are summed in the same collective, so a defective link may change them as well.
        summed[False, "losses and counts of the step"] = bit_hash(self.buffers.tail, one_nan=True)
        with self._resting():
            *numbers, count = on_host([*summed.values(), wrong_rows.sum()])
            rows = wrong_rows.cpu() if count else wrong_rows[:0]
            wrong = {
                self._called(
                    slot.part.expert, f"gradient of {slot.name}"
                ): "than the sum of what was added"
                for slot in self.buffers.layout.slots
                if rows[slot.start // ROW : -(-slot.end // ROW)].any()
            }
            self._compare("sums of gradients", dict(zip(summed, numbers)), wrong)

    # ------------------------------------------------------------------------------------------------------
    # weights

    def _cut(self) -> Iterator[OwnedSpan]:
        """Return all parameters, cut where another rank's share begins; alike on all ranks that
        hold them.
        """
        layout = self.buffers.layout
        for slot in layout.slots:
            for rank in range(self.buffers.owners(slot.part).size):
                first, last = layout.owned_span(layout.buckets[slot.bucket], rank)
                start, end = max(slot.start, first), min(slot.end, last)
                if start < end:
                    yield OwnedSpan(slot, rank, start, end)

    def _held(self, span: OwnedSpan) -> Tensor:
        """Return this rank's copy of the parameter."""
        first = span.slot.start
        return self.buffers.param_view(span.slot)[span.start - first : span.end - first]

    def _hashes_of_masters(self) -> Tensor:
        """Return the hash of each span's masters as its owner rounds them; 0 for parameters
        without a copy.
        """
        masters, starts = self.optimizer.state_shards(), self.optimizer.state_starts()
        hashes = torch.zeros(len(self._spans), dtype=torch.int64, device=self.buffers.device)
        for number, span in enumerate(self._spans):
            owned = span.owner == self.buffers.owners(span.slot.part).rank
            if owned and span.slot.dtype == torch.bfloat16:
                name = f"master/{span.slot.name}"
                first = span.slot.start + starts[name]
                master = masters[name][span.start - first : span.end - first]
                hashes[number] = bit_hash(master, torch.bfloat16)
        apart = sum(span.slot.part.expert for span in self._spans)  # weights of experts come first
        ownership = self.buffers.ownership
        if apart and ownership.experts is not None:
            all_reduce_sum(hashes[:apart], ownership.experts.group)
        all_reduce_sum(hashes[apart:], ownership.group)
        return hashes

    def _replicated_state(self) -> Iterator[tuple[tuple[bool, str], Tensor]]:
        """Return what replicas hold alike besides parameters: masters and moments unless owned
        once, biases, steps.
        """
        state = self.optimizer.state_shards()
        yield (False, "the number of steps"), state["step"]
        for slot in self.buffers.layout.slots:
            if (
                self.buffers.owners(slot.part).size == 1
                and self._replicas(slot.part.expert) is not None
            ):
                kinds = (
                    "exp_avg",
                    "exp_avg_sq",
                    *(("master",) if slot.dtype == torch.bfloat16 else ()),
                )
                for kind in kinds:
                    yield (slot.part.expert, f"{kind}/{slot.name}"), state[f"{kind}/{slot.name}"]
        persistent = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                yield (False, name), buffer

    def _masters_of(self, span: OwnedSpan) -> str:
        """Return whose masters ``span`` should equal, in words."""
        group = self.buffers.owners(span.slot.part).group
        if group is None:
            return "than its own rounded masters"
        return f"than the rounded masters of rank {dist.get_process_group_ranks(group)[span.owner]}"

    # ----------------------------------------------------------------------------------------------------
    # gradients

    def _hash_of_sum(self, slot: ParamSlot) -> Tensor:
        # Which of two NaN an addition passes on depends on their order, and the step is skipped
        # alike.
        return bit_hash(self.buffers.grads[slot.start : slot.end], one_nan=True)

    def _sums_of_rows(self) -> Tensor:
        """Return ``(rows, 2)`` float64: the sum of each row of gradients, and of its absolute
        values.
        """
        rows = self.buffers.grads.view(-1, ROW)
        sums = torch.empty(len(rows), 2, dtype=torch.float64, device=rows.device)
        for start in range(0, len(rows), CHUNK // ROW):
            part = rows[start : start + CHUNK // ROW].double()
            sums[start : start + len(part), 0] = part.sum(1)
            sums[start : start + len(part), 1] = part.abs_().sum(1)
        return sums

    def _wrong_rows(self, expected: Tensor, found: Tensor) -> Tensor:
        """Return ``(rows,)`` bool: the rows that this rank owns and whose sums are beyond rounding.
        See the note.
        """
        limits, wrong = (
            torch.finfo(self.buffers.grads.dtype),
            torch.zeros_like(found[:, 0], dtype=torch.bool),
        )
        for bucket in self.buffers.layout.buckets:
            ranks = self.groups.expert_dp_size if bucket.part.expert else self.groups.dp_cp_size
            first, last = self.buffers.owned_span(bucket)
            rows = slice(first // ROW, last // ROW)
            (wanted, size), sums = expected[rows].unbind(1), found[rows, 0]
            # Errors of the collective, of second order too, and of the two sums in float64.
            relative = (
                1.001 * (ranks - 1) * limits.eps / 2 + 4 * ROW * torch.finfo(torch.float64).eps
            )
            close = (sums - wanted).abs() <= relative * size + ranks * ROW * limits.tiny
            # Beyond all numbers: the step is skipped and named as non-finite, where that is right.
            wrong[rows] = ~close & (size < limits.max)
        return wrong

    # ---------------------------------------------------------------------------------------------------
    # comparison

    def _replicas(self, expert: bool) -> dist.ProcessGroup | None:
        """Return the ranks that hold the same parameters as this one; None: no other."""
        return self.groups.expert_dp_group if expert else self.groups.dp_cp_group

    def _called(self, expert: bool, name: str) -> str:
        """Return ``name`` with the part of the model that ranks with the same bits share."""
        groups, places = self.groups, []
        if expert and groups.ep_size > 1:
            places.append(f"expert-parallel rank {groups.ep_rank}")
        size, rank = (
            (groups.expert_tp_size, groups.expert_tp_rank)
            if expert
            else (groups.tp_size, groups.tp_rank)
        )
        if size > 1:
            places.append(f"tensor-parallel rank {rank}")
        return f"{name} ({', '.join(places)})" if places else name

    def _compare(
        self, what: str, hashes: Mapping[tuple[bool, str], int], wrong: Mapping[str, str]
    ) -> None:
        """Raise on all ranks if replicas differ or any rank has found something ``wrong``."""
        ranks = Ranks(
            rank=self.groups.rank, world_size=self.groups.world_size, group=self.groups.world_group
        )
        held = {self._called(*key): value for key, value in hashes.items()}
        digests: dict[str, int] = {}
        for expert in (False, True):
            kept = [value for key, value in hashes.items() if key[0] is expert]
            if kept:
                digests[self._called(expert, "experts" if expert else "dense")] = digest(kept)
        # First a few numbers of each rank: names and hashes of all parameters are exchanged only
        # when something differs, which is next to never.
        brief = [
            cast(dict[str, int], one) for one in ranks.gather({**digests, "wrong": len(wrong)})
        ]
        troubled = [rank for rank, one in enumerate(brief) if one.pop("wrong")]
        if not troubled and not mismatches(brief):
            return
        everything = [
            cast(dict[str, dict], one) for one in ranks.gather({"held": held, "wrong": dict(wrong)})
        ]
        found = against_masters([one["wrong"] for one in everything])
        known = {name for one in everything for name in one["wrong"]}
        others = [
            {name: value for name, value in one["held"].items() if name not in known}
            for one in everything
        ]
        found += mismatches(others)
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise ReplicaMismatchError(
            f"{what} have bits that they should not have: {'; '.join(found[:_NAMED])}{more}. Load a checkpoint from "
            "before the last check that passed, and look at the hardware of these ranks"
        )
