"""Plan of an evaluation: every document once, with the same packs at every evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_packed.data.packing.step_plan import PieceTable, StepPlan
from megatron_packed.packed.array_types import Int64Array


@dataclass(kw_only=True, eq=False)
class EvaluationPlan(PieceTable):
    """Finite plan of an evaluation, with the same packs at every evaluation.

    The plan has every document once, or the first epoch of a blend. With ``max_steps`` only the
    first steps of that plan are run. The last step is filled up with empty packs, so that every
    rank runs the same number of micro-batches. For other arguments and errors see `PieceTable`.
    """

    max_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._packs = self.pack(0)
        steps = -(-len(self._packs) // self.packs_per_step)
        self.num_steps = steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def documents_per_pack(self) -> Int64Array:
        """Number of documents of each pack of the steps, without the empty packs at the end."""
        return self._packs.documents_per_pack[: self.num_steps * self.packs_per_step]

    @property
    def num_targets(self) -> int:
        """Number of targets of all steps. The mean loss is the mean over these targets."""
        return int(self._packs.sums(self.targets)[: self.num_steps * self.packs_per_step].sum())

    def packs_of_step(self, step: int) -> int:
        """Return `packs_per_step`, which all steps have."""
        return self.packs_per_step

    def __len__(self) -> int:
        return self.num_steps

    def step(self, step: int) -> StepPlan:
        """Return the plan of one step, from 0 to ``num_steps - 1``."""
        if not 0 <= step < self.num_steps:
            raise ValueError(
                f"step is {step}; this evaluation has steps 0 to {self.num_steps - 1}."
            )
        packs = self._packs.part(step * self.packs_per_step, self.packs_per_step)
        packs += [np.zeros(0, dtype=np.int64)] * (self.packs_per_step - len(packs))
        return self.deal(step, 0, packs)
