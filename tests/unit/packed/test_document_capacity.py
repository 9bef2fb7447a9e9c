"""Percentiles of document counts, coverage of capacities, and the choice of capacities."""

import time
from itertools import combinations

import numpy as np
import pytest

from megatron_packed.packed.capture_sizes import (
    CaptureSize,
    CaptureSizes,
    choose_capacities,
    coverage,
    percentile,
)


def published_counts(packs: int = 10_000) -> np.ndarray:
    """Return counts with the published percentiles (P50 12, P90 43, P99 106, maximum 358).

    Between two percentiles the counts follow a power law.
    """
    exceeded = np.array(
        [1.0, 0.5, 0.1, 0.01, 1 / packs]
    )  # share of packs with at least as many documents
    counts = np.array([1, 12, 43, 106, 358])
    points = 1 - np.arange(packs) / packs
    return np.ceil(
        np.exp(np.interp(-np.log(points), -np.log(exceeded), np.log(counts))) - 1e-9
    ).astype(int)


def test_published_example():
    """Capacity 64 covers about 96 % of the published packs, and capacity 106 about 99 %."""
    counts = published_counts()
    assert [percentile(counts, share) for share in (0.5, 0.9, 0.99, 1.0)] == [12, 43, 106, 358]
    covered = coverage(counts, (64, 106, 358))
    assert covered[64] == pytest.approx(0.96, abs=0.01)
    assert covered[106] == pytest.approx(0.99, abs=0.002)
    assert covered[358] == 1.0


def test_against_counting():
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(0, 40, rng.integers(1, 60))
        for capacity, share in coverage(counts, range(0, 45, 4)).items():
            assert share == sum(count <= capacity for count in counts.tolist()) / counts.size
        for share in (0.01, 0.25, 0.5, 0.9, 0.99, 1.0):
            expected = min(
                count
                for count in counts.tolist()
                if sum(counts <= count) >= share * counts.size - 1e-9
            )
            assert percentile(counts, share) == expected


def test_nearest_rank_is_not_moved_by_rounding():
    counts = np.arange(1, 101)
    for hundredth in range(1, 101):
        assert percentile(counts, hundredth / 100) == hundredth


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="documents_per_pack is empty"):
        coverage(np.zeros(0, int), [4])
    with pytest.raises(ValueError, match="documents_per_pack is empty"):
        percentile(np.zeros(0, int), 0.5)
    for share in (0, -0.1, 1.1):
        with pytest.raises(ValueError, match="share is"):
            percentile(np.ones(3, int), share)


# -- capture sizes ----------------------------------------------------------------------------------


def test_a_pack_takes_the_smallest_size_that_holds_it():
    capture_sizes = CaptureSizes.from_capacities([64, 16, 64], 8192)
    assert capture_sizes.sizes == (CaptureSize(16, 8192), CaptureSize(64, 8192))
    assert (capture_sizes.capacities, capture_sizes.largest) == ((16, 64), 64)
    found = [capture_sizes.smallest_for(num_seqs, 8192) for num_seqs in (0, 1, 16, 17, 64)]
    assert [capture_size.capacity for capture_size in found] == [16, 16, 16, 64, 64]
    assert capture_sizes.smallest_for(65, 1) is None
    assert capture_sizes.smallest_for(1, 8193) is None


def test_a_required_size_is_the_smallest_or_an_error_with_all_sizes():
    capture_sizes = CaptureSizes((CaptureSize(4, 50), CaptureSize(4, 100), CaptureSize(16, 100)))
    assert capture_sizes.require(4, 51) == CaptureSize(4, 100)
    for num_seqs, longest in ((17, 1), (1, 101)):
        message = (
            rf"{num_seqs} documents .* up to {longest} tokens; .* are 4 x 50, 4 x 100, 16 x 100\."
        )
        with pytest.raises(ValueError, match=message):
            capture_sizes.require(num_seqs, longest)


def test_sizes_also_step_in_the_longest_row():
    sizes = (CaptureSize(8, 100), CaptureSize(8, 50), CaptureSize(32, 50), CaptureSize(32, 100))
    capture_sizes = CaptureSizes(sizes)
    for num_seqs in range(34):
        for longest in range(1, 103):
            holding = [
                capture_size
                for capture_size in sizes
                if num_seqs <= capture_size.capacity and longest <= capture_size.max_seqlen
            ]
            assert capture_sizes.smallest_for(num_seqs, longest) == min(holding, default=None)
    assert capture_sizes.capacities == (8, 32)


def test_sizes_that_are_no_whole_numbers_are_refused():
    """A fraction, a text and a boolean are TypeErrors; NumPy's integers are accepted."""
    for wrong, kind in ((1.5, "float"), ("16", "str"), (True, "bool")):
        with pytest.raises(TypeError, match=rf"capacity .* of type {kind}; give a whole number"):
            CaptureSizes.from_capacities([wrong], 128)
    assert CaptureSizes.from_capacities(np.array([16]), 128).largest == 16


def test_capture_sizes_that_hold_nothing_are_refused():
    with pytest.raises(ValueError, match="at least one capture size"):
        CaptureSizes(())
    for capacity, max_seqlen in ((0, 8), (8, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            CaptureSize(capacity, max_seqlen)


# -- choice -----------------------------------------------------------------------------------------


def expected_cost(counts, capacities, document_cost, capacity_cost):
    rooms = [min(capacity for capacity in capacities if capacity >= count) for count in counts]
    return sum(1 + document_cost * room for room in rooms) / len(counts) + capacity_cost * len(
        capacities
    )


def by_trying_all(counts, document_cost, capacity_cost, most_capacities):
    """Return the lowest cost of all sets of capacities that cover every pack, by exhaustive search.

    The search includes capacities that are not counts of documents.
    """
    largest = max(1, *counts)
    sets = [
        (*under, largest)
        for count in range(most_capacities)
        for under in combinations(range(1, largest), count)
    ]
    return min(
        expected_cost(counts, capacities, document_cost, capacity_cost) for capacities in sets
    )


def test_choice_against_trying_all():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        counts = np.minimum(
            rng.geometric(rng.uniform(0.1, 0.9), rng.integers(1, 40)), 16
        ) - rng.integers(0, 2)
        costs = {
            "document_cost": rng.choice([0.0, 0.001, 0.02, 0.3]),
            "capacity_cost": rng.choice([0.0, 0.01, 0.1]),
        }
        most_capacities = int(rng.integers(1, 5))
        chosen = choose_capacities(counts, **costs, most_capacities=most_capacities)
        assert list(chosen) == sorted(set(chosen)) and 1 <= len(chosen) <= most_capacities
        assert chosen[-1] == max(1, counts.max())  # covers every pack, and is not too large
        least = by_trying_all(counts.tolist(), **costs, most_capacities=most_capacities)
        assert expected_cost(counts, chosen, **costs) == pytest.approx(least, rel=1e-12)
        seen.add(len(chosen))
    assert seen == {1, 2, 3, 4}


def test_choice_prefers_few_capacities():
    assert choose_capacities([5] * 10) == (5,)
    assert choose_capacities([3, 3, 3, 3, 100]) == (3, 100)
    # The balanced packer produces similar counts, for which one capacity is best.
    assert choose_capacities([11, 12, 13, 14]) == (14,)
    assert choose_capacities(np.arange(1, 200), document_cost=0.0, capacity_cost=0.0) == (199,)
    assert choose_capacities([0, 0]) == (1,)
    counts = published_counts()
    chosen = choose_capacities(counts)
    assert chosen[-1] == 358 and 2 <= len(chosen) <= 4
    assert coverage(counts, chosen)[358] == 1.0


def test_choice_is_fast_for_thousands_of_counts():
    counts = np.random.default_rng(1).integers(1, 4000, 100_000)
    start = time.process_time()
    assert len(choose_capacities(counts)) == 4
    assert time.process_time() - start < 1.0


def test_nothing_to_choose_from_is_refused():
    with pytest.raises(ValueError, match="documents_per_pack is empty"):
        choose_capacities([])
    for wrong in ({"document_cost": -1.0}, {"capacity_cost": -1.0}, {"most_capacities": 0}):
        with pytest.raises(ValueError, match="must not be negative"):
            choose_capacities([3], **wrong)
    with pytest.raises(ValueError, match="smallest -1"):
        choose_capacities([3, -1])


def test_words_name_the_bound_of_rows_only_for_equal_capacities():
    sizes = CaptureSizes((CaptureSize(4, 64), CaptureSize(4, 128), CaptureSize(16, 128)))
    assert [sizes.words(size) for size in sizes.sizes] == [
        "up to 4 documents and rows of 64 tokens",
        "up to 4 documents and rows of 128 tokens",
        "up to 16 documents",
    ]
