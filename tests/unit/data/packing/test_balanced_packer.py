"""Tests of each step of the balanced packer against a simple implementation of its rule."""

import numpy as np
import pytest

from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.data.packing.balanced_packer import (
    EXCHANGE_SLOTS,
    JITTER,
    LEFT_OVER,
    balance,
    best_fit,
    exchange,
    leave_over,
    long_first_order,
    longest_first,
)


def key() -> KeyedRandom:
    return KeyedRandom(0, "test")


def tokens_of(lengths, bin_of, num_bins):
    return np.bincount(bin_of[bin_of >= 0], weights=lengths[bin_of >= 0], minlength=num_bins)


def test_order_is_longest_first_up_to_the_jitter():
    lengths = np.random.default_rng(0).integers(1, 5000, 500)
    order = long_first_order(lengths, key())
    assert sorted(order.tolist()) == list(range(500))
    later = np.maximum.accumulate(lengths[order][::-1])[
        ::-1
    ]  # for each place, the longest document from there to the end
    ratio = (1 + JITTER / 2) / (1 - JITTER / 2) * 1.01
    assert (later <= lengths[order] * ratio).all()
    assert not np.array_equal(order, long_first_order(lengths, KeyedRandom(1, "test")))


@pytest.mark.parametrize("cap", [1, 2, 5, 1000])
def test_longest_first_goes_into_the_emptiest_bin(cap):
    rng = np.random.default_rng(cap)
    for num_bins in (1, 3, 10):
        lengths = rng.integers(1, 900, min(40, num_bins * cap))
        tokens, counts, expected = [0] * num_bins, [0] * num_bins, np.empty(lengths.size, int)
        for document in long_first_order(lengths, key()).tolist():
            emptiest = min(
                (bin for bin in range(num_bins) if counts[bin] < cap),
                key=lambda bin: (tokens[bin], bin),
            )
            expected[document] = emptiest
            tokens[emptiest] += int(lengths[document])
            counts[emptiest] += 1
        assert longest_first(lengths, num_bins, cap, key()).tolist() == expected.tolist()


@pytest.mark.parametrize("cap", [2, 6, 1000])
def test_best_fit_goes_into_the_fullest_bin_where_it_fits(cap):
    rng = np.random.default_rng(cap)
    for _ in range(20):
        lengths = rng.integers(1, 100, 60)
        free, counts, expected = [], [], []
        for length in lengths.tolist():
            fits = [bin for bin in range(len(free)) if free[bin] >= length and counts[bin] < cap]
            chosen = min(fits, key=lambda bin: (free[bin], bin)) if fits else len(free)
            if not fits:
                free.append(100)
                counts.append(0)
            free[chosen] -= length
            counts[chosen] += 1
            expected.append(chosen)
        assert best_fit(lengths, 100, cap).tolist() == expected


@pytest.mark.parametrize(
    ("per_bin", "cap"),
    [(3, 3), (6, 6), (6, 20), (30, 30), (100, 104), (2 * EXCHANGE_SLOTS, 4 * EXCHANGE_SLOTS)],
)
def test_exchange_fills_bins_that_random_assignment_overfills(per_bin, cap):
    """Exchange makes (nearly) all randomly filled bins fit, with 1 % of the slots free.

    No bin has more documents than the cap.
    """
    rng = np.random.default_rng(per_bin)
    num_bins = 40
    lengths = rng.integers(20, 900, num_bins * per_bin)
    bin_of = rng.permutation(np.repeat(np.arange(num_bins), per_bin))
    slots = int(lengths.sum() / num_bins * 1.01)
    before = np.maximum(tokens_of(lengths, bin_of, num_bins) - slots, 0)
    after_of = exchange(lengths, bin_of, num_bins, slots, cap, key())
    after = np.maximum(tokens_of(lengths, after_of, num_bins) - slots, 0)
    assert before.sum() > 0.01 * lengths.sum()
    assert after.sum() <= before.sum() / 100
    assert after_of.size == lengths.size
    assert after_of.min() >= 0
    assert after_of.max() < num_bins
    assert np.bincount(after_of).max() <= min(cap, per_bin + 2)


def test_exchange_moves_a_document_where_no_swap_helps():
    """Exchange moves a document into a free slot if no swap reduces the overfull bin."""
    lengths = np.array([5, 5, 5, 5])
    after = exchange(lengths, np.array([0, 0, 0, 1]), 2, 10, 3, key())
    assert tokens_of(lengths, after, 2).tolist() == [10, 10]


def test_exchange_leaves_full_bins_alone():
    lengths = np.array([10, 4, 6, 7, 3])
    bin_of = np.array([0, 1, 1, 2, 2])
    assert exchange(lengths, bin_of, 3, 10, 5, key()).tolist() == bin_of.tolist()


def test_leave_over_takes_the_shortest_document_that_is_enough():
    lengths = np.array([6, 3, 4, 9, 5, 9, 9])
    bin_of = np.array([0, 0, 0, 1, 1, 2, 2])
    # Bins have 10 slots. Bin 0 has 13 tokens, so the document of 3 is removed. Bin 1 has 14 tokens,
    # so the document of 5 is removed. Bin 2 has 18 tokens, so one document of 9 is removed.
    left = leave_over(lengths, bin_of, 3, 10)
    assert left.tolist()[:5] == [0, LEFT_OVER, 0, 1, LEFT_OVER]
    assert sorted(left.tolist()[5:]) == [LEFT_OVER, 2]
    # The bin has 12 tokens and 7 slots, and no single document has 5 tokens. The longest document
    # is removed first, then the shortest document that is long enough.
    assert (
        leave_over(np.array([3, 3, 2, 2, 2]), np.zeros(5, int), 1, 7).tolist().count(LEFT_OVER) == 2
    )


def test_balance_never_overfills_with_any_arguments():
    rng = np.random.default_rng(0)
    for _ in range(60):
        slots = int(rng.integers(5, 400))
        lengths = rng.integers(1, slots + 1, rng.integers(1, 200))
        cap = int(rng.integers(1, 30))
        num_bins = int(rng.integers(-(-lengths.size // cap), lengths.size + 1))
        bin_of = balance(lengths, num_bins, slots, cap, key())
        assert bin_of.size == lengths.size
        assert set(bin_of.tolist()) <= {LEFT_OVER, *range(num_bins)}
        assert tokens_of(lengths, bin_of, num_bins).max() <= slots
        assert np.bincount(bin_of[bin_of >= 0], minlength=1).max() <= cap
        if num_bins == lengths.size:
            assert LEFT_OVER not in bin_of
