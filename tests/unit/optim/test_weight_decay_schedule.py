"""Weight-decay schedules against Megatron's formula in float64, and the lengths of the rise."""

import math

import pytest

from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.optim.schedules import WeightDecaySchedule

MODEL = "--hybrid-layer-pattern - --hidden-size 64 --seq-length 64 --data-path x.jsonl --lr 1e-3"
RISE = "--start-weight-decay 0.01 --end-weight-decay 0.1"


def run_of(words: str) -> RunConfig:
    return parse_or_exit([*MODEL.split(), *words.split()], launched=False, on_this_machine=False)


def megatrons(style: str, done: float, length: float, start: float, end: float) -> float:
    """Return the weight decay as `OptimizerParamScheduler.get_wd` defines it, for steps so far."""
    if done > length:
        return end
    ratio = done / length
    share = ratio if style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
    return start + share * (end - start)


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ("--train-iters 40", 40.0),
        ("--train-iters 40 --weight-decay-incr-iters 10", 10.0),
        ("--train-samples 162 --global-batch-size 4", 40.5),
        ("--train-iters 40 --weight-decay-incr-samples 50 --global-batch-size 4", 12.5),
    ],
)
def test_each_step_has_megatrons_weight_decay(style: str, length: str, steps: float) -> None:
    decay = WeightDecaySchedule.from_config(
        run_of(f"{RISE} --weight-decay-incr-style {style} {length}")
    )
    assert decay.changes
    for done in range(60):
        expected = megatrons(style, done, steps, 0.01, 0.1)
        assert decay.at(done) == pytest.approx(expected, rel=1e-12)
    assert decay.at(0) == 0.01 and decay.at(steps) == pytest.approx(0.1) and decay.at(99) == 0.1


def test_a_constant_weight_decay_is_that_of_the_flag() -> None:
    decay = WeightDecaySchedule.from_config(run_of("--train-iters 5 --weight-decay 0.3"))
    assert not decay.changes and {decay.at(step) for step in (0, 3, 5, 99)} == {0.3}


def test_lengths_in_samples_follow_a_growing_batch() -> None:
    run = run_of(
        f"{RISE} --weight-decay-incr-style linear --train-samples 80 --global-batch-size 8 "
        "--rampup-batch-size 4 4 16"
    )
    # After 4 steps of 4 samples, 16 samples are fewer by 16 than 4 full batches.
    decay = WeightDecaySchedule.from_config(run, ahead=-16)
    assert decay.at(4) == pytest.approx(megatrons("linear", 16, 80, 0.01, 0.1))


@pytest.mark.parametrize(
    ("words", "units"),
    [
        ("--train-iters 9 --weight-decay-incr-samples 5", {"iters"}),
        (f"--train-iters 9 --weight-decay-incr-samples 5 {RISE} --weight-decay-incr-style linear",
         {"iters", "samples"}),
        (f"--train-samples 9 {RISE} --weight-decay-incr-style cosine", {"samples"}),
        (f"--train-samples 9 --weight-decay-incr-iters 4 {RISE} --weight-decay-incr-style cosine",
         {"iters", "samples"}),
    ],
)  # fmt: skip
def test_units_of_the_rise_count_only_if_there_is_one(words: str, units: set[str]) -> None:
    assert run_of(words).schedule_units == units
