"""Plan of an evaluation: every document once, with the same packs at every evaluation."""

from __future__ import annotations

import numpy as np

from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.packing.rank_balance import BY_TOKENS, PackCost
from megatron_packed.data.packing.step_plan import PieceTable, StepPlan, check_ranks
from megatron_packed.data.source_blend import SourceBlend
from megatron_packed.packed.array_types import Int64Array, IntegerArray


class EvaluationPlan:
    """Finite plan of an evaluation, with the same packs at every evaluation.

    The plan has every document once, or the first epoch of a blend. With ``max_steps`` only the
    first steps of that plan are run. The last step is filled up with empty packs, so that every
    rank runs the same number of micro-batches. For arguments and errors see `PackPlan`.
    """

    def __init__(
        self,
        pieces: Pieces,
        targets: IntegerArray,
        *,
        packer: Packer,
        packs_per_step: int,
        dp_size: int = 1,
        seed: int = 0,
        cost: PackCost = BY_TOKENS,
        blend: SourceBlend | None = None,
        max_steps: int | None = None,
    ) -> None:
        check_ranks(packs_per_step, dp_size)
        self._table = PieceTable(pieces, targets, packer, seed, cost, blend)
        self._packs = self._table.pack(0)
        self.packs_per_step = packs_per_step
        self.dp_size = dp_size
        steps = -(-len(self._packs) // packs_per_step)
        self.num_steps = steps if max_steps is None else min(steps, max_steps)
        self.hash = self._table.hash(packs_per_step)

    @property
    def pieces(self) -> Pieces:
        return self._table.pieces

    @property
    def alignment(self) -> int:
        """Alignment of pieces in a pack, in slots. Pieces begin at multiples of the alignment."""
        return self._table.packer.alignment

    @property
    def documents_per_pack(self) -> Int64Array:
        """Number of documents of each pack of the steps, without the empty packs at the end."""
        return self._packs.documents_per_pack[: self.num_steps * self.packs_per_step]

    @property
    def num_targets(self) -> int:
        """Number of targets of all steps. The mean loss is the mean over these targets."""
        return int(
            self._packs.sums(self._table.targets)[: self.num_steps * self.packs_per_step].sum()
        )

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
        first = step * self.packs_per_step
        end = min(first + self.packs_per_step, len(self._packs))
        packs = [self._packs[pack] for pack in range(first, end)]
        empty = np.zeros(0, dtype=np.int64)
        packs += [empty] * (self.packs_per_step - len(packs))
        return self._table.step(step, 0, packs, self.dp_size)
