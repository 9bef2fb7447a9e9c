"""Random numbers that are a function of a key, and nothing else.

numpy promises that the raw stream of a bit generator never changes; it does not promise that for
``Generator.permutation`` or ``shuffle``. Data order has to survive an upgrade of numpy in the
middle of a training run, so everything here is made from raw 64-bit words.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


class KeyedRandom:
    """A stream of random words that depends on ``seed`` and ``key`` alone; other keys give
    independent streams.

    Example:
        ``KeyedRandom(1234, "shuffle", epoch).permutation(num_documents)``
    """

    def __init__(self, seed: int, *key: str | int) -> None:
        digest = hashlib.sha256(repr((int(seed), *key)).encode()).digest()
        words = np.frombuffer(digest, dtype="<u4").tolist()
        self._bits = np.random.PCG64(np.random.SeedSequence(words))

    def words(self, size: int) -> NDArray[np.uint64]:
        """``(size,)`` uint64, uniform."""
        return self._bits.random_raw(size) if size else np.zeros(0, np.uint64)

    def permutation(self, size: int) -> NDArray[np.int64]:
        """``(size,)`` int64: 0 .. size - 1 in random order."""
        return np.argsort(self.words(size), kind="stable")

    def below(self, bound: NDArray[np.integer] | int, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Integers in ``[0, bound)``, of ``shape``; ``bound`` broadcasts against it and is below
        2**31.

        The high 32 bits of a word are scaled, so the bias is below 2**-32 * bound.
        """
        high = (self.words(int(np.prod(shape))) >> np.uint64(32)).astype(np.int64).reshape(shape)
        scaled: NDArray[np.int64] = (high * np.asarray(bound, dtype=np.int64)) >> 32
        return scaled
