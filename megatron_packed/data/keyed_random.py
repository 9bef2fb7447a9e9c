"""Random numbers that depend only on a key.

numpy guarantees that the raw stream of a bit generator never changes. It gives no such guarantee
for ``Generator.permutation`` or ``shuffle``. The data order must not change when numpy is upgraded
in the middle of a training run. This module therefore uses only raw 64-bit words.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from megatron_packed.packed.array_types import Int64Array, IntegerArray


class KeyedRandom:
    """Stream of random words that depends only on ``seed`` and ``key``.

    Different keys give independent streams.

    Example:
        ``KeyedRandom(1234, "shuffle", epoch).permutation(num_documents)``
    """

    def __init__(self, seed: int, *key: str | int) -> None:
        digest = hashlib.sha256(repr((int(seed), *key)).encode()).digest()
        entropy = np.frombuffer(digest, dtype="<u4").tolist()
        self._bits = np.random.PCG64(np.random.SeedSequence(entropy))

    def words(self, size: int) -> NDArray[np.uint64]:
        """Return uniform random words, ``(size,)`` uint64."""
        return self._bits.random_raw(size) if size else np.zeros(0, np.uint64)

    def permutation(self, size: int) -> Int64Array:
        """Return the numbers 0 to size - 1 in random order, ``(size,)`` int64."""
        return np.argsort(self.words(size), kind="stable")

    def below(self, bound: IntegerArray | int, shape: tuple[int, ...]) -> Int64Array:
        """Return random integers in ``[0, bound)`` with the given shape.

        ``bound`` broadcasts against ``shape`` and is below 2**31. The high 32 bits of a random word
        are scaled, so the bias is below 2**-32 * bound.
        """
        high = (self.words(int(np.prod(shape))) >> np.uint64(32)).astype(np.int64).reshape(shape)
        scaled: Int64Array = (high * np.asarray(bound, dtype=np.int64)) >> 32
        return scaled
