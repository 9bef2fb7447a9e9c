"""Tests of the pack plan: one stream of packs over epochs, the same for every number of ranks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import METHODS, Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.packing.step_plan import PackCost
from support.data_helpers import evaluation_of

RNG = np.random.default_rng(0)
DOCUMENTS = RNG.integers(5, 900, 157)
PIECES = Pieces.cut(DOCUMENTS, 500, "split")
TARGETS = RNG.integers(0, PIECES.length)
PACKER = Packer(slots=500, window=64)
SQUARES = PackCost(per_token=0.0, per_squared_length=1.0)


def plan(**changes) -> PackPlan:
    values = {
        "pieces": PIECES,
        "targets": TARGETS,
        "packer": PACKER,
        "packs_per_step": 8,
        "dp_size": 2,
        "seed": 7,
        "cost": SQUARES,
    }
    return PackPlan(**{**values, **changes})


def all_packs(step):
    return [pieces for packs_of_rank in step.packs for pieces in packs_of_rank]


def as_sets(step):
    return sorted(sorted(pieces.tolist()) for pieces in all_packs(step))


def stream_of(epochs):
    return [p.tolist() for epoch in range(epochs) for p in PACKER.pack(PIECES.length, 7, epoch)]


def test_the_stream_is_one_epoch_after_the_other():
    ours = plan()
    stream = stream_of(4)
    steps = len(stream) // 8
    assert steps * 8 % len(ours.epoch(0)), (
        "a step must span two epochs for this test to mean anything"
    )
    for step in range(steps):
        assert as_sets(ours.step(step)) == sorted(
            sorted(pack) for pack in stream[8 * step : 8 * step + 8]
        )


@pytest.mark.parametrize(
    ("epochs", "packs"), [(0.1, 1), (0.7, 7), (1.1, 11), (2.3, 23), (2.31, 24), (3.0, 30)]
)
def test_packs_of_epochs_are_counted_in_decimals(epochs, packs):
    """The float 0.1 is slightly more than a tenth, but a tenth of ten packs is one pack."""
    ten = np.full(10, 500)
    ours = plan(pieces=Pieces.cut(ten, 500, "split"), targets=ten - 1)
    assert len(ours.epoch(0)) == 10
    assert ours.packs_of(epochs) == packs


def test_a_step_may_be_longer_than_an_epoch():
    short = plan(packs_per_step=400, dp_size=4)
    step = short.step(1)
    assert len(all_packs(step)) == 400
    seen = np.bincount(np.concatenate(all_packs(step)), minlength=len(PIECES))
    assert seen.min() >= 400 // len(short.epoch(0)) - 1
    assert (step.epoch, step.global_packs) == (400 // len(short.epoch(0)), 400)


@pytest.mark.parametrize("method", METHODS)
def test_independent_of_the_number_of_ranks(method):
    packer = replace(PACKER, method=method)
    plans = {dp_size: plan(dp_size=dp_size, packer=packer) for dp_size in (1, 2, 4, 8)}
    assert len({each.hash for each in plans.values()}) == 1
    for step in (0, 3, 11, 40):
        one = plans[1].step(step)
        for dp_size, each in plans.items():
            other = each.step(step)
            assert [len(packs) for packs in other.packs] == [8 // dp_size] * dp_size
            assert as_sets(other) == as_sets(one)
            assert replace(other, packs=(), dp_imbalance=1.0) == replace(one, packs=())


def test_any_step_first():
    """Steps that are requested in descending order equal those requested in ascending order."""
    in_order = plan()
    steps = [in_order.step(step) for step in range(61)]
    backwards = plan()
    for step in reversed(range(0, 61, 5)):
        assert [[p.tolist() for p in rank] for rank in backwards.step(step).packs] == [
            [p.tolist() for p in rank] for rank in steps[step].packs
        ]
        assert backwards.step(step).epoch == steps[step].epoch


@pytest.mark.parametrize("sizes", [[8] * 10 + [24] * 5 + [6] * 40, [9] * 17 + [24] * 5 + [2] * 99])
def test_steps_of_other_sizes_divide_what_is_left_of_the_stream(sizes):
    """If the packs per step change at a resume, every pack of the stream occurs exactly once.

    The number changes within an epoch and at its end, up and down.
    """
    epochs = [PACKER.pack(PIECES.length, 7, epoch) for epoch in range(4)]
    stream, ends = (
        [pack.tolist() for packs in epochs for pack in packs],
        np.cumsum([len(packs) for packs in epochs]),
    )
    seen, at, ours = [], 0, plan()
    for step, size in enumerate(sizes):
        if (
            size != ours.packs_per_step or step % 20 == 0
        ):  # resume with the same or another number of packs per step
            ours = plan(packs_per_step=size, dp_size=1)
            ours.resume(step, at)
        found = ours.step(step)
        assert as_sets(found) == sorted(sorted(pack) for pack in stream[at : at + size])
        assert (found.step, found.epoch) == (step, np.searchsorted(ends, at, side="right"))
        seen += [piece for pieces in all_packs(found) for piece in pieces.tolist()]
        at += size
    assert ends[0] == 9 * 17 and at > ends[1]
    assert np.ptp(np.bincount(seen, minlength=len(PIECES))) == 1


def test_a_resumed_plan_forgets_the_steps_that_it_has_planned():
    ours = plan()
    before = as_sets(ours.step(3))
    ours.resume(3, 5)
    assert as_sets(ours.step(3)) == sorted(sorted(pack) for pack in stream_of(1)[5:13]) != before


def test_a_plan_knows_the_hash_of_other_steps_and_no_step_before_its_first():
    ours = plan()
    assert ours.hash_with(16) == plan(packs_per_step=16).hash != ours.hash == ours.hash_with(8)
    assert ours.origin == 0
    ours.resume(10, 35)
    assert ours.origin == -45
    with pytest.raises(ValueError, match="step is 5; the first step of this plan is 6"):
        ours.step(5)


def test_several_threads_may_ask():
    expected = [as_sets(plan().step(step)) for step in range(30)]
    shared = plan()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda step: as_sets(shared.step(step)), range(30))) == expected


class CountingPacker(Packer):
    """Packer that records the epochs that it packed."""

    epochs: list[int] = []  # noqa: RUF012

    def pack(self, lengths, seed, epoch=0, on_progress=None):
        self.epochs.append(epoch)
        return super().pack(lengths, seed, epoch, on_progress)


def test_epochs_are_packed_when_needed_and_two_are_kept(monkeypatch):
    monkeypatch.setattr(CountingPacker, "epochs", [])
    ours = plan(packer=CountingPacker(slots=500, window=64))
    assert CountingPacker.epochs == []
    ours.step(0)
    assert CountingPacker.epochs == [0]
    per_epoch = len(ours.epoch(0))
    for step in range(3 * per_epoch // 8):
        ours.step(step)
    assert CountingPacker.epochs == [0, 1, 2]
    spanning = per_epoch // 8  # the step has packs of epochs 0 and 1
    ours.step(spanning)
    CountingPacker.epochs.clear()
    ours.step(spanning)
    assert CountingPacker.epochs == []


def test_known_epoch_starts_spare_the_earlier_epochs_and_change_nothing(monkeypatch):
    monkeypatch.setattr(CountingPacker, "epochs", [])
    full = plan()
    late = 6 * len(full.epoch(0)) // 8
    expected = full.step(late)
    starts = full.epoch_starts
    assert starts[0] == 0
    assert np.diff(starts).tolist() == [
        len(PACKER.pack(PIECES.length, 7, epoch)) for epoch in range(len(starts) - 1)
    ]
    resumed = plan(packer=CountingPacker(slots=500, window=64), epoch_starts=starts)
    assert as_sets(resumed.step(late)) == as_sets(expected)
    assert set(CountingPacker.epochs) <= {expected.epoch, expected.epoch + 1}


@pytest.mark.parametrize("room", [1, 4, 1000])
def test_a_plan_that_keeps_to_its_room(monkeypatch, room):
    """A limit on documents changes only epochs that have a pack with more documents.

    A first epoch that is packed already and within the limit is not packed again.
    """
    monkeypatch.setattr(CountingPacker, "epochs", [])
    free = plan(packer=CountingPacker(slots=500, window=64))
    most = [int(free.epoch(epoch).documents_per_pack.max()) for epoch in (1, 2, 0)]
    CountingPacker.epochs.clear()
    kept = free.keeping_to(room)
    expected = replace(PACKER, max_documents=None if max(most) <= room else room)
    for step in range(20):
        assert as_sets(kept.step(step)) == as_sets(plan(packer=expected).step(step))
        assert kept.step(step).max_documents <= room
    assert (0 in CountingPacker.epochs) == (most[-1] > room)
    assert kept.hash == plan(packer=replace(PACKER, room=room)).hash != free.hash
    assert len({plan(packer=replace(PACKER, room=other)).hash for other in (None, 3, 4)}) == 3


def test_a_lower_limit_already_keeps_to_any_room():
    limited = plan(packer=replace(PACKER, max_documents=3))
    assert (
        limited.keeping_to(3).hash
        == limited.keeping_to(9).hash
        == limited.hash
        != limited.keeping_to(2).hash
    )


def test_epoch_starts_of_another_plan_are_refused():
    with pytest.raises(ValueError, match=r"epoch 0 has \d+ packs, but epoch_starts gives it 3"):
        plan(epoch_starts=(0, 3, 6)).step(0)


def test_what_a_step_says_of_itself():
    ours = plan()
    for step in range(12):
        it = ours.step(step)
        packs = all_packs(it)
        assert it.step == step
        assert it.global_targets == sum(TARGETS[pieces].sum() for pieces in packs)
        assert it.global_tokens == sum(PIECES.length[pieces].sum() for pieces in packs)
        assert it.global_packs == 8
        assert it.max_documents == max(pieces.size for pieces in packs)
        assert it.scales == (1 / it.global_targets, 1 / 8)


def test_no_target_at_all_gives_scale_zero():
    step = plan(targets=np.zeros(len(PIECES), int)).step(0)
    assert step.scales == (0.0, 1 / 8)


def test_work_is_dealt_out_evenly():
    """Micro-batch i is about equal work on all ranks.

    The total work of two ranks differs by at most the work of the heaviest pack.
    """
    ours = plan(packs_per_step=32, dp_size=4)
    for step in range(6):
        work = np.array(
            [[(PIECES.length[p] ** 2).sum() for p in rank] for rank in ours.step(step).packs]
        )
        assert (np.sort(work.ravel())[::-1].reshape(8, 4) == np.sort(work.T, axis=1)[:, ::-1]).all()
        assert np.ptp(work.sum(axis=1)) <= work.max()


def test_the_lightest_rank_takes_the_heaviest_pack_of_a_turn():
    """Eight packs with one document of 10 to 80 tokens each are dealt so that both ranks get a sum
    of squares of 10,200."""
    pieces = Pieces.cut(np.arange(10, 90, 10), 80)
    one_each = Packer(slots=80, max_documents=1)
    of_two = {"packer": one_each, "packs_per_step": 8, "dp_size": 2, "cost": SQUARES}
    step = PackPlan(pieces, np.ones(8, int), **of_two).step(0)
    dealt = [[int(pieces.length[numbers].sum()) for numbers in rank] for rank in step.packs]
    assert dealt == [[80, 50, 30, 20], [70, 60, 40, 10]]
    assert step.dp_imbalance == 1.0


def test_the_imbalance_of_an_epoch_is_that_of_its_steps():
    ours = plan(packs_per_step=8, dp_size=4)
    steps = len(ours.epoch(0)) // 8
    assert ours.dp_imbalance().tolist() == [ours.step(step).dp_imbalance for step in range(steps)]
    few = plan(packs_per_step=1000, dp_size=4)
    assert few.dp_imbalance().shape == (1,), (
        "an epoch shorter than a step is filled up with empty packs"
    )


def test_the_cost_moves_packs_between_ranks_only():
    """Another estimate of the work changes neither the hash nor the set of packs of a step."""
    linear, quadratic = plan(cost=PackCost()), plan(cost=SQUARES)
    assert linear.hash == quadratic.hash
    steps = [(linear.step(step), quadratic.step(step)) for step in range(20)]
    assert all(as_sets(a) == as_sets(b) for a, b in steps)
    in_order = [[[p.tolist() for p in all_packs(step)] for step in pair] for pair in steps]
    assert any(a != b for a, b in in_order)
    assert quadratic.keeping_to(4).step(0).dp_imbalance != linear.keeping_to(4).step(0).dp_imbalance


def test_evaluation_covers_every_piece_once_and_is_filled_up_with_empty_packs():
    evaluation = evaluation_of(plan(packs_per_step=12, dp_size=4))
    steps = [evaluation.step(step) for step in range(len(evaluation))]
    pieces = np.concatenate([pieces for step in steps for pieces in all_packs(step)])
    assert sorted(pieces.tolist()) == list(range(len(PIECES)))
    packs = len(PACKER.pack(PIECES.length, 7))
    assert packs % 12, "the last step must be incomplete for this test to mean anything"
    assert [step.global_packs for step in steps] == [12] * (packs // 12) + [packs % 12]
    assert all(len(rank) == 3 for step in steps for rank in step.packs)
    last = [[pieces.size for pieces in rank] for rank in steps[-1].packs]
    assert all(
        sizes == sorted(sizes, key=lambda size: size == 0) for sizes in last
    )  # empty packs come last
    assert steps[-1].scales[1] == 1 / (packs % 12)
    assert sum(step.global_targets for step in steps) == TARGETS.sum()


def test_evaluation_is_the_same_every_time_and_may_be_cut_short():
    ours = plan(packs_per_step=12, dp_size=4)
    full, short = evaluation_of(ours), evaluation_of(ours, max_steps=2)
    assert (len(short), len(evaluation_of(ours, max_steps=10_000))) == (2, len(full))
    for step in (1, 0, 1):
        assert [[p.tolist() for p in rank] for rank in short.step(step).packs] == [
            [p.tolist() for p in rank] for rank in full.step(step).packs
        ]
    for step in (-1, 2):
        with pytest.raises(ValueError, match="this evaluation has steps 0 to 1"):
            short.step(step)


def test_one_small_document_still_gives_every_rank_its_pack():
    pieces = Pieces.cut(np.array([3]), 500)
    evaluation = EvaluationPlan(pieces, np.array([2]), packer=PACKER, packs_per_step=4, dp_size=4)
    step = evaluation.step(0)
    assert len(evaluation) == 1
    assert [[numbers.tolist() for numbers in rank] for rank in step.packs] == [
        [[0]],
        [[]],
        [[]],
        [[]],
    ]
    assert (step.global_targets, step.global_packs, step.max_documents) == (2, 1, 1)


def test_hash_depends_on_everything_that_decides_and_on_nothing_else():
    longer = PIECES.length.copy()
    longer[3] += 1
    more = TARGETS.copy()
    more[5] += 1
    others = [
        plan(seed=8),
        plan(packs_per_step=16),
        plan(packer=replace(PACKER, window=65)),
        plan(packer=replace(PACKER, slots=501)),
        plan(packer=replace(PACKER, method="sequential")),
        plan(packer=replace(PACKER, max_documents=9)),
        plan(packer=replace(PACKER, alignment=4)),
        plan(pieces=replace(PIECES, length=longer)),
        plan(pieces=replace(PIECES, start=PIECES.start + 1)),
        plan(targets=more),
    ]
    assert len({each.hash for each in [plan(), *others]}) == 1 + len(others)
    assert (
        plan(dp_size=8, targets=TARGETS.astype(np.int32)).hash
        == plan().hash
        == evaluation_of(plan()).hash
    )


def test_golden_hash():
    """The hash of a fixed plan has a fixed value on every machine and version."""
    pieces = Pieces.cut(np.arange(1, 50), 30)
    golden = PackPlan(pieces, np.arange(49), packer=Packer(slots=64), packs_per_step=4, seed=1)
    assert golden.hash[:16] == GOLDEN_HASH


GOLDEN_HASH = "75f3ee079349e4ff"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size": 3}, r"packs_per_step \(8\) is not a positive multiple of dp_size \(3\)"),
        ({"packs_per_step": 0}, r"packs_per_step \(0\)"),
        ({"targets": TARGETS[1:]}, "pieces but"),
        (
            {"pieces": Pieces.cut(np.zeros(0, int), 500), "targets": TARGETS[:0]},
            "no document to pack",
        ),
    ],
)
def test_wrong_plans_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match="step is -1"):
        plan().step(-1)
