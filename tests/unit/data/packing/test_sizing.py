"""Tests of the expected cost of packings, with numbers computed by hand, and of the recommendation."""

import numpy as np
import pytest

from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.sizing import (
    EAGER,
    TIE,
    Packing,
    expected,
    flags_for,
    recommended,
)
from megatron_packed.data.packing.step_cost import StepCosts, Timed
from megatron_packed.packed.capture_sizes import DOCUMENT_COST


def packing(documents, fill=0.5, squares=(4.0, 8.0), method="balanced"):
    return Packing(
        method=method, documents=np.array(documents), squares=np.array(squares), fill=fill
    )


def timed(capacity, work, ms):
    return Timed(capacity=capacity, documents=1, squares=work, ms=ms)


def table(**changes):
    """Return a table of two capacities, 2 and 4, with bases of 10 and 20 ms.

    The slope is 1 ms for each squared token. An eager run always takes 50 ms.
    """
    points = [(size, work, base + work) for size, base in ((2, 10), (4, 20)) for work in (1, 3)]
    packs = [timed(*point) for point in (*points, (None, 5, 50.0), (None, 5, 50.0))]
    return StepCosts(
        **{"tokens": 100, "update_ms": 6.0, "packs": tuple(packs), "device": "d", **changes}
    )


def test_cost_by_a_table():
    """Packs of 2 and 4 documents cost 10 + 4 and 20 + 8 ms.

    If the second pack has no graph, the packs cost 14 and 50 ms.
    """
    for capacities, mean, eager in (((2, 4), 21.0, 0.0), ((2,), 32.0, 0.5)):
        found = expected(packing([2, 4]), capacities, table(), packs_per_step=3)
        assert (found.micro_batch_ms, found.step_ms, found.eager_share) == (
            mean,
            3 * mean + 6,
            eager,
        )
        assert found.tokens_per_second == pytest.approx(3 * 100 * 0.5 / ((3 * mean + 6) / 1e3))
        assert found.relative == pytest.approx(
            mean / (10 + 6) / 0.5
        )  # 10 + 6 ms: smallest graph, mean squares of the packs


def test_cost_that_is_assumed():
    for costs in (
        None,
        table(packs=table().packs[:4]),
    ):  # the second table has no eager times
        found = expected(packing([2, 6]), (4,), costs, packs_per_step=3)
        assert found.relative == pytest.approx((1 + DOCUMENT_COST * (4 + 6) / 2) / 0.5)
        assert found.step_ms is found.tokens_per_second is None and found.eager_share == 0.5


def test_a_pack_takes_the_smallest_graph_that_holds_it():
    found = packing([1, 2, 3, 4, 5]).capacity_of((4, 2))
    assert found.tolist() == [2, 2, 4, 4, EAGER]


def test_the_tail_of_a_pack_is_work_too():
    packer = Packer(slots=10, method="sequential")
    assert Packing.of_first_epoch(packer, np.array([4]), seed=0).squares.tolist() == [4**2 + 6**2]


@pytest.mark.parametrize("more, first", [(TIE / 2, True), (TIE * 2, False)])
def test_of_packers_that_nearly_tie_the_first_is_recommended(more, first):
    dear, cheap = (
        packing([2, 2], fill=0.5),
        packing([2, 2], fill=0.5 * (1 + more), method="sequential"),
    )
    choice = recommended([dear, cheap], None, 1)
    assert choice.method == ("balanced" if first else "sequential")
    capped = flags_for(choice, "local")[-2:] == ["--max-documents-per-pack", "2"]
    assert capped is not first


@pytest.mark.parametrize(
    "changes",
    [
        {"update_ms": -1.0},
        {"packs": table().packs[4:]},
        {"packs": (timed(2, 1, 0.0),)},
    ],
    ids=["update", "no graph", "no time"],
)
def test_tables_that_cannot_be(changes):
    with pytest.raises(ValueError, match="the table of step costs"):
        table(**changes)


def test_more_work_never_costs_less():
    """If a pack with more work was measured as faster, the cost is the mean time, whatever the
    work."""
    costs = table(packs=(timed(2, 1, 9.0), timed(2, 3, 7.0)))
    assert costs.milliseconds(np.array([2, 2]), np.array([0, 100])).tolist() == [8.0, 8.0]


def test_one_amount_of_work_has_no_slope():
    costs = table(packs=(timed(2, 5, 7.0), timed(2, 5, 9.0)))
    assert costs.milliseconds(np.array([2, 2]), np.array([1, 100])).tolist() == [8.0, 8.0]
    assert costs.document_cost() is None
