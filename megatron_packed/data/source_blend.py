"""Selection of the documents of each epoch from several sources with given shares of the tokens.

An epoch has about as many tokens as all sources together. The documents of a source form an endless
stream, in a new random order for every pass over the source. Let q be the source's share of the
tokens of an epoch. Epoch e uses the documents that begin between tokens ``e q`` and ``(e + 1) q``
of the stream.

A small source with a large weight is therefore read several times in an epoch. A large source
with a small weight is read in parts: each epoch continues where the previous one ended. Every epoch
is a pure function of (lengths, weights, seed, epoch).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megatron_packed.data.errors import DataError
from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.packed.array_types import Int64Array


class SourceBlend:
    """Selection of the pieces of every epoch.

    Args:
        lengths: ``(S,)`` tokens of each piece of a document.
        source: ``(S,)`` number of the source of each piece.
        weights: share of each source in the tokens of an epoch, above 0; the sum is 1.
        seed: seed of the data order.
    Raises:
        DataError: a source has no piece, because every document of it was dropped.
    Example:
        Two sources have 100 and 900 tokens, with weights 1/2 and 1/2. An epoch reads the first
        source five times, and 500 tokens of the second source. The next epoch reads the other 400
        tokens of the second source and the first 100 of its next pass.
    """

    def __init__(
        self,
        lengths: Int64Array,
        source: Int64Array,
        weights: Sequence[Fraction],
        seed: int,
    ) -> None:
        self.weights = tuple(weights)
        self._lengths = lengths
        self._seed = seed
        self._pieces = [np.flatnonzero(source == number) for number in range(len(weights))]
        self.sizes = [int(lengths[pieces].sum()) for pieces in self._pieces]
        """Number of tokens of each source."""
        if not all(self.sizes):
            raise DataError(
                f"source {self.sizes.index(0) + 1} of the blend has no usable document; remove it from the blend."
            )
        total = sum(self.sizes)
        self.quotas = [
            -(-weight.numerator * total // weight.denominator) for weight in self.weights
        ]
        """Number of tokens of each source in an epoch, up to the length of a document."""

    def epoch(self, epoch: int) -> Int64Array:
        """Return the numbers of the pieces of an epoch, ``(n,)``.

        A piece may occur several times. The packer shuffles the pieces, so their order is
        arbitrary.
        """
        return np.concatenate(
            [self._of_source(number, epoch) for number in range(len(self.weights))]
        )

    def _of_source(self, number: int, epoch: int) -> Int64Array:
        pieces, size, quota = self._pieces[number], self.sizes[number], self.quotas[number]
        begin, end = epoch * quota, (epoch + 1) * quota
        epoch_pieces = []
        for turn in range(begin // size, -(-end // size)):
            order = pieces[KeyedRandom(self._seed, "blend", number, turn).permutation(len(pieces))]
            lengths = self._lengths[order]
            starts = turn * size + np.cumsum(lengths) - lengths
            epoch_pieces.append(order[(starts >= begin) & (starts < end)])
        return np.concatenate(epoch_pieces)

    def sentences(self, names: Sequence[str]) -> list[str]:
        """Return the shares of the sources as lines of text."""
        lines = [f"SourceBlend: an epoch has {sum(self.quotas)} tokens:"]
        for name, weight, size, quota in zip(
            names, self.weights, self.sizes, self.quotas, strict=True
        ):
            lines.append(
                f"  {name}: {float(weight):.2%} of the epoch, {quota} tokens, {quota / size:.3g} times the {size} "
                "tokens of the source"
            )
        return lines
