"""Tests of the distribution of packs over ranks: equal numbers of packs, and about equal work."""

import time

import numpy as np
import pytest

from megatron_packed.data.packing.step_plan import PackCost, spread

RNG = np.random.default_rng(0)


def random_costs(steps: int, packs: int) -> np.ndarray:
    """Return costs of packs with log-normal document lengths and a random quadratic part."""
    tokens = RNG.integers(100, 4097, (steps, packs))
    squares = (tokens * RNG.lognormal(6, 1, (steps, packs))).astype(np.int64)
    return PackCost(per_token=1.0, per_squared_length=RNG.choice([0.0, 1e-3, 1.0])).estimate(
        tokens, squares
    )


def sums(costs_SP, packs_SRB):
    return (
        np.take_along_axis(costs_SP, packs_SRB.reshape(len(costs_SP), -1), axis=1)
        .reshape(packs_SRB.shape)
        .sum(2)
    )


@pytest.mark.parametrize(("packs", "ranks"), [(8, 2), (8, 8), (12, 4), (64, 8), (6, 1), (256, 64)])
def test_no_worse_than_back_and_forth_or_round_robin(packs, ranks):
    """Every pack occurs once. The work of the busiest rank is at most that of round-robin and of
    back-and-forth distribution."""
    costs = random_costs(200, packs)
    dealt = spread(costs, ranks)
    assert dealt.packs_SRB.shape == (200, ranks, packs // ranks)
    assert (np.sort(dealt.packs_SRB.reshape(200, -1)) == np.arange(packs)).all()
    busiest = sums(costs, dealt.packs_SRB).max(axis=1)
    heaviest_first = np.argsort(-costs, axis=1, kind="stable").reshape(200, -1, ranks)
    round_robin = heaviest_first.swapaxes(1, 2)
    back_and_forth = heaviest_first.copy()
    back_and_forth[:, 1::2] = back_and_forth[:, 1::2, ::-1]
    for usual in (round_robin, back_and_forth.swapaxes(1, 2)):
        assert (busiest <= sums(costs, usual).max(axis=1) * (1 + 1e-12)).all()
    np.testing.assert_allclose(dealt.imbalance_S, busiest / (costs.sum(axis=1) / ranks), rtol=1e-12)


def test_micro_batches_of_ranks_have_equal_work():
    """The packs sorted by work are distributed in turns: micro-batch i of every rank is from turn
    i."""
    costs = random_costs(50, 32)
    by_turn = np.take_along_axis(costs, spread(costs, 4).packs_SRB.reshape(50, -1), axis=1).reshape(
        50, 4, 8
    )
    assert (
        np.sort(by_turn, axis=1).swapaxes(1, 2)[:, :, ::-1].reshape(50, 32)
        == -np.sort(-costs, axis=1)
    ).all()


def test_either_way_may_be_the_better_and_steps_do_not_know_of_each_other():
    costs = random_costs(500, 12)
    together = spread(costs, 3)
    for step, row in enumerate(costs):
        assert (spread(row[None], 3).packs_SRB[0] == together.packs_SRB[step]).all()
    turns = np.argsort(-costs, axis=1, kind="stable").reshape(500, 4, 3)
    turns[:, 1::2] = turns[:, 1::2, ::-1]
    back_and_forth = (together.packs_SRB == turns.swapaxes(1, 2)).all(axis=(1, 2))
    assert 0 < back_and_forth.sum() < 500


def test_nothing_to_do_is_balanced():
    dealt = spread(np.zeros((2, 4)), 2)
    assert dealt.imbalance_S.tolist() == [1.0, 1.0]
    assert dealt.packs_SRB[0].tolist() == [[0, 2], [1, 3]]


def test_one_rank_is_balanced_exactly():
    assert (spread(random_costs(50, 7), 1).imbalance_S == 1).all()


def test_a_large_epoch_takes_a_moment():
    begun = time.process_time()
    spread(RNG.lognormal(8, 1, (4000, 256)), 16)  # a million packs
    assert time.process_time() - begun < 5
