"""Lengths of documents for tests of packing."""

import numpy as np

SLOTS = 2048
"""Token slots of a pack."""


def long_tail(count: int, seed: int = 0) -> np.ndarray:
    """Return lengths that are distributed like the lengths of documentation pages.

    Half are below 200 tokens, and a tenth is longer than a pack (cut to the slots of a pack).
    """
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(5.3, 1.7, count)).astype(int) + 30, 1, SLOTS)


def dialogues(count: int, seed: int = 0) -> np.ndarray:
    """Return lengths that are distributed like the lengths of dialogues."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.normal(330, 130, count).astype(int), 56, 850)
