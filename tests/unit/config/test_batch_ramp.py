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


@pytest.mark.parametrize("begin", [0, 3, 11])
@pytest.mark.parametrize(
    "ramp",
    [
        BatchRamp(start=2, increment=2, samples=12, full=6, micro=1),
        BatchRamp(start=4, increment=4, samples=100, full=32, micro=2),
        BatchRamp(start=1, increment=7, samples=5, full=8, micro=1),
        BatchRamp(start=1, increment=1, samples=3, full=20, micro=1),
        BatchRamp(start=2, increment=2, samples=0, full=6, micro=1),
    ],
)
def test_stages_have_the_size_of_each_step(ramp: BatchRamp, begin: int) -> None:
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
