"""Tests of random numbers that depend only on a key, with golden values.

The data order must not change when a package is upgraded.
"""

import numpy as np

from megatron_packed.data.keyed_random import KeyedRandom

GOLDEN_WORDS = [4932758610950276487, 14123936118058324394, 2922261267730655174]
GOLDEN_PERMUTATION = [3, 2, 0, 9, 5, 8, 7, 1, 6, 4]


def test_golden_values():
    """Words and permutations have fixed values; else resumed runs would change their data order."""
    assert KeyedRandom(1234, "documents", 0).words(3).tolist() == GOLDEN_WORDS
    assert KeyedRandom(1234, "documents", 0).permutation(10).tolist() == GOLDEN_PERMUTATION


def test_key_and_seed_give_different_streams():
    keys = [
        (1, "a", 0),
        (1, "a", 1),
        (1, "b", 0),
        (2, "a", 0),
        (1, "a"),
        (11, "a", 0),
        (1, "a1", 0),
        (-1, "a", 0),
    ]
    assert len({KeyedRandom(*key).words(4).tobytes() for key in keys}) == len(keys)
    assert KeyedRandom(1, "a", 0).words(4).tobytes() == KeyedRandom(1, "a", 0).words(4).tobytes()


def test_permutation_is_uniform():
    """The 24 orders of 4 elements occur equally often, by a chi-squared test.

    The test has 23 degrees of freedom.
    """
    random = KeyedRandom(0, "test")
    orders: dict[tuple[int, ...], int] = {}
    for _ in range(2400):
        order = tuple(random.permutation(4).tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    # the probability of a value above 49.7 is 0.001
    assert sum((count - 100) ** 2 / 100 for count in orders.values()) < 50


def test_below_stays_below_and_reaches_everything():
    random = KeyedRandom(0, "test")
    bound = np.array([1, 2, 7, 1000])
    drawn = random.below(bound, (5000, 4))
    assert (drawn >= 0).all()
    assert (drawn < bound).all()
    assert [np.unique(drawn[:, column]).size for column in range(3)] == [1, 2, 7]
    assert abs(drawn[:, 3].mean() - 499.5) < 15
    assert random.below(3, (0, 4)).shape == (0, 4)
