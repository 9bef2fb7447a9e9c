"""Tests of weighted blends: shares of tokens, even reading of every source, and plans that depend
only on seed and epoch.
"""

from fractions import Fraction

import numpy as np
import pytest

from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.source_blend import SourceBlend
from support.data_helpers import evaluation_of

LENGTHS = np.random.default_rng(1).integers(2, 60, 500)
SOURCE = np.repeat([0, 1, 2], [40, 300, 160])
WEIGHTS = (Fraction(1, 2), Fraction(1, 5), Fraction(3, 10))


def blend(weights: tuple[Fraction, ...] = WEIGHTS, seed: int = 7) -> SourceBlend:
    return SourceBlend(LENGTHS, SOURCE, weights, seed)


def test_shares_of_tokens_and_even_reading() -> None:
    whole = blend()
    total = int(LENGTHS.sum())
    epochs = [whole.epoch(epoch) for epoch in range(12)]
    counts = np.zeros(len(LENGTHS), np.int64)
    for drawn in epochs:
        for number, weight in enumerate(WEIGHTS):
            tokens = int(LENGTHS[drawn[SOURCE[drawn] == number]].sum())
            assert (
                abs(tokens - float(weight) * total) < 120
            )  # at most one document too many or too few at each end of the epoch
        counts += np.bincount(drawn, minlength=len(LENGTHS))
        for number in range(3):
            of_source = counts[number == SOURCE]
            assert (
                of_source.max() - of_source.min() <= 1
            )  # no document is read twice before all others are read once
    assert np.array_equal(
        blend().epoch(11), epochs[11]
    )  # a new blend computes the same epoch without computing earlier epochs
    assert not np.array_equal(blend(seed=8).epoch(0), epochs[0])


def test_weights_that_are_the_shares_of_tokens_read_everything_once() -> None:
    sizes = [int(LENGTHS[number == SOURCE].sum()) for number in range(3)]
    fair = blend(tuple(Fraction(size, sum(sizes)) for size in sizes))
    for epoch in range(3):
        assert sorted(fair.epoch(epoch)) == list(range(500))


@pytest.mark.shows("Data", "blend")
def test_a_plan_of_a_blend() -> None:
    pieces = Pieces.cut(LENGTHS, 128)
    made = {"packer": Packer(slots=128, window=64), "packs_per_step": 8, "seed": 7}
    plan = PackPlan(pieces, LENGTHS - 1, blend=blend(), **made)
    for epoch in (0, 3):
        packs = plan.epoch(epoch)
        assert sorted(packs.order) == sorted(blend().epoch(epoch))
        assert packs.sums(pieces.length).max() <= 128
    again = PackPlan(pieces, LENGTHS - 1, blend=blend(), **made)
    far = again.step(200)  # a new plan whose first requested step is 200
    assert far.epoch >= 5
    same = plan.step(200)
    assert all(np.array_equal(a, b) for x, y in zip(far.packs, same.packs) for a, b in zip(x, y))
    hashes = [
        PackPlan(pieces, LENGTHS - 1, blend=b, **made).hash
        for b in (None, blend(), blend(WEIGHTS[::-1]))
    ]
    assert len(set(hashes)) == 3
    evaluation = evaluation_of(plan)
    assert sum(evaluation.documents_per_pack) == len(blend().epoch(0))


def test_a_source_without_documents_is_refused() -> None:
    with pytest.raises(ValueError, match="source 2 of the blend has no usable document"):
        SourceBlend(LENGTHS[:40], SOURCE[:40], WEIGHTS, 1)
