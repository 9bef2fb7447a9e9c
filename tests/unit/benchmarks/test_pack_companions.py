"""Tests of the number of pairs that share a pack again, against counting all pairs."""

from itertools import combinations

import numpy as np
import pytest

from megatron_packed.data.packing.packer import Packer, Packs
from pack_companions import companions
from support.document_lengths import SLOTS, dialogues, long_tail


def packs_of(*groups: list[int]) -> Packs:
    return Packs(np.concatenate(groups).astype(np.int64), np.cumsum([0, *map(len, groups)]))


def test_example():
    met = companions(packs_of([0, 1, 2], [3]), packs_of([2], [0, 1, 3]))
    assert met.pairs == 3
    assert met.again == 1
    assert met.by_chance == 3 * 3 / 6
    assert met.share == pytest.approx(1 / 3)
    assert met.chance == pytest.approx(1 / 2)


def test_documents_always_alone_are_left_out():
    met = companions(packs_of([0, 1], [2, 3], [4], [5]), packs_of([5], [0, 2], [1, 3], [4]))
    assert met.again == 0
    assert met.by_chance == 2 * 2 / 6  # only documents 0 to 3 count


def test_packs_of_one_document_have_no_companions():
    met = companions(packs_of([0], [1]), packs_of([1], [0]))
    assert (met.pairs, met.again, met.share, met.chance) == (0, 0, 0.0, 0.0)


def test_against_counting_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        groups = []
        for _ in range(2):
            cuts = np.sort(rng.choice(np.arange(1, 30), 8, replace=False))
            groups.append([group.tolist() for group in np.split(rng.permutation(30), cuts)])
        first, second = (
            {frozenset(pair) for group in epoch for pair in combinations(group, 2)}
            for epoch in groups
        )
        met = companions(packs_of(*groups[0]), packs_of(*groups[1]))
        assert (met.pairs, met.again) == (len(first), len(first & second))


def test_companions_change_like_chance():
    """Two documents that share a pack do so again in the next epoch about as often as by chance.

    The sets of documents include two hard cases. In one set all lengths differ and all documents
    fit into one window. For the other set, best fit without random factors would make the same
    packs in every epoch.
    """
    rng = np.random.default_rng(0)
    sets = [
        (long_tail(6000), SLOTS),
        (dialogues(9000), SLOTS),
        (rng.permutation(np.arange(50, 1050)), 4096),
    ]
    for lengths, slots in sets:
        packer = Packer(slots=slots)
        met = [
            companions(packer.pack(lengths, 1, epoch), packer.pack(lengths, 1, epoch + 1))
            for epoch in range(3)
        ]
        again, chance = sum(pair.again for pair in met), sum(pair.by_chance for pair in met)
        assert again <= 1.3 * chance + 4 * chance**0.5, (again, chance)
        assert met[0].share < 0.02
