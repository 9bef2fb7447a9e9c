"""Packer and capacities that suit a data set: what every packer makes of it, and what
that would cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config import flag_names as flags
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.packing_report import CAPACITIES
from megatron_packed.data.packing.step_cost import StepCosts
from megatron_packed.packed.capture_sizes import (
    DOCUMENT_COST,
    choose_capacities,
    coverage,
    percentile,
)
from megatron_packed.packed.cu_seqlens import aligned

TIE = 0.01
"""Relative costs this near are equal: times of runs differ by as much. Then the balanced packer,
which comes first, has the merit that documents meet others in every epoch.
"""

Counts = NDArray[np.int64]
EAGER = 0
"""Capacity of a pack that no graph holds."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """One epoch by one packer; or counts of packs that somebody made, of which nothing else is
    known.
    """

    method: str
    documents: Counts
    """``(P,)`` documents of each pack."""
    squares: NDArray[np.float64] | None = None
    """``(P,)`` sum of the squared lengths of each pack's rows, the tail included."""
    fill: float | None = None
    """Tokens of documents per token slot."""

    @classmethod
    def of(cls, packer: Packer, lengths: Counts, seed: int) -> Packing:
        """The first epoch, as a run with this seed has it.

        Args:
            lengths: ``(S,)`` tokens of each piece, none above the packer's slots.
        """
        packs = packer.pack(lengths, seed)
        taken = aligned(lengths, packer.alignment)
        tail = packer.slots - packs.sums(taken)
        squares = packs.sums(taken**2) + tail**2
        return cls(
            method=packer.method,
            documents=packs.documents_per_pack,
            squares=squares.astype(np.float64),
            fill=int(lengths.sum()) / (len(packs) * packer.slots),
        )

    @property
    def most(self) -> int:
        """Documents of the fullest pack."""
        return percentile(self.documents, 1.0)

    def percentiles(self) -> dict[str, int]:
        """P50, P90, P99 and most documents of a pack, each a count that occurs."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: percentile(self.documents, share) for name, share in shares.items()}

    def coverage(self, capacities: Sequence[int] = ()) -> dict[int, float]:
        """Share of packs that capacities cover: usual ones, those given, and the largest count."""
        return coverage(self.documents, sorted({*CAPACITIES, *capacities, self.most}))

    def capacity_of(self, capture_sizes: Sequence[int]) -> Counts:
        """``(P,)`` the smallest capacity that holds each pack; `EAGER` where none does."""
        sizes = np.array([*sorted(capture_sizes), EAGER])
        return sizes[np.searchsorted(sizes[:-1], self.documents)]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Cost of a packing with some capacities."""

    method: str
    capacities: tuple[int, ...]
    eager_share: float
    """Share of packs that run eagerly."""
    relative: float
    """Cost of a document token; 1 is a full pack without any room. By the table, or by what is
    assumed.
    """
    micro_batch_ms: float | None = None
    """Mean over the packs of forward and backward; None without a table."""
    step_ms: float | None = None
    tokens_per_second: float | None = None
    """Tokens of documents, on one replica."""


def expected(
    packing: Packing, capacities: Sequence[int], costs: StepCosts | None, packs_per_step: int
) -> Expected:
    """Cost of a packing by a table, or assumed as the packers assume it: ``1 + DOCUMENT_COST *
    capacity``.

    A pack beyond all capacities is assumed to cost as much as with room for itself; by a table,
    what an eager run took. A table without eager times has no price for it: then nothing is said in
    milliseconds.
    """
    room = packing.capacity_of(capacities)
    eager = room == EAGER
    known = {
        "method": packing.method,
        "capacities": tuple(sorted(capacities)),
        "eager_share": float(eager.mean()),
    }
    fill = packing.fill or 1.0
    if costs is None or packing.squares is None or (eager.any() and not costs.knows_eager):
        mean_room = float(np.where(eager, packing.documents, room).mean())
        return Expected(**known, relative=(1 + DOCUMENT_COST * mean_room) / fill)
    mean = float(costs.milliseconds(room, packing.squares).mean())
    step = packs_per_step * mean + costs.update_ms
    least = float(
        costs.milliseconds(np.array([costs.capacities[0]]), packing.squares.mean(keepdims=True))[0]
    )
    return Expected(
        **known,
        relative=mean / least / fill,
        micro_batch_ms=mean,
        step_ms=step,
        tokens_per_second=1e3 * packs_per_step * costs.tokens * fill / step,
    )


def capacities_for(packing: Packing, costs: StepCosts | None) -> tuple[int, ...]:
    """The capacities of least expected cost that cover every pack."""
    cost = None if costs is None else costs.document_cost()
    return choose_capacities(
        packing.documents, document_cost=DOCUMENT_COST if cost is None else cost
    )


def recommended(
    packings: Sequence[Packing], costs: StepCosts | None, packs_per_step: int
) -> Expected:
    """The packer and the capacities of the cheapest document token; the first of those that nearly
    tie (`TIE`).
    """
    choices = [expected(one, capacities_for(one, costs), costs, packs_per_step) for one in packings]
    least = min(one.relative for one in choices)
    return next(one for one in choices if one.relative <= (1 + TIE) * least)


def flags_for(choice: Expected, impl: str) -> list[str]:
    """Return the flags with which no pack of any epoch, nor of validation, runs eagerly.

    The balanced packer keeps to the largest capacity by itself; the others need the flag.
    """
    words = [flags.PACKING_METHOD, choice.method, flags.CUDA_GRAPH_IMPL, impl]
    words += [flags.CUDA_GRAPH_MAX_PACKED_SEQS, *map(str, choice.capacities)]
    if choice.method != "balanced":
        words += [flags.MAX_DOCUMENTS_PER_PACK, str(choice.capacities[-1])]
    return words


def packings_of(
    packer: Packer, lengths: Counts, methods: Sequence[str], seed: int
) -> list[Packing]:
    """One epoch by every method, under the other rules of ``packer``."""
    return [Packing.of(replace(packer, method=method), lengths, seed) for method in methods]


def capacities_to_measure(packings: Sequence[Packing], asked: Sequence[int]) -> list[int]:
    """Return the capacities that a table should hold: from the smallest median to the fullest pack
    in even steps of the logarithm, what would be recommended without a table, and what was asked
    for.
    """
    least = min(one.percentiles()["p50"] for one in packings)
    most = max(one.most for one in packings)
    between = np.geomspace(least, most, 4).round().astype(int).tolist()
    return sorted({*between, *recommended(packings, None, 1).capacities, *asked})


def as_dict(packing: Packing, capacities: Sequence[int]) -> dict[str, Any]:
    """Plain values for a JSON file."""
    return {
        "method": packing.method,
        "packs": int(packing.documents.size),
        "fill": packing.fill,
        **packing.percentiles(),
        "mean": float(packing.documents.mean()),
        "coverage": {
            str(capacity): share for capacity, share in packing.coverage(capacities).items()
        },
    }
