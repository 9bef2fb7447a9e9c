"""Growth of the global batch size, compared with a count of samples step by step."""

import pytest

from megatron_packed.config.sections.packing import BatchRamp, stage_of


def sizes(ramp: BatchRamp, consumed: int, steps: int) -> list[tuple[int, int]]:
    """Return (packs before, packs) of each step, by the rule for a single step."""
    found = []
    increments = (ramp.full - ramp.start) // ramp.increment
    for _ in range(steps):
        if consumed >= ramp.samples:
            size = ramp.full
        else:
            size = ramp.start + int(consumed / (ramp.samples / increments)) * ramp.increment
        found.append((consumed // ramp.micro, size // ramp.micro))
        consumed += size
    return found


NAMES = ("start", "increment", "samples", "full", "micro")


@pytest.mark.parametrize("begin", [0, 3, 11])
@pytest.mark.parametrize(
    "sizes_of_ramp",
    [
        (2, 2, 12, 6, 1),
        (4, 4, 100, 32, 2),
        (1, 7, 5, 8, 1),
        (1, 1, 3, 20, 1),
        (2, 2, 0, 6, 1),
    ],
)
def test_stages_have_the_size_of_each_step(sizes_of_ramp: tuple[int, ...], begin: int) -> None:
    ramp = BatchRamp(**dict(zip(NAMES, sizes_of_ramp, strict=True)))
    expected = sizes(ramp, 0, 60)
    assert expected[0][1] < expected[-1][1] or ramp.samples == 0
    pack = expected[begin][0]
    stages = ramp.stages(begin, pack, pack * ramp.micro)
    for step in range(begin, 60):
        stage = stage_of(stages, step)
        assert (stage.pack + (step - stage.step) * stage.packs, stage.packs) == expected[step]
    last = stages[-1]
    ahead = (last.pack - last.step * last.packs) * ramp.micro
    assert ramp.ahead() == ramp.ahead(begin, pack * ramp.micro) == ahead <= 0
    # Another plan, as in a new phase, begins at its first pack.
    assert [
        (one.step, one.pack + pack, one.packs) for one in ramp.stages(begin, 0, pack * ramp.micro)
    ] == stages
