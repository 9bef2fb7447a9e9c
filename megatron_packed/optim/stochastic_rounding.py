"""Stochastic rounding of bf16 moments, with the same draws in every parallel layout.

A moment that is rounded to the nearest bf16 stops to move when its change is below half a unit in the
last place, 2^-9 of it. Stochastic rounding keeps such changes on average: 16 random bits are added to
the float32 before its lower 16 bits are cut off.

The draws are a function of the seed, the name of the parameter, the number of the step on the device,
and the number of the element in the whole unsplit parameter. So they are the same on any ranks and
after a resume, and a step that is repeated draws the same. One word of 64 bits serves one element:
its lowest 16 bits the first moment, the next 16 the second. The word is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014) at a position instead of in a sequence::

    word = mix(mix(key + step * STEP_GAMMA) + element * ELEMENT_GAMMA)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.distributed.tensor_parallel_shards import ShardedParameter
from megatron_packed.distributed.zero1_layout import ParamSlot, round_up

STEP_GAMMA = 0xD1342543DE82EF95
ELEMENT_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
"""Constants of SplitMix64, after each of whose shifts but the last a multiplication follows."""
BLOCK_ELEMENTS = 1024
"""Elements that one row of `ElementNumbers` describes, at most."""
ALIGNMENT = 64
"""Every block starts at a multiple of this number in its slice, as parameters and shares do."""
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
    unsplit parameter. Element e of the shard is in row ``e // local_stride``, at column
    ``c = e % local_stride``. Its number is ``row * global_stride + first[k] + c - begin[k]`` with the
    last piece k that begins at or before c. Padding at the end of a parameter continues the last
    piece.
    """

    blocks: Tensor
    """``(B, 4)`` int64: first element in the slice, number of elements (a multiple of 64, where
    padding between parameters is counted), row of ``parameters``, first element in the shard.
    """
    parameters: Tensor
    """``(P, 4 + 2 K)`` int64: key, local stride, global stride, number of pieces, then ``begin`` and
    ``first`` of each piece.
    """

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
        blocks: list[tuple[int, int, int, int]] = []
        parameters: list[list[int]] = []
        for slot in slots:
            first, last = max(slot.start, start), min(slot.end, end)
            if first >= last:
                continue
            blocks += [
                (
                    begin - start,
                    round_up(min(BLOCK_ELEMENTS, last - begin), ALIGNMENT),
                    len(parameters),
                    begin - slot.start,
                )
                for begin in range(first, last, BLOCK_ELEMENTS)
            ]
            parameters.append(_row_of(shards[slot.name], key_of(seed, slot.name)))
        width = max(map(len, parameters), default=4)
        padded = [row + [0] * (width - len(row)) for row in parameters]
        return cls(
            blocks=torch.tensor(blocks, dtype=torch.int64, device=device).view(-1, 4),
            parameters=torch.tensor(padded, dtype=torch.int64, device=device).view(-1, width),
        )

    def of_slice(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the key and the number of each of a slice's ``length`` elements, both int64.

        Padding between parameters that no block covers has key 0 and number 0.
        """
        keys = torch.zeros(length, dtype=torch.int64, device=self.blocks.device)
        numbers = torch.zeros_like(keys)
        for begin, count, row, first in self.blocks.tolist():
            key, local, whole, pieces, *ends = self.parameters[row].tolist()
            begins, firsts = ends[: 2 * pieces : 2], ends[1 : 2 * pieces : 2]
            here = torch.arange(first, first + count, device=keys.device)
            columns = here % local
            piece = torch.bucketize(columns, keys.new_tensor(begins), right=True) - 1
            shift = keys.new_tensor(firsts) - keys.new_tensor(begins)
            keys[begin : begin + count] = key
            numbers[begin : begin + count] = here // local * whole + columns + shift[piece]
        return keys, numbers


def _row_of(sharded: ShardedParameter, key: int) -> list[int]:
    """Return the row of `ElementNumbers.parameters` of one parameter."""
    pieces = sharded.stored_pieces()
    rows = {(piece.local_stride, piece.global_stride) for piece in pieces}
    assert len(rows) == 1, pieces  # all pieces of a shard are columns of the same rows
    local, whole = rows.pop()
    ends = [end for piece in pieces for end in (piece.local_start, piece.global_start)]
    assert ends[::2] == sorted(ends[::2]) and ends[0] == 0, pieces
    return [key, local or max(sharded.parameter.numel(), 1), whole, len(pieces), *ends]
