"""Choice of the packer and the capacities for a data set, by the expected cost of each packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.packing_report import CAPACITIES
from megatron_packed.data.packing.step_cost import StepCosts
from megatron_packed.packed.array_types import Float64Array, Int64Array
from megatron_packed.packed.capture_sizes import (
    DOCUMENT_COST,
    choose_capacities,
    coverage,
    percentile,
)
from megatron_packed.packed.cu_seqlens_and_seq_idx import aligned

TIE = 0.01
"""Relative difference of cost below which two packings count as equal.

Times of repeated runs differ by about 1 %. Among equal packings the packing of the balanced packer,
which is the first, is recommended, because its packs combine different documents in every epoch.
"""

EAGER = 0
"""Value that stands for the capacity of a pack that fits no graph and runs eagerly."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Packs of one epoch, made by one packer.

    The value may also hold given counts of documents per pack. Then ``squares`` and ``fill`` are
    None.
    """

    method: str
    documents: Int64Array
    """``(P,)`` number of documents of each pack."""
    squares: Float64Array | None = None
    """``(P,)`` sum of the squared lengths of each pack's rows, the tail included."""
    fill: float | None = None
    """Share of the token slots that hold tokens of documents."""

    @classmethod
    def of_first_epoch(cls, packer: Packer, lengths: Int64Array, seed: int) -> Packing:
        """Pack the first epoch, as a run with this seed does.

        Args:
            lengths: ``(S,)`` tokens of each piece, none above the packer's slots.
        """
        packs = packer.pack(lengths, seed)
        occupied = aligned(lengths, packer.alignment)
        tail = packer.slots - packs.sums(occupied)
        squares = packs.sums(occupied**2) + tail**2
        return cls(
            method=packer.method,
            documents=packs.documents_per_pack,
            squares=squares.astype(np.float64),
            fill=int(lengths.sum()) / (len(packs) * packer.slots),
        )

    @property
    def most(self) -> int:
        """Largest number of documents in one pack."""
        return percentile(self.documents, 1.0)

    def percentiles(self) -> dict[str, int]:
        """Return P50, P90, P99 and maximum of the documents per pack, each a count of a real pack."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: percentile(self.documents, share) for name, share in shares.items()}

    def coverage(self, capacities: Sequence[int] = ()) -> dict[int, float]:
        """Return the share of packs that each capacity covers.

        The capacities are `CAPACITIES`, the given capacities, and the largest number of documents
        in a pack.
        """
        return coverage(self.documents, sorted({*CAPACITIES, *capacities, self.most}))

    def capacity_of(self, capture_sizes: Sequence[int]) -> Int64Array:
        """Return for each pack the smallest capacity that holds it, ``(P,)``; `EAGER` if none does."""
        sizes = np.array([*sorted(capture_sizes), EAGER])
        return sizes[np.searchsorted(sizes[:-1], self.documents)]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected cost of a packing with given capacities."""

    method: str
    capacities: tuple[int, ...]
    eager_share: float
    """Share of packs that run eagerly."""
    relative: float
    """Relative cost of one token of a document, by the table or by the assumed cost.

    The value 1 is the cost in a full pack at the lowest capacity (with the assumed cost: at
    capacity 0).
    """
    micro_batch_ms: float | None = None
    """Mean time of forward and backward over the packs; None without a table."""
    step_ms: float | None = None
    tokens_per_second: float | None = None
    """Tokens of documents per second, on one replica."""


def expected(
    packing: Packing, capacities: Sequence[int], costs: StepCosts | None, packs_per_step: int
) -> Expected:
    """Estimate the cost of a packing with given capacities.

    The times come from the table ``costs``. Without a table, a micro-batch is assumed to cost ``1 +
    DOCUMENT_COST * capacity``, as the packers assume.

    A pack above all capacities runs eagerly and costs what the table's eager times say. Without a
    table the pack is assumed to cost as much as with a capacity equal to its own documents. If the
    table has no eager times, the assumed cost is used and no milliseconds are given.
    """
    room = packing.capacity_of(capacities)
    eager = room == EAGER
    in_order, eager_share = tuple(sorted(capacities)), float(eager.mean())
    fill = packing.fill or 1.0
    if costs is None or packing.squares is None or (eager.any() and not costs.knows_eager):
        mean_room = float(np.where(eager, packing.documents, room).mean())
        return Expected(
            method=packing.method,
            capacities=in_order,
            eager_share=eager_share,
            relative=(1 + DOCUMENT_COST * mean_room) / fill,
        )
    mean = float(costs.milliseconds(room, packing.squares).mean())
    step = packs_per_step * mean + costs.update_ms
    least = float(
        costs.milliseconds(np.array([costs.capacities[0]]), packing.squares.mean(keepdims=True))[0]
    )
    return Expected(
        method=packing.method,
        capacities=in_order,
        eager_share=eager_share,
        relative=mean / least / fill,
        micro_batch_ms=mean,
        step_ms=step,
        tokens_per_second=1e3 * packs_per_step * costs.tokens * fill / step,
    )


def capacities_for(packing: Packing, costs: StepCosts | None) -> tuple[int, ...]:
    """Choose the capacities that cover every pack at the lowest expected cost."""
    cost = None if costs is None else costs.document_cost()
    return choose_capacities(
        packing.documents, document_cost=DOCUMENT_COST if cost is None else cost
    )


def recommended(
    packings: Sequence[Packing], costs: StepCosts | None, packs_per_step: int
) -> Expected:
    """Return the packer and the capacities with the lowest cost per token of a document.

    If the costs of several packings differ by less than `TIE`, the first of them is returned.
    """
    choices = [
        expected(packing, capacities_for(packing, costs), costs, packs_per_step)
        for packing in packings
    ]
    least = min(choice.relative for choice in choices)
    return next(choice for choice in choices if choice.relative <= (1 + TIE) * least)


def flags_for(choice: Expected, impl: str) -> list[str]:
    """Return flags with which no pack of any epoch, and none of validation, runs eagerly.

    The balanced packer limits its packs to the largest capacity. Other packers need
    ``--max-documents-per-pack`` for that limit.
    """
    arguments = [flags.PACKING_METHOD, choice.method, flags.CUDA_GRAPH_IMPL, impl]
    arguments += [flags.CUDA_GRAPH_MAX_PACKED_SEQS, *map(str, choice.capacities)]
    if choice.method != "balanced":
        arguments += [flags.MAX_DOCUMENTS_PER_PACK, str(choice.capacities[-1])]
    return arguments


def capacities_to_measure(packings: Sequence[Packing], requested: Sequence[int]) -> list[int]:
    """Return the capacities whose times `tune --measure` should measure.

    The result has four capacities that are evenly spaced in the logarithm, from the smallest median
    to the fullest pack. It also has the capacities recommended without a table, and the requested
    capacities.
    """
    least = min(packing.percentiles()["p50"] for packing in packings)
    most = max(packing.most for packing in packings)
    between = np.geomspace(least, most, 4).round().astype(int).tolist()
    return sorted({*between, *recommended(packings, None, 1).capacities, *requested})


def as_dict(packing: Packing, capacities: Sequence[int]) -> dict[str, Any]:
    """Return the statistics of a packing as plain values for a JSON file."""
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
