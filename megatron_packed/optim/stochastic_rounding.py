"""Stochastic rounding of bf16 moments, with the same draws in every parallel layout.

A moment that is rounded to the nearest bf16 stops to move when its change is below half a unit in the
last place, 2^-9 of it. Stochastic rounding keeps such changes on average: 16 random bits are added to
the float32 before its lower 16 bits are cut off.

The draws depend on the seed, the name of the parameter, the number of the step on the device, and the
number of the element in the unsplit parameter. So they are the same on any ranks and after a resume,
and a step that is repeated draws the same. One word of 64 bits serves one element:
its lowest 16 bits the first moment, the next 16 the second. The word is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014) at a position instead of in a sequence::

    word = mix(mix(key + step * STEP_GAMMA) + element * ELEMENT_GAMMA)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_packed.distributed.tensor_parallel_shards import ShardedParameter
from megatron_packed.distributed.zero1_layout import ParamSlot
from megatron_packed.packed.array_types import Int64Array

STEP_GAMMA = 0xD1342543DE82EF95
ELEMENT_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
"""Constants of SplitMix64, after each of whose shifts but the last a multiplication follows."""
RUN_ELEMENTS = 8192
"""Most elements that one row of `ElementNumbers.runs` describes."""
ALIGNMENT = 64
"""Every run starts at a multiple of this number in its slice, as parameters and shares do."""
SEGMENTS, COLUMNS, LISTED = range(3)
"""Rules by which a run numbers its elements; see `ElementNumbers.runs`."""
_MASK = (1 << 64) - 1


def key_of(seed: int, name: str) -> int:
    """Return the key of a parameter: 64 bits as a signed number."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def words_of(keys: Tensor, step: Tensor, elements: Tensor) -> Tensor:
    """Return one word of 64 random bits for each element.

    Args:
        keys: int64 of any shape, the key of each element's parameter.
        step: 0-d float32, number of the step.
        elements: int64 of the same shape, number of each element in its unsplit parameter.
    """
    of_step = _mix(keys + step.to(torch.int64) * _signed(STEP_GAMMA))
    return _mix(of_step + elements * _signed(ELEMENT_GAMMA))


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round finite float32 values to bf16; up with the probability of the part that is cut off.

    Args:
        values: float32 of any shape.
        bits: int64 of the same shape, from 0 to 65,535.
    """
    raw = values.view(torch.int32).to(torch.int64) + bits
    return (raw >> 16).to(torch.int16).view(torch.bfloat16)


def _mix(words: Tensor) -> Tensor:
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None)):
        words = words ^ ((words >> shift) & (_MASK >> shift))  # a shift that fills with zeros
        if multiplier is not None:
            words = words * _signed(multiplier)
    return words


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True, kw_only=True, eq=False)
class ElementNumbers:
    """Numbers of a slice's elements in the unsplit parameters, as tables for a kernel.

    A rank's shard of a parameter consists of rows of equal length, each with the same columns of the
    unsplit parameter (`StoredPiece`). A run is a part of a shard with one rule for its numbers.
    """

    runs: Tensor
    """``(R, 8)`` int64: first element in the slice; number of elements, with padding to a multiple of
    64; key of the parameter; kind; and four numbers a, b, c, d. Element e of the run has the number

    - `SEGMENTS`: ``a + e`` for ``e < b``, and ``c + e`` from b on;
    - `COLUMNS`: ``a + (e + b) // c * d + (e + b) % c``: columns of a matrix with rows of d elements;
    - `LISTED`: ``listed[a + e]``, in parameters with many short pieces.
    """
    listed: Tensor
    """Int64 numbers of the elements of `LISTED` runs."""

    @classmethod
    def in_slice(
        cls,
        slots: Sequence[ParamSlot],
        shards: Mapping[str, ShardedParameter],
        start: int,
        end: int,
        seed: int,
        device: torch.device,
    ) -> ElementNumbers:
        """Describe elements ``[start, end)`` of the gradient buffer.

        Args:
            slots: positions of the parameters in the buffer, in its order.
            shards: name -> parameter, with its place in the unsplit parameter.
            seed: seed of the draws.
            device: device of the tables.
        """
        rows, listed = [np.zeros((0, 8), np.int64)], [np.zeros(0, np.int64)]
        for slot in slots:
            first, last = max(slot.start, start), min(slot.end, end)
            if first < last:
                of_slot = _rows_of(shards[slot.name], first - slot.start, last - slot.start, listed)
                of_slot[:, 0] += slot.start - start
                of_slot[:, 2] = key_of(seed, slot.name)
                rows.append(of_slot)
        return cls(
            runs=torch.from_numpy(np.concatenate(rows)).to(device),
            listed=torch.from_numpy(np.concatenate(listed)).to(device),
        )

    def of_slice(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the key and the number of each of a slice's ``length`` elements, both int64.

        Padding between parameters that no run covers has key 0 and number 0.
        """
        keys = torch.zeros(length, dtype=torch.int64, device=self.runs.device)
        numbers = torch.zeros_like(keys)
        for begin, count, key, kind, a, b, c, d in self.runs.tolist():
            e = torch.arange(count, device=keys.device)
            if kind == SEGMENTS:
                of_run = torch.where(e < b, a + e, c + e)
            elif kind == COLUMNS:
                of_run = a + (e + b) // c * d + (e + b) % c
            else:
                of_run = self.listed[a : a + count]
            keys[begin : begin + count] = key
            numbers[begin : begin + count] = of_run
        return keys, numbers


def _rows_of(
    sharded: ShardedParameter, first: int, last: int, listed: list[Int64Array]
) -> Int64Array:
    """Return rows of `ElementNumbers.runs` for elements ``[first, last)`` of a shard.

    The first column counts from the start of the shard, and the third is 0. Numbers of `LISTED` runs
    are appended to ``listed``.
    """
    begins = np.arange(first, last, RUN_ELEMENTS)
    counts = np.minimum(RUN_ELEMENTS, last - begins)
    rows = np.zeros((len(begins), 8), np.int64)
    rows[:, 0], rows[:, 1] = begins, -(-counts // ALIGNMENT) * ALIGNMENT
    pieces = sharded.stored_pieces()
    if not pieces:  # The shard is padding of a vocabulary, whose state is always zero.
        rows[:, 4] = rows[:, 6] = begins
        return rows
    whole = pieces[0]
    if len(pieces) == 1 and whole.rows > 1 and whole.local_stride == whole.length:
        rows[:, 3] = COLUMNS
        rows[:, 4] = whole.global_start + begins // whole.length * whole.global_stride
        rows[:, 5], rows[:, 6] = begins % whole.length, whole.length
        rows[:, 7] = whole.global_stride
        return rows
    # Starts of the pieces' rows in the shard and in the unsplit parameter. Padding at the end of a
    # parameter continues the last piece.
    local, unsplit = np.array(sorted(run for piece in pieces for run in piece.runs())).T
    at, last_at = (
        np.searchsorted(local, place, side="right") - 1 for place in (begins, begins + counts - 1)
    )
    shift = unsplit - local
    rows[:, 4], rows[:, 5], rows[:, 6] = (
        begins + shift[at],
        local[last_at] - begins,
        begins + shift[last_at],
    )
    rows[at == last_at, 5] = 0
    for row in np.flatnonzero(last_at > at + 1):
        place = np.arange(begins[row], begins[row] + rows[row, 1])
        numbers = place + shift[np.searchsorted(local, place, side="right") - 1]
        rows[row, 3:] = LISTED, sum(map(len, listed)), 0, 0, 0
        listed.append(numbers)
    return rows
