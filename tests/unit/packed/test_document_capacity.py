"""Percentiles of document counts and the share of packs that a capacity covers."""

import numpy as np
import pytest

from megatron_packed.packed.capacity import coverage, percentile


def published_counts(packs: int = 10_000) -> np.ndarray:
    """Counts with the published percentiles (P50 12, P90 43, P99 106, most 358), a power law between each two."""
    exceeded = np.array([1.0, 0.5, 0.1, 0.01, 1 / packs])  # share of packs with more documents, or as many
    counts = np.array([1, 12, 43, 106, 358])
    points = 1 - np.arange(packs) / packs
    return np.ceil(np.exp(np.interp(-np.log(points), -np.log(exceeded), np.log(counts))) - 1e-9).astype(int)


def test_published_example():
    """'64 covers about 96 %, 106 about 99 %'."""
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
            expected = min(count for count in counts.tolist() if sum(counts <= count) >= share * counts.size - 1e-9)
            assert percentile(counts, share) == expected


def test_nearest_rank_is_not_moved_by_rounding():
    counts = np.arange(1, 101)
    for hundredth in range(1, 101):
        assert percentile(counts, hundredth / 100) == hundredth


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="no packs"):
        coverage(np.zeros(0, int), [4])
    with pytest.raises(ValueError, match="no packs"):
        percentile(np.zeros(0, int), 0.5)
    for share in (0, -0.1, 1.1):
        with pytest.raises(ValueError, match="share is"):
            percentile(np.ones(3, int), share)
