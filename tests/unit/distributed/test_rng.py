"""Tests that seeds depend only on their arguments, and that restored generators continue exactly."""

import itertools
import json
import random

import numpy as np
import pytest
import torch

from megatron_packed.distributed.rng import RngState, seed_all, seed_for, seed_for_ranks


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
        torch.randn(3).sum().item(),
    ]


def test_seeds_are_constant_and_differ_by_purpose_and_key() -> None:
    # A change of these values would silently change the initial weights of every new run.
    assert seed_for(1234, "init", "layers.0.norm.weight") == 2741788355459862420
    assert seed_for(1234, "dropout", 0) == 6269004443050826077
    seeds = {
        seed_for(1234, purpose, key)
        for purpose in ("init", "data", "dropout")
        for key in (0, 1, "0", "1")
    }
    assert len(seeds) == 12 and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for(1, "a", 23) != seed_for(1, "a", 2, 3) and seed_for(12, "a") != seed_for(1, "2a")


def test_ranks_draw_different_masks_and_the_same_rank_the_same() -> None:
    def first(seed: int, rank: int) -> list[float]:
        seed_all(seed, rank)
        return draw()

    assert first(7, 0) == first(7, 0)
    assert all(a != b for a, b in zip(first(7, 0), first(7, 1)))
    assert all(a != b for a, b in zip(first(7, 0), first(8, 0)))


def test_seeds_of_ranks_differ_along_the_axes_that_are_given_and_no_others() -> None:
    axes = {"cp_rank": 3, "tp_rank": 4, "ep_rank": 2, "expert_tp_rank": 2}
    places = [dict(zip(axes, place)) for place in itertools.product(*map(range, axes.values()))]
    seeds = {
        seed_for_ranks(5, "dropout", dp_rank=dp_rank, **place)
        for dp_rank in range(3)
        for place in places
    }
    assert len(seeds) == 3 * len(places)
    assert seed_for_ranks(5, "dropout", dp_rank=1, tp_rank=2, cp_rank=1) == seed_for_ranks(
        5, "dropout", cp_rank=1, tp_rank=2, dp_rank=1
    )
    assert seed_for_ranks(5, "dropout", cp_rank=1) != seed_for_ranks(5, "router", cp_rank=1)
    # A layout without an axis draws the same numbers as rank 0 of that axis.
    assert seed_for_ranks(5, "dropout", dp_rank=2, cp_rank=0, tp_rank=0) == seed_for(
        5, "dropout", 2
    )
    assert seed_for_ranks(1234, "dropout", dp_rank=1, cp_rank=2, tp_rank=3) == 6869045188395099249


@pytest.mark.parametrize("axis", ["dp_rank", "cp_rank", "tp_rank"])
def test_generators_differ_along_every_axis_that_splits_tokens(axis: str) -> None:
    def first(**ranks: int) -> list[float]:
        seed_all(7, **ranks)
        return draw()

    assert first(**{axis: 0}) == first() != first(**{axis: 1}) == first(**{axis: 1})
    assert len({first(**{name: 1})[-1] for name in ("dp_rank", "cp_rank", "tp_rank")}) == 3


def test_state_round_trip_continues_every_generator() -> None:
    seed_all(3)
    random.gauss(0, 1)  # This caches a second normal number, which is part of the state.
    np.random.randn()
    state = RngState.capture()
    expected = draw()
    assert draw() != expected
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    metadata = json.loads(json.dumps(state.metadata))
    assert all(t.dtype == torch.uint8 and t.dim() == 1 for t in tensors.values())
    RngState(tensors=tensors, metadata=metadata).restore()
    assert draw() == expected


def test_a_torn_state_is_refused() -> None:
    state = RngState.capture()
    torn = {**state.tensors, "numpy": state.tensors["numpy"][:-4]}
    with pytest.raises(ValueError, match=r"'numpy' has 2492 bytes, but the generator needs 2496"):
        RngState(tensors=torn, metadata=state.metadata).restore()
