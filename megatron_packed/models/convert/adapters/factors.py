"""Factors of adapters, A and B, in the form of the model and in that of Hugging Face matrices.

Letters: E experts, O output width, I input width, P adapters of a weight, r rank. Factors of routed
experts have a first dimension E. A of the model is ``(P r, I)``, and B ``(O, r)``; see `layers.lora`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.models.convert.adapters.matrices import AdaptableWeight


class Factors(NamedTuple):
    """Factors of one matrix, or those of the model's weight."""

    A: Tensor
    B: Tensor


def split_factors(
    weight: AdaptableWeight, stacked: Factors, number_O: Tensor
) -> dict[str, Factors]:
    """Return the factors of each Hugging Face matrix of a weight by its path.

    Args:
        stacked: factors of the model.
        number_O: ``(O,)`` int64: number of the adapter of each row; -1 for rows without one.
    Returns:
        Factors by path. If a matrix has rows of several adapters, its rank is the sum of theirs: each
        of its rows has zeros in the columns of the others.
    """
    rank = stacked.B.shape[-1]
    split = {}
    for matrix in weight.matrices:
        rows = matrix.rows()
        B, number_of_row = stacked.B.index_select(-2, rows), number_O[rows]
        numbers = _numbers(number_of_row)
        if numbers:
            A = [stacked.A.narrow(-2, number * rank, rank) for number in numbers]
            own = [B * (number_of_row == number).view(-1, 1) for number in numbers]
            split[matrix.path] = Factors(torch.cat(A, -2), torch.cat(own, -1))
    return split


def join_factors(
    weight: AdaptableWeight, split: Mapping[str, Factors], number_O: Tensor
) -> Factors:
    """Return the factors of the model; inverts `split_factors`.

    Args:
        split: factors by the path of their matrix, all with the same rank.
        number_O: see `split_factors`.
    Raises:
        CheckpointError: matrices that share an adapter of the model have different As.
    """
    first = next(iter(split.values()))
    rank, lead = first.A.shape[-2], weight.shape[:-2]
    A = first.A.new_zeros(*lead, (int(number_O.max()) + 1) * rank, weight.shape[-1])
    B = first.B.new_zeros(*weight.shape[:-1], rank)
    owner: dict[int, str] = {}
    for matrix in weight.matrices:
        if matrix.path not in split:
            continue
        rows, theirs = matrix.rows(), split[matrix.path]
        for number in _numbers(number_O[rows]):
            own = A.narrow(-2, number * rank, rank)
            other = owner.setdefault(number, matrix.path)
            if other != matrix.path and not torch.equal(own, theirs.A):
                raise CheckpointError(
                    f"{other} and {matrix.path} have different lora_A, but this model has one for both"
                )
            own.copy_(theirs.A)
        B.index_copy_(-2, rows, theirs.B)
    return Factors(A, B)


def _numbers(number_of_row: Tensor) -> list[int]:
    """Return the numbers of the adapters of some rows, without -1."""
    found = set(number_of_row.tolist())
    return sorted(found - {-1})


def merged(weight_OI: Tensor, stacked: Factors, scale: float, number_O: Tensor) -> Tensor:
    """Return ``W + s B A`` in the dtype of the weight.

    Products and the sum are in float32, or in float64 for a float64 weight. Only the sum is rounded.

    Args:
        weight_OI: ``(O, I)``, or ``(E, O, I)`` for routed experts.
        scale: s.
        number_O: see `split_factors`.
    """
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    rank = stacked.B.shape[-1]
    total_OI = weight_OI.to(wide, copy=True)
    for number in range(stacked.A.shape[-2] // rank):
        rows = (number_O == number).nonzero().view(-1)
        B = stacked.B.index_select(-2, rows).to(wide)
        update = B @ stacked.A.narrow(-2, number * rank, rank).to(wide)
        total_OI.index_add_(-2, rows, update, alpha=scale)
    return total_OI.to(weight_OI.dtype)
