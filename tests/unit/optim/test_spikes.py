"""Spike detector: medians against `statistics`, entries of the window, and save and load."""

import json
import math
import random
from statistics import median_low

import pytest
import torch

from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.optim import spikes as module
from megatron_packed.optim.spikes import SpikeDetector

FACTORS = (3.0, 10.0)


def detector(window: int = 8, *, skip: bool = True) -> SpikeDetector:
    return SpikeDetector(window=window, factors=FACTORS, skip=skip, device=torch.device("cpu"))


def observed(
    one: SpikeDetector, loss: float, norm: float, skip: float = 0.0
) -> tuple[list[float], bool]:
    """Return the medians that spikes exceeded, and whether the step is skipped."""
    result = one.observe(torch.tensor([loss]), torch.tensor(norm), torch.tensor(skip))
    return one.medians.tolist(), bool(result)


@pytest.mark.parametrize("window", [2, 7, 8])
def test_decisions_are_those_of_plain_lists(window: int) -> None:
    one, draw = detector(window), random.Random(window)
    seen: list[tuple[float, float]] = []
    spikes = 0
    for _ in range(300):
        pair = tuple(torch.tensor(draw.lognormvariate(0, 1.2)).item() for _ in FACTORS)
        invalid = draw.random() < 0.1
        medians = (
            [median_low(column) for column in zip(*seen[-window:])]
            if len(seen[-window:]) * 2 >= window
            else []
        )
        above = [
            not invalid and value > k * middle for value, k, middle in zip(pair, FACTORS, medians)
        ]
        expected = [middle if spike else 0.0 for spike, middle in zip(above, medians)] or [0.0, 0.0]
        assert observed(one, *pair, skip=float(invalid)) == (expected, invalid or any(above))
        seen += [] if invalid else [pair]  # a spike also enters the window
        spikes += any(above)
    assert spikes > 20


def test_warn_decides_the_same_and_skips_nothing() -> None:
    warns, skips = detector(4, skip=False), detector(4)
    for loss, spike in ((1.0, False), (1.0, False), (9.0, True), (1.0, False)):
        assert observed(warns, loss, 1.0) == ([1.0 * spike, 0.0], False)
        assert observed(skips, loss, 1.0) == ([1.0 * spike, 0.0], spike)
    assert torch.equal(warns.recent, skips.recent)


def test_a_lasting_new_level_is_skipped_for_at_most_half_a_window() -> None:
    for window in (2, 7, 8, 128):
        one = detector(window)
        for _ in range(window):
            observed(one, 1.0, 1.0)
        skipped = [observed(one, 100.0, 100.0)[1] for _ in range(2 * window)]
        assert skipped == sorted(skipped, reverse=True) and 0 < sum(skipped) <= window // 2 + 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_steps_skipped_for_another_reason_leave_no_trace(value: float) -> None:
    one = detector(4)
    observed(one, 1.0, 1.0), observed(one, 2.0, 1.0)
    before = one.recent.clone()
    assert observed(one, value, value, skip=1.0) == ([0.0, 0.0], True)
    assert torch.equal(one.recent, before)


def test_zeros_have_no_spikes() -> None:
    """With a median of zero no value is a spike, although any value exceeds it."""
    one = detector(4)
    for _ in range(4):
        observed(one, 0.0, 0.0)
    assert observed(one, 1.0, 1.0) == ([0.0, 0.0], False)


@pytest.mark.parametrize("filled", [0, 3, 8, 20])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_window_comes_back_from_json_bit_for_bit(filled: int, size: int) -> None:
    one, other, draw = detector(8), detector(size), random.Random(filled)
    for _ in range(filled):
        observed(one, draw.random() / 3, 1e10 * draw.random())
    state = json.loads(json.dumps(one.state()))
    other.load_state(state)
    kept = min(filled, 8, size)
    assert torch.equal(other.recent[:, size - kept :], one.recent[:, 8 - kept :])
    assert other.recent[:, : size - kept].isinf().all()


def detector_of(policy: str, group: object = None) -> SpikeDetector | None:
    config = TrainingConfig(
        train_iters=1,
        loss_spike_policy=policy,
        loss_spike_window=6,
        loss_spike_factor=2.5,
        grad_norm_spike_factor=7.0,
    )
    return SpikeDetector.from_config(config, torch.device("cpu"), group)  # type: ignore[arg-type]


def test_the_policy_makes_the_detector() -> None:
    made = {policy: detector_of(policy) for policy in ("off", "warn", "skip")}
    assert made["off"] is None and made["warn"] is not None and made["skip"] is not None
    assert (made["warn"].skip, made["skip"].skip) == (False, True)
    assert made["skip"].recent.shape == (2, 6) and made["skip"]._factors.tolist() == [2.5, 7.0]


def test_a_spike_of_another_rank_is_skipped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``skip`` a rank decides by the largest values of its group, and under ``warn`` alone."""
    group, of_other_rank = object(), torch.tensor([1.0, 1.0])

    def all_reduce_max(values: torch.Tensor, used: object) -> torch.Tensor:
        return values.maximum(of_other_rank) if used is group else values

    monkeypatch.setattr(module, "all_reduce_max", all_reduce_max)
    skips, warns = detector_of("skip", group), detector_of("warn", group)
    assert skips is not None and warns is not None
    for one in (skips, warns):
        for _ in range(6):
            observed(one, 1.0, 1.0)
    of_other_rank[0] = 2.6
    assert observed(skips, 2.4, 1.0) == ([1.0, 0.0], True)
    assert observed(warns, 2.4, 1.0) == ([0.0, 0.0], False)
    # Both ranks keep the same window, so that later medians agree too.
    assert skips.recent[0, -1] == of_other_rank[0]
