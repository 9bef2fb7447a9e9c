"""The plan of one step, and the table of pieces from which plans make their packs and steps."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.packing.packer import Packer, Packs
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.packing.rank_balance import PackCost, spread
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.data.source_blend import SourceBlend

PieceNumbers = NDArray[np.int64]
"""Numbers of the pieces (`Pieces`) of one pack, in their order in the pack; empty for a pack that
is all tail.
"""

_FORMAT = "pack plan 1"
"""Changed whenever the same inputs would give other packs, so that a resumed run notices by its
plan hash.
"""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The packs of one step."""

    step: int
    epoch: int
    """Epoch of the step's first pack."""
    packs: tuple[tuple[PieceNumbers, ...], ...]
    """``packs[dp_rank][micro_batch]``; every rank has equally many."""
    global_targets: int
    """Target tokens of the step, over all ranks."""
    global_packs: int
    """Packs with at least one document, over all ranks."""
    global_tokens: int
    """Tokens of documents, over all ranks; the rest of the slots is tail or padding of documents.
    """
    max_documents: int
    """Most documents in one of the step's packs, over all ranks: what decides the capacity of a
    replay.
    """
    dp_imbalance: float = 1.0
    """Estimated work of the busiest data-parallel rank over the mean of all ranks."""

    @property
    def scales(self) -> tuple[float, float]:
        """Factors of a micro-batch's loss sum and of its auxiliary loss; 0 where the step
        has nothing to divide by.
        """
        return (
            1.0 / self.global_targets if self.global_targets else 0.0,
            1.0 / self.global_packs if self.global_packs else 0.0,
        )


class PieceTable:
    """The pieces of a data set with their targets, and the rules by which they are packed."""

    def __init__(
        self,
        pieces: Pieces,
        targets: NDArray[np.integer],
        packer: Packer,
        seed: int,
        cost: PackCost,
        blend: SourceBlend | None,
        show_progress: bool = False,
    ) -> None:
        if len(targets) != len(pieces):
            raise ValueError(
                f"{len(pieces)} pieces come with {len(targets)} target counts; count them with cut_documents."
            )
        if len(pieces) == 0:
            raise ValueError(
                "there is no document to pack; check the data paths and the over-long policy."
            )
        self.pieces = pieces
        self.targets = np.asarray(targets, dtype=np.int64)
        self.squares = pieces.length**2
        self.cost = cost
        self.packer = packer
        self.seed = seed
        self.blend = blend
        self.show_progress = show_progress

    def pack(self, epoch: int) -> Packs:
        """The packs of an epoch, of all pieces or of those that a blend draws."""
        drawn = None if self.blend is None else self.blend.epoch(epoch)
        lengths = self.pieces.length if drawn is None else self.pieces.length[drawn]
        # The thread that packs ahead is not waited for, and would write into the lines of the
        # steps.
        show = self.show_progress and threading.current_thread() is threading.main_thread()
        with ProgressBar(f"packing epoch {epoch}", lengths.size, show) as progress:
            packs = self.packer.pack(lengths, self.seed, epoch, progress.update)
        return packs if drawn is None else Packs(drawn[packs.order], packs.offsets)

    def hash(self, packs_per_step: int) -> str:
        """64 hexadecimal digits of lengths, targets, rules and seed; the number of ranks is no part
        of it.
        """
        rules = {
            "format": _FORMAT,
            "slots": self.packer.slots,
            "method": self.packer.method,
            "window": self.packer.window,
            "max_documents": self.packer.max_documents,
            "packs_per_step": packs_per_step,
            "seed": self.seed,
        }
        if self.packer.room is not None:
            rules["room"] = self.packer.room
        if self.packer.alignment > 1:
            rules["alignment"] = self.packer.alignment
        if self.blend is not None:
            rules["blend"] = [self.blend.quotas, self.blend.sizes]
        digest = hashlib.sha256(json.dumps(rules, sort_keys=True).encode())
        for array in (
            self.pieces.document,
            self.pieces.start,
            self.pieces.length,
            self.targets,
        ):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        return digest.hexdigest()

    def step(self, step: int, epoch: int, packs: Sequence[PieceNumbers], dp_size: int) -> StepPlan:
        """Deal the packs of a step out to the ranks, even by estimated work, empty packs last. See
        `spread`.
        """
        tokens = np.array([self.pieces.length[numbers].sum() for numbers in packs])
        squares = np.array([self.squares[numbers].sum() for numbers in packs])
        packs_SRB, imbalance_S = spread(self.cost.of(tokens, squares)[None], dp_size)
        return StepPlan(
            step=step,
            epoch=epoch,
            packs=tuple(tuple(packs[pack] for pack in of_rank) for of_rank in packs_SRB[0]),
            global_targets=sum(int(self.targets[numbers].sum()) for numbers in packs),
            global_packs=sum(numbers.size > 0 for numbers in packs),
            global_tokens=int(tokens.sum()),
            max_documents=max(numbers.size for numbers in packs),
            dp_imbalance=float(imbalance_S[0]),
        )


def check_ranks(packs_per_step: int, dp_size: int) -> None:
    """
    Raises:
        ValueError: ranks would run different numbers of micro-batches.
    """
    if packs_per_step < 1 or dp_size < 1 or packs_per_step % dp_size:
        raise ValueError(
            f"packs_per_step ({packs_per_step}) is not a positive multiple of dp_size ({dp_size}), so ranks would run "
            "different numbers of micro-batches; make global_batch_size a multiple of micro_batch_size * dp_size."
        )
