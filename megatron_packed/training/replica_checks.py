"""Checks for hardware defects: replicas must hold the same bits, and gradient sums must be right.

A defective GPU or link can change a weight or a gradient on one rank, and the loss would not show
it.

[Note: when weights are compared]
Between two updates nothing writes a weight. Bf16 weights equal the rounded float32 masters of their
owner, and every replica holds the same bits. A checked step compares both after its gradients are
complete and before its update. At that time, the cast from the masters and the gather of parameters
have not yet overwritten a weight that changed since the last update. The gradients that such a
weight has spoiled are not yet applied either. A second comparison follows the update, before a
checkpoint is saved. If masters are the weights with remainders, replicas are compared with the
weights of their owner, and remainders with those of other owners of the same elements.

[Note: how a sum of gradients is checked]
Sums of floating-point numbers depend on their order, so a second sum need not have the same bits.
Before the collective, each rank therefore sums rows of ``ROW`` gradients in float64, and these row
sums are added over ranks. After the collective, each row of the result must have the expected sum,
except for the rounding of the collective. This rounding is at most half an ulp of the sum of
absolute values, for each rank beyond the first. After an all-reduce, all replicas must also hold
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import UNWATCHED, DeviceWatch
from megatron_packed.distributed.replica_hashes import (
    CHUNK,
    against_masters,
    bit_hash,
    digest,
    mismatches,
    on_host,
)
from megatron_packed.distributed.tensor_parallel_shards import is_expert
from megatron_packed.distributed.zero1_layout import GRAIN_ELEMENTS, ParamSlot
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer

ROW = 512
"""Number of consecutive gradient elements that are summed for a comparison."""
assert GRAIN_ELEMENTS % ROW == 0, "a rank owns whole rows"
_NAMED = 8
"""Largest number of differences that a message lists."""


class ReplicaMismatchError(RuntimeError):
    """Error: ranks hold different bits of a tensor that must be equal on these ranks."""


class OwnedSpan(NamedTuple):
    """Part of one parameter that one rank owns: elements ``[start, end)`` of the gradient buffer."""

    slot: ParamSlot
    owner: int
    """Rank of the owner in the process group whose ranks each own a share of the parameters."""
    start: int
    end: int

    @property
    def name(self) -> str:
        covers_parameter = (self.start, self.end) == (self.slot.start, self.slot.end)
        return self.slot.name + (
            ""
            if covers_parameter
            else f"[{self.start - self.slot.start}:{self.end - self.slot.start}]"
        )


@dataclass
class ReplicaCheck:
    """Comparison of tensors that must have the same bits on several ranks.

    See [Note: when weights are compared] and [Note: how a sum of gradients is checked].
    `weights` and `gradients` are collectives of all ranks, and wait for the device.
    """

    model: HybridModel
    optimizer: Optimizer
    """Optimizer of the model's parameters."""
    groups: ParallelGroups
    hang_detector: DeviceWatch = UNWATCHED
    """Suspended while the host waits for the device and for other ranks."""

    def __post_init__(self) -> None:
        self.buffers = self.optimizer.buffers
        self._spans = list(self._cut())

    def weights(self) -> None:
        """Compare weights with their owner's rounded masters, and replicated tensors between ranks.

        Raises:
            ReplicaMismatchError: on all ranks; the message lists the tensors and ranks that differ.
        """
        # Wait for a gather of parameters that may still run. Otherwise the check would compare
        # parameters that are only partly gathered.
        self.buffers.wait_params()
        held: dict[tuple[bool, str], Tensor] = {}
        for span in self._spans:
            held[span.slot.part.expert, span.name] = bit_hash(self._held(span))
        due = list(self._hashes_of_masters())
        state = {key: bit_hash(tensor) for key, tensor in self._replicated_state()}
        with self.hang_detector.idle():
            numbers = on_host([*held.values(), *due, *state.values()])
            hashes = dict(
                zip([*held, *state], [*numbers[: len(held)], *numbers[len(held) + len(due) :]])
            )
            wrong_tensors = {
                self._called(span.slot.part.expert, span.name): self._masters_of(span)
                for span, weights, masters in zip(self._spans, numbers, numbers[len(held) :])
                if span.slot.dtype == torch.bfloat16 and weights != masters
            }
            self._compare("weights or optimizer state", hashes, wrong_tensors)

    def gradients(self, reduce: Callable[[], None]) -> None:
        """Run ``reduce``, which sums the flat gradients over replicas, and check the sums.

        Raises:
            ReplicaMismatchError: on all ranks; the message lists the wrong gradients and ranks.
        """
        # Sum the rows in float64 before the collective that is checked, and add them by a separate
        # collective. See [Note: how a sum of gradients is checked].
        expected = self._sums_of_rows()
        for start, end, expert in self._reduced_together():
            all_reduce_sum(expected[start // ROW : end // ROW], self._replicas(expert))
        reduce()
        wrong_rows = self._wrong_rows(expected, self._sums_of_rows())
        summed = {
            (slot.part.expert, f"gradient of {slot.name}"): self._hash_of_sum(slot)
            for slot in self.buffers.layout.slots
            if self.buffers.owners(slot.part).size == 1
        }
        # The tail (losses and counts) is summed by the same collective as the gradients, so a
        # defective link may change it as well.
        summed[False, "losses and counts of the step"] = bit_hash(self.buffers.tail, one_nan=True)
        with self.hang_detector.idle():
            *numbers, count = on_host([*summed.values(), wrong_rows.sum()])
            rows = wrong_rows.cpu() if count else wrong_rows[:0]
            wrong_tensors = {
                self._called(
                    slot.part.expert, f"gradient of {slot.name}"
                ): "than the sum of the ranks' gradients"
                for slot in self.buffers.layout.slots
                if rows[slot.start // ROW : -(-slot.end // ROW)].any()
            }
            self._compare("sums of gradients", dict(zip(summed, numbers)), wrong_tensors)

    # ------------------------------------------------------------------------------------------------------
    # weights

    def _cut(self) -> Iterator[OwnedSpan]:
        """Yield spans of all parameters, cut at the borders between the shares of owners.

        All ranks that hold a parameter yield the same spans of it.
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
        """Return the hash of each span's masters, rounded to bf16 by the span's owner.

        The hash is 0 for parameters without masters, that is, float32 parameters. A master that is a
        pair has the weight as its rounded value.
        """
        masters, starts = self.optimizer.state_shards(), self.optimizer.state_starts()
        hashes = torch.zeros(len(self._spans), dtype=torch.int64, device=self.buffers.device)
        for number, span in enumerate(self._spans):
            owned = span.owner == self.buffers.owners(span.slot.part).rank
            if owned and span.slot.dtype == torch.bfloat16:
                name = f"master/{span.slot.name}"
                if name not in masters:
                    hashes[number] = bit_hash(self._held(span))
                    continue
                first = span.slot.start + starts[name]
                master = masters[name][span.start - first : span.end - first]
                hashes[number] = bit_hash(master, torch.bfloat16)
        # Every hash is nonzero only on the owner, so a sum over owners gives it to all ranks.
        # Weights of experts have their own group of owners.
        for expert, spans in groupby(enumerate(self._spans), lambda item: item[1].slot.part.expert):
            numbers = [number for number, _ in spans]
            experts = self.buffers.ownership.experts
            owners = experts if expert and experts is not None else self.buffers.ownership
            all_reduce_sum(hashes[numbers[0] : numbers[-1] + 1], owners.group)
        return hashes

    def _replicated_state(self) -> Iterator[tuple[tuple[bool, str], Tensor]]:
        """Yield tensors besides parameters that must be equal on replicas, with their keys.

        They are masters and moments that are not sharded, persistent buffers (experts' biases),
        frozen parameters, and the number of optimizer steps.
        """
        state = self.optimizer.state_shards()
        yield (False, "the number of steps"), state["step"]
        for slot in self.buffers.layout.slots:
            if (
                self.buffers.owners(slot.part).size == 1
                and self._replicas(slot.part.expert) is not None
            ):
                of_masters = ("master", "remainder") if slot.dtype == torch.bfloat16 else ()
                for kind in ("exp_avg", "exp_avg_sq", *of_masters):
                    name = f"{kind}/{slot.name}"
                    if name in state:
                        yield (slot.part.expert, name), state[name]
        persistent = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                yield (False, name), buffer
        apart = self.buffers.ownership.experts is not None
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                yield (apart and is_expert(parameter), name), parameter.detach()

    def _masters_of(self, span: OwnedSpan) -> str:
        """Return the masters that ``span`` should equal, in words for a message."""
        group = self.buffers.owners(span.slot.part).group
        if group is None:
            return "than its own rounded masters"
        # The weights of pairs are themselves the rounded masters.
        pairs = self.optimizer.precision.remainders
        what = "weights that are updated by" if pairs else "rounded masters of"
        return f"than the {what} rank {dist.get_process_group_ranks(group)[span.owner]}"

    # ----------------------------------------------------------------------------------------------------
    # gradients

    def _hash_of_sum(self, slot: ParamSlot) -> Tensor:
        # The bits of a NaN depend on the order of additions. They do not matter, because the step
        # is skipped on all replicas.
        return bit_hash(self.buffers.gradients(slot.start, slot.end), one_nan=True)

    def _reduced_together(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the ranges of gradients that one group sums, and whether they belong to experts."""
        layout = self.buffers.layout
        for expert, parts in groupby(layout.parts, lambda part: part.expert):
            spans = [layout.span(part) for part in parts]
            yield spans[0][0], spans[-1][1], expert

    def _sums_of_rows(self) -> Tensor:
        """Return ``(rows, 2)`` float64: the sum of each row of gradients, and of its absolute
        values.
        """
        sums = []
        for gradients in (self.buffers.low_grads, self.buffers.grads):
            for chunk in torch.split(gradients.view(-1, ROW), CHUNK // ROW):
                part = chunk.double()
                sums.append(torch.stack([part.sum(1), part.abs_().sum(1)], dim=1))
        return torch.cat(sums)

    def _wrong_rows(self, expected: Tensor, found: Tensor) -> Tensor:
        """Return ``(rows,)`` bool: rows owned by this rank whose sums differ by more than rounding.

        See [Note: how a sum of gradients is checked].

        Args:
            expected: ``(rows, 2)`` float64: sums over ranks of `_sums_of_rows` before the collective.
            found: ``(rows, 2)`` float64: `_sums_of_rows` after the collective.
        """
        limits = torch.finfo(self.buffers.grads.dtype)
        wrong_rows = torch.zeros_like(found[:, 0], dtype=torch.bool)
        for bucket in self.buffers.layout.buckets:
            ranks = self.groups.expert_dp.size if bucket.part.expert else self.groups.dp_cp.size
            first, last = self.buffers.owned_span(bucket)
            rows = slice(first // ROW, last // ROW)
            (wanted, size), sums = expected[rows].unbind(1), found[rows, 0]
            # First term: rounding of the collective; 1.001 covers its second-order errors. Second
            # term: rounding of the two float64 sums.
            rounding = (ranks - 1) * limits.eps
            if bucket.part.low:
                # One rounding to bf16 after the sum, or one after each addition.
                times = 1 if self.buffers.precision.rounds_once else ranks - 1
                rounding += times * torch.finfo(torch.bfloat16).eps
            relative = 1.001 * rounding / 2 + 4 * ROW * torch.finfo(torch.float64).eps
            close = (sums - wanted).abs() <= relative * size + ranks * ROW * limits.tiny
            # Do not report rows whose sum of absolute values overflows the gradients' dtype: an
            # infinite result is right there, and the step is skipped as non-finite.
            wrong_rows[rows] = ~close & (size < limits.max)
        return wrong_rows

    # ---------------------------------------------------------------------------------------------------
    # comparison

    def _replicas(self, expert: bool) -> dist.ProcessGroup | None:
        """Return the group of ranks with the same parameters as this rank; None if there is none."""
        return self.groups.expert_dp.group if expert else self.groups.dp_cp.group

    def _called(self, expert: bool, name: str) -> str:
        """Return ``name`` and the expert- and tensor-parallel rank, which tell shards apart."""
        groups, places = self.groups, []
        if expert and groups.ep.size > 1:
            places.append(f"expert-parallel rank {groups.ep.rank}")
        size, rank = (
            (groups.expert_tp.size, groups.expert_tp.rank)
            if expert
            else (groups.tp.size, groups.tp.rank)
        )
        if size > 1:
            places.append(f"tensor-parallel rank {rank}")
        return f"{name} ({', '.join(places)})" if places else name

    def _compare(
        self, what: str, hashes: Mapping[tuple[bool, str], int], wrong: Mapping[str, str]
    ) -> None:
        """Raise an error on all ranks if hashes differ or a rank has found a wrong tensor.

        Args:
            what: the compared tensors, in words for the message.
            hashes: (True for a tensor of an expert, name) -> hash of this rank.
            wrong: name -> the value that the tensor should equal, in words.
        """
        ranks = Ranks.from_groups(self.groups)
        held = {self._called(*key): value for key, value in hashes.items()}
        digests: dict[str, int] = {}
        for expert in (False, True):
            group_hashes = [value for key, value in hashes.items() if key[0] is expert]
            if group_hashes:
                digests[self._called(expert, "experts" if expert else "dense")] = digest(
                    group_hashes
                )
        # Exchange a few numbers per rank first. Names and hashes of all parameters are exchanged
        # only if these numbers differ, which hardly ever happens.
        brief = [
            cast(dict[str, int], counts)
            for counts in ranks.gather({**digests, "wrong": len(wrong)})
        ]
        troubled = [rank for rank, counts in enumerate(brief) if counts.pop("wrong")]
        if not troubled and not mismatches(brief):
            return
        everything = [
            cast(dict[str, dict[str, Any]], of_rank)
            for of_rank in ranks.gather({"held": held, "wrong": dict(wrong)})
        ]
        differences = against_masters([of_rank["wrong"] for of_rank in everything])
        wrong_names = {name for of_rank in everything for name in of_rank["wrong"]}
        others = [
            {name: value for name, value in of_rank["held"].items() if name not in wrong_names}
            for of_rank in everything
        ]
        differences += mismatches(others)
        more_clause = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        raise ReplicaMismatchError(
            f"{what} have wrong bits: {'; '.join(differences[:_NAMED])}{more_clause}. Load a checkpoint that was "
            "saved before the last check that passed, and check the hardware of these ranks"
        )
