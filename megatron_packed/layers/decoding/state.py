"""Interface of the state that a mixer keeps of each document while tokens are generated.

Letters: T tokens of a pack, B documents, D hidden size, L cached positions.

A new kind of mixer derives a class from `MixerState`, or takes `NoState` or `RecurrentState`, and
names it in its record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.layers.moe.layer import MoEOutput
from megatron_packed.packed.params import PackedSeqParams


@dataclass(frozen=True, kw_only=True, eq=False)
class NextTokens:
    """Positions of the next token of each of B documents, for all layers of a model."""

    positions_B: Tensor
    """``(B,)`` int64: number of tokens of the document before the new token."""
    longest: int
    """Number of tokens of the longest document, including the new token."""
    visible_BL: Tensor
    """``(B, L)`` bool: True for positions of the document up to the new token. L is `longest`,
    rounded up to a multiple of `CACHE_BLOCK`.
    """
    packed: PackedSeqParams
    """Pack of B documents of one token each, for mixers that process each token independently.

    The pack may have a tail, if the number of tokens must be a multiple.
    """


CACHE_BLOCK = 64
"""Cached positions are allocated and attended in multiples of this number, as kernels prefer."""


class MixerState(ABC):
    """State of one mixer for the documents of a batch.

    `prefill` starts new documents. `step` then adds one token to each of them. All tensors of a
    state have the documents as their first dimension.
    """

    @abstractmethod
    def prefill(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        """Run the mixer on a pack of complete prompts, and store the state after each of them.

        Args:
            x_TD: ``(T, D)`` normalised hidden state of all tokens.
            packed: metadata of the pack; the documents are the prompts.
        Returns:
            ``(T, D)``.
        """

    @abstractmethod
    def step(self, x_BD: Tensor, tokens: NextTokens) -> Tensor:
        """Run the mixer on the next token of each document, and update the state.

        Args:
            x_BD: ``(B, D)`` normalised hidden state of the new tokens.
            tokens: positions of the new tokens.
        Returns:
            ``(B, D)``.
        """

    @abstractmethod
    def keep(self, rows_B: Tensor) -> None:
        """Keep only some documents.

        Args:
            rows_B: int64 numbers of the documents to keep, ascending, on the device.
        """


class NoState(MixerState):
    """Empty state of a mixer that processes each token independently."""

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer

    def prefill(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        y_TD: Tensor | MoEOutput = self.mixer(x_TD, packed)
        return y_TD.hidden_TD if isinstance(y_TD, MoEOutput) else y_TD

    def step(self, x_BD: Tensor, tokens: NextTokens) -> Tensor:
        tail = tokens.packed.total_tokens - len(x_BD)
        return self.prefill(F.pad(x_BD, (0, 0, 0, tail)), tokens.packed)[: len(x_BD)]

    def keep(self, rows_B: Tensor) -> None:
        pass
