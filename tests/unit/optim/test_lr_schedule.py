"""Learning-rate schedules against closed forms written out by hand, and Megatron's edge cases."""

import math

import pytest

from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.optim.schedules import Schedule

LR, MIN = 3e-4, 3e-5


def run_of(*flags: str) -> RunConfig:
    """Return the configuration of a minimal run with ``flags``."""
    least = [
        "--hybrid-layer-pattern",
        "-",
        "--hidden-size",
        "64",
        "--seq-length",
        "64",
        "--data-path",
        "x.jsonl",
    ]
    return parse_or_exit(
        [*least, "--lr", str(LR), "--min-lr", str(MIN), *flags],
        launched=False,
        on_this_machine=False,
    )


def close(expected):
    return pytest.approx(expected, rel=1e-12, abs=0)


def schedule(**changes) -> Schedule:
    return Schedule(
        **{"lr": LR, "min_lr": MIN, "decay_style": "linear", "decay_steps": 100, **changes}
    )


def test_warmup_starts_at_init_and_reaches_lr_at_its_end() -> None:
    rate = schedule(warmup_steps=10, warmup_init=1e-4, decay_style="constant")
    assert [rate.at(step) for step in (0, 5, 10)] == close([1e-4, 2e-4, LR])
    assert rate.at(11) == rate.at(10**9) == LR
    assert schedule(warmup_steps=10).at(0) == 0.0 and schedule(warmup_steps=10).at(1) == LR / 10
    assert schedule().at(0) == LR
    flags = ("--train-iters", "100", "--lr-warmup-iters", "10", "--lr-warmup-init", "1e-4")
    assert Schedule.from_config(run_of(*flags)).at(0) == 1e-4


@pytest.mark.parametrize(
    ("style", "at_30", "at_55"),
    [
        ("linear", MIN + (LR - MIN) * 70 / 90, MIN + (LR - MIN) * 0.5),
        ("cosine", MIN + (LR - MIN) * (1 + math.cos(math.pi * 20 / 90)) / 2, (LR + MIN) / 2),
    ],
)
def test_decay_over_the_steps_after_the_warmup(style: str, at_30: float, at_55: float) -> None:
    rate = schedule(decay_style=style, warmup_steps=10)
    assert rate.at(30) == close(at_30) and rate.at(55) == close(at_55)
    assert rate.at(10) == LR and rate.at(100) == close(MIN) and rate.at(101) == MIN


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("exponential", 2 * 2**-0.5 - 1),
        ("linear", 0.5),
        ("cosine", 0.5),
        ("minus_sqrt", 1 - 0.5**0.5),
    ],
)
def test_wsd_is_flat_until_its_last_steps(style: str, half: float) -> None:
    rate = schedule(decay_style="WSD", wsd_decay_steps=20, wsd_decay_style=style, warmup_steps=10)
    assert rate.at(11) == rate.at(50) == rate.at(80) == close(LR)
    assert rate.at(81) < rate.at(80)
    assert rate.at(90) == close(MIN + (LR - MIN) * half)
    assert rate.at(100) == close(MIN) and rate.at(101) == MIN


def test_wsd_decay_longer_than_the_rest_of_the_run_begins_inside_its_fall() -> None:
    flags = ("--train-iters", "20", "--lr-decay-style", "WSD", "--lr-wsd-decay-style", "linear")
    during_warmup = Schedule.from_config(
        run_of(*flags, "--lr-wsd-decay-iters", "18", "--lr-warmup-iters", "5")
    )
    assert during_warmup.at(5) == close(LR)
    assert during_warmup.at(6) == close(MIN + (LR - MIN) * (1 - 4 / 18))
    assert during_warmup.at(20) == close(MIN)
    before_the_run = Schedule.from_config(run_of(*flags, "--lr-wsd-decay-iters", "40"))
    assert before_the_run.at(0) == close(MIN + (LR - MIN) * 0.5)
    assert before_the_run.at(20) == close(MIN)


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
def test_rates_stay_within_their_bounds_and_never_rise_after_the_warmup(style: str) -> None:
    rate = schedule(
        decay_style=style, warmup_steps=7.5, wsd_decay_steps=40 if style == "WSD" else None
    )
    rates = [rate.at(step) for step in range(150)]
    assert (
        rates[:8] == sorted(rates[:8])
        and rates[0] < rates[7]
        and rates[8:] == sorted(rates[8:], reverse=True)
    )
    assert max(rates) <= LR and min(rates[8:]) >= MIN - 1e-18


def test_from_config_takes_megatrons_defaults() -> None:
    cosine = ("--train-iters", "200", "--lr-decay-style", "cosine")
    default = Schedule.from_config(run_of(*cosine, "--lr-warmup-iters", "3"))
    assert (
        default.decay_steps == 200 and default.warmup_steps == 3 and default.decay_style == "cosine"
    )
    part = Schedule.from_config(
        run_of(*cosine, "--lr-decay-iters", "50", "--lr-warmup-fraction", "0.05")
    )
    assert part.decay_steps == 50 and part.warmup_steps == 2.5 and part.at(50) == close(MIN)


def test_lengths_in_samples_are_megatrons() -> None:
    """Lengths in samples give Megatron's rates, whose schedule counts samples."""
    wsd = (
        "--lr-decay-style",
        "WSD",
        "--lr-wsd-decay-style",
        "minus_sqrt",
        "--lr-wsd-decay-samples",
        "301",
    )
    config = run_of(
        "--global-batch-size", "8", "--train-samples", "1001", "--lr-warmup-samples", "44", *wsd
    )
    assert config.training.train_iters == 125
    rate = Schedule.from_config(config)
    for step in (0, 3, 5, 6, 87, 88, 124, 125):
        samples = 8 * step
        if samples <= 44:
            expected = LR * samples / 44
        elif samples <= 700:
            expected = LR
        else:
            expected = MIN + (LR - MIN) * (1 - math.sqrt((samples - 700) / 301))
        assert rate.at(step) == pytest.approx(expected, rel=1e-12), step


def test_after_another_batch_size_samples_go_on_counting() -> None:
    """After 50 steps of 4 samples, a schedule in samples continues at sample 200 for any batch size.

    A schedule in iterations does not change.
    """
    batch, ahead = ("--global-batch-size", "8", "--micro-batch-size", "2"), 200 - 50 * 8
    samples = run_of(
        *batch,
        "--train-samples",
        "1001",
        "--lr-decay-style",
        "cosine",
        "--lr-warmup-samples",
        "300",
    )
    rate = Schedule.from_config(samples, ahead)
    assert rate.at(50) == close(LR * 200 / 300)
    assert rate.at(75) == close(MIN + (LR - MIN) * (1 + math.cos(math.pi * 100 / 701)) / 2)
    assert samples.last_iteration(ahead) == 150 and 200 + 100 * 8 <= 1001 < 200 + 101 * 8
    assert samples.last_iteration() == samples.training.train_iters == 125
    iterations = run_of(*batch, "--train-iters", "100", "--lr-warmup-iters", "10")
    assert Schedule.from_config(iterations, ahead) == Schedule.from_config(iterations)
    assert iterations.last_iteration(ahead) == 100
    both = run_of(
        *batch, "--train-samples", "1001", "--lr-decay-iters", "100", "--lr-warmup-iters", "10"
    )
    assert (
        Schedule.from_config(both, ahead) == Schedule.from_config(both)
        and both.last_iteration(ahead) == 150
    )


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("--train-iters 9", {"iters"}),
        ("--train-samples 9", {"samples"}),
        ("--train-samples 9 --lr-warmup-fraction 0.1", {"samples"}),
        ("--train-samples 9 --lr-decay-iters 5 --lr-warmup-iters 2", {"iters"}),
        ("--train-iters 9 --lr-decay-samples 5", {"samples"}),
        ("--train-samples 9 --lr-warmup-iters 2", {"iters", "samples"}),
        ("--train-iters 9 --lr-decay-style WSD --lr-wsd-decay-samples 2", {"iters", "samples"}),
    ],
)
def test_units_of_a_schedule(flags: str, units: set[str]) -> None:
    assert run_of(*flags.split()).schedule_units == units


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decay_style": "polynomial"},
            "lr_decay_style 'polynomial' is unknown; choose one of constant, linear",
        ),
        ({"min_lr": 1.0}, r"min_lr \(1.0\) must be between 0 and lr \(0.0003\)"),
        ({"warmup_init": 1.0}, r"lr_warmup_init \(1.0\) must be between"),
        (
            {"warmup_steps": 100},
            r"warm-up \(100 steps\) must end before the decay does \(100 steps\)",
        ),
        (
            {"decay_style": "WSD"},
            r"lr_wsd_decay_iters \(None\) must be above 0",
        ),
        ({"decay_style": "WSD", "wsd_decay_steps": 0}, r"lr_wsd_decay_iters \(0\) must be above 0"),
        (
            {"decay_style": "WSD", "wsd_decay_steps": 5, "wsd_decay_style": "x"},
            "lr_wsd_decay_style 'x' is unknown",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**changes)
