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

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

ROW = 512
"""Gradients that are added up together."""
assert GRAIN_ELEMENTS % ROW == 0, "a rank owns whole rows"
_CHUNK = 1 << 24
"""Elements that are looked at together."""
_NAMED = 8
"""Differences that a message names."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaMismatchError(RuntimeError):
    """Ranks hold other bits than those that should hold the same."""


class Piece(NamedTuple):
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
    """Comparison of what the ranks of a job should hold alike. Reads: both notes of this module.

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
        self.model, self.optimizer, self.buffers, self.groups = (
            model,
            optimizer,
            optimizer.buffers,
            groups,
        )
        self._resting = resting
        self._pieces = list(self._cut())

    def weights(self) -> None:
        """Compare weights with the rounded masters of their owner, and whatever replicas hold
        alike.

        Raises:
            ReplicaMismatchError: on all ranks, naming what differs and where.
        """
        self.buffers.wait_params()
        held: dict[tuple[bool, str], Tensor] = {}
        for piece in self._pieces:
            held[piece.slot.part.expert, piece.name] = bit_hash(self._held(piece))
        due = list(self._hashes_of_masters())
        state = {key: bit_hash(tensor) for key, tensor in self._replicated_state()}
        with self._resting():
            numbers = _on_host([*held.values(), *due, *state.values()])
            hashes = dict(
                zip([*held, *state], [*numbers[: len(held)], *numbers[len(held) + len(due) :]])
            )
            wrong = {
                self._called(piece.slot.part.expert, piece.name): self._masters_of(piece)
                for piece, found, wanted in zip(self._pieces, numbers, numbers[len(held) :])
                if piece.slot.dtype == torch.bfloat16 and found != wanted
            }
            self._compare("weights or optimizer state", hashes, wrong)

    def gradients(self, reduce: Callable[[], None]) -> None:
        """Run ``reduce``, which sums the flat gradients over replicas, and check the sums.

        Raises:
            ReplicaMismatchError: on all ranks, naming the gradients that are wrong and where.
        """
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
        summed[False, "losses and counts of the step"] = bit_hash(self.buffers.tail, one_nan=True)
        with self._resting():
            *numbers, count = _on_host([*summed.values(), wrong_rows.sum()])
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

    def _cut(self) -> Iterator[Piece]:
        """Return all parameters, cut where another rank's share begins; alike on all ranks that
        hold them.
        """
        layout = self.buffers.layout
        for slot in layout.slots:
            for rank in range(self.buffers.owners(slot.part).size):
                first, last = layout.owned_span(layout.buckets[slot.bucket], rank)
                start, end = max(slot.start, first), min(slot.end, last)
                if start < end:
                    yield Piece(slot, rank, start, end)

    def _held(self, piece: Piece) -> Tensor:
        """Return this rank's copy of the parameter."""
        first = piece.slot.start
        return self.buffers.param_view(piece.slot)[piece.start - first : piece.end - first]

    def _hashes_of_masters(self) -> Tensor:
        """Return the hash of each piece's masters as its owner rounds them; 0 for parameters
        without a copy.
        """
        masters, starts = self.optimizer.state_shards(), self.optimizer.state_starts()
        hashes = torch.zeros(len(self._pieces), dtype=torch.int64, device=self.buffers.device)
        for number, piece in enumerate(self._pieces):
            owned = piece.owner == self.buffers.owners(piece.slot.part).rank
            if owned and piece.slot.dtype == torch.bfloat16:
                name = f"master/{piece.slot.name}"
                first = piece.slot.start + starts[name]
                master = masters[name][piece.start - first : piece.end - first]
                hashes[number] = bit_hash(master, torch.bfloat16)
        apart = sum(
            piece.slot.part.expert for piece in self._pieces
        )  # weights of experts come first
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

    def _masters_of(self, piece: Piece) -> str:
        """Return whose masters ``piece`` should equal, in words."""
        group = self.buffers.owners(piece.slot.part).group
        if group is None:
            return "than its own rounded masters"
        return (
            f"than the rounded masters of rank {dist.get_process_group_ranks(group)[piece.owner]}"
        )

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
        for start in range(0, len(rows), _CHUNK // ROW):
            part = rows[start : start + _CHUNK // ROW].double()
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
                digests[self._called(expert, "experts" if expert else "dense")] = _digest(kept)
        brief = [
            cast(dict[str, int], one) for one in ranks.gather({**digests, "wrong": len(wrong)})
        ]
        troubled = [rank for rank, one in enumerate(brief) if one.pop("wrong")]
        if not troubled and not mismatches(brief):
            return
        everything = [
            cast(dict[str, dict], one) for one in ranks.gather({"held": held, "wrong": dict(wrong)})
        ]
        found = _against_masters([one["wrong"] for one in everything])
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


def bit_hash(tensor: Tensor, dtype: torch.dtype | None = None, *, one_nan: bool = False) -> Tensor:
    """Return a 0-d int64 of the bits of ``tensor``, rounded to ``dtype``; one flipped bit makes it
    another one.

    Every element counts with an odd factor that follows from its place, modulo 2^64. With
    ``one_nan`` the bits of a NaN do not matter.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(dtype or flat.dtype)
        if one_nan:
            part = torch.where(part.isnan(), torch.nan, part)
        bits = part.view(_WORDS[part.element_size()]).to(torch.int64)
        places = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=flat.device)
        total = total + (bits * (2 * places + 1)).sum()
    return total


def mismatches(hashes: Sequence[Mapping[str, int]]) -> list[str]:
    """Return a sentence for each name of which ranks hold several versions.

    Args:
        hashes: by rank, what it holds and its hash.
    """
    found = []
    for key in dict.fromkeys(key for one in hashes for key in one):
        held = {rank: one[key] for rank, one in enumerate(hashes) if key in one}
        versions = Counter(held.values())
        if len(versions) == 1:
            continue
        usual, count = versions.most_common(1)[0]
        if 2 * count > len(held):
            found.append(
                f"{key}: {_ranks([r for r, value in held.items() if value != usual])} of {_ranks(list(held))}"
            )
        else:
            found.append(f"{key}: {_ranks(list(held))} have no majority")
    return found


def _against_masters(wrong: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a sentence for each name that some rank has found wrong by itself, from what each has
    found.
    """
    found = []
    for name in dict.fromkeys(name for one in wrong for name in one):
        reasons: dict[str, list[int]] = {}
        for rank, one in enumerate(wrong):
            if name in one:
                reasons.setdefault(one[name], []).append(rank)
        found += [
            f"{name}: {_ranks(ranks)} with other bits {reason}" for reason, ranks in reasons.items()
        ]
    return found


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _on_host(numbers: Sequence[Tensor]) -> list[int]:
    """Return 0-d integers on the device as numbers of the host, by one copy."""
    return torch.stack(list(numbers)).tolist()  # type: ignore[no-any-return]


def _digest(hashes: Sequence[int]) -> int:
    """Return one number for many."""
    data = ",".join(map(str, hashes)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
