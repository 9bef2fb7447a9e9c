"""Documents of several sources that an epoch holds when each source contributes a given share
of the tokens.

An epoch holds about as many tokens as the sources together. Each source is an endless stream: its
documents in a new random order for every pass over it. Epoch e takes from source i the documents
that begin between tokens ``e q`` and ``(e + 1) q`` of its stream, where q is the source's share of
an epoch's tokens. So over time every source is read evenly, a small one with a large weight several
times in an epoch, a large one with a small weight in part, going on where the epoch before it
stopped, and every epoch is a pure function of (lengths, weights, seed, epoch).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.keyed_random import KeyedRandom


class SourceBlend:
    """The documents of every epoch.

    Args:
        lengths: ``(S,)`` tokens of each piece of a document.
        source: ``(S,)`` number of the source of each piece.
        weights: share of each source, more than 0; they sum up to 1.
        seed: of the data order.
    Raises:
        ValueError: a source has no piece.
    Example:
        Of sources of 100 and 900 tokens with weights 1/2 and 1/2, an epoch holds the first five
        times, and 500 tokens of the second, the other 400 and the first 100 of the next pass in the
        epoch after.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        source: NDArray[np.int64],
        weights: Sequence[Fraction],
        seed: int,
    ) -> None:
        self.weights = tuple(weights)
        self._lengths = lengths
        self._seed = seed
        self._pieces = [np.flatnonzero(source == number) for number in range(len(weights))]
        self.sizes = [int(lengths[pieces].sum()) for pieces in self._pieces]
        """Tokens of each source."""
        if not all(self.sizes):
            raise ValueError(
                f"source {self.sizes.index(0) + 1} of the blend has no document that can be used."
            )
        total = sum(self.sizes)
        self.quotas = [
            -(-weight.numerator * total // weight.denominator) for weight in self.weights
        ]
        """Tokens of each source in an epoch, give or take a document."""

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """``(n,)`` numbers of the pieces of an epoch, in no order that matters; a piece may be in
        it several times.
        """
        return np.concatenate(
            [self._of_source(number, epoch) for number in range(len(self.weights))]
        )

    def _of_source(self, number: int, epoch: int) -> NDArray[np.int64]:
        pieces, size, quota = self._pieces[number], self.sizes[number], self.quotas[number]
        begin, end = epoch * quota, (epoch + 1) * quota
        taken = []
        for turn in range(begin // size, -(-end // size)):
            order = pieces[KeyedRandom(self._seed, "blend", number, turn).permutation(len(pieces))]
            lengths = self._lengths[order]
            starts = turn * size + np.cumsum(lengths) - lengths
            taken.append(order[(starts >= begin) & (starts < end)])
        return np.concatenate(taken)

    def sentences(self, names: Sequence[str]) -> list[str]:
        """The shares, for people."""
        lines = [f"SourceBlend: an epoch holds {sum(self.quotas)} tokens, of"]
        for name, weight, size, quota in zip(
            names, self.weights, self.sizes, self.quotas, strict=True
        ):
            lines.append(
                f"  {name}: {float(weight):.2%}, {quota} tokens, {quota / size:.3g} times its {size}"
            )
        return lines
