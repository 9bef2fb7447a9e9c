"""Refusal of options that would profile no step."""

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.parse import parse
from support.command_lines import argv_of

PROFILE = "--profile --use-pytorch-profiler"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            f"{PROFILE} --profile-step-start 5 --profile-step-end 5",
            "must be above --profile-step-start",
        ),
        (f"{PROFILE} --profile-step-start 100", "is never reached"),
        (f"{PROFILE} --profile-step-start 1 --profile-ranks 0 2", "is not one of the 2 ranks"),
        ("--device cpu --profile --profile-step-start 1", "sets the capture range of nsys"),
        ("--device cpu --record-memory-history", "records the GPU memory allocator"),
    ],
)
def test_options_that_would_profile_nothing(right, words: str, rule: str) -> None:
    argv = argv_of(right, f"--train-iters 100 --global-batch-size 2 {words}")
    with pytest.raises(ConfigError, match=rule):
        parse(argv, world_size=2)


def test_how_many_steps_samples_make_is_known_when_a_checkpoint_is_read(right) -> None:
    """A profiled step beyond the 2 steps of --train-samples is accepted: a resumed run whose
    earlier steps were smaller has more steps.
    """
    argv = argv_of(right, f"~--train-iters --train-samples 8 --global-batch-size 4 {PROFILE}")
    assert parse(argv).training.train_iters == 2
