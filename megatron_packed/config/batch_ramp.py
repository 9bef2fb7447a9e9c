"""Growth of the global batch size at the start of a run, for ``--rampup-batch-size``."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple


class BatchStage(NamedTuple):
    """Consecutive steps with the same number of packs, up to the next stage."""

    step: int
    """First step, counted from 0."""
    pack: int
    """Packs of all ranks before this step. In a stage without an earlier stage, the number may be
    negative: it then only gives the position of later steps.
    """
    packs: int
    """Packs of each step, over all ranks."""


def stage_of(stages: list[BatchStage], step: int) -> BatchStage:
    """Return the stage of a step; for a step before all stages, the first stage."""
    number = bisect_right(stages, step, key=lambda stage: stage.step)
    return stages[max(number - 1, 0)]


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Growth of the batch from ``start`` by ``increment`` samples to ``full``, in equal parts of
    ``samples``. As in Megatron, the samples before a step decide its size.
    """

    start: int
    increment: int
    samples: int
    full: int
    micro: int
    """Samples of a pack; divides all batch sizes."""

    def ahead(self, step: int = 0, samples: int = 0) -> int:
        """Return the samples before the full batch, minus those of as many full steps.

        ``step`` and ``samples`` are those so far.
        """
        last = self.stages(step, 0, samples)[-1]
        return samples + last.pack * self.micro - last.step * self.full

    def sentence(self) -> str:
        """Return the growth in words; empty if the batch is full from the first step.

        Example:
            ``The batch grows from 2 packs to 6 over the first 5 steps (14 samples).``
        """
        first, last = self.stages()[0], self.stages()[-1]
        if first == last:
            return ""
        return (
            f"The batch grows from {first.packs:,} pack{'s' if first.packs > 1 else ''} to "
            f"{last.packs:,} over the first {last.step:,} steps ({last.pack * self.micro:,} samples)."
        )

    def stages(self, step: int = 0, pack: int = 0, samples: int = 0) -> list[BatchStage]:
        """Return the stages of a run from ``step`` on, before which the run trained on ``pack``
        packs of its plan and on ``samples`` samples.

        Example:
            The batch grows from 2 by 2 to 6 samples over 12 samples, with one sample in a pack.
            Steps 0 to 2 take 2 packs, steps 3 and 4 take 4, and later steps take 6.
        """
        increments = (self.full - self.start) // self.increment
        stages = []
        while True:
            grown = (
                min(samples * increments // self.samples, increments)
                if self.samples
                else increments
            )
            packs = (self.start + grown * self.increment) // self.micro
            stages.append(BatchStage(step, pack, packs))
            if grown == increments:
                return stages
            # The stage ends with the first step that reaches the next increment.
            end = -(-(grown + 1) * self.samples // increments)
            steps = -(-(end - samples) // (packs * self.micro))
            step, pack = step + steps, pack + steps * packs
            samples += steps * packs * self.micro
