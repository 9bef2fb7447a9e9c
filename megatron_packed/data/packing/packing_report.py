"""Report of a packing: fill, documents per pack, coverage of capacities, and counts of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_packed.config import flag_names as flags
from megatron_packed.data.packing.packer import Packer, Packs
from megatron_packed.data.packing.pieces import Pieces, TargetCounts, TokenCounts
from megatron_packed.packed.capture_sizes import CaptureSizes, coverage, percentile
from megatron_packed.packed.cu_seqlens_and_seq_idx import aligned

CAPACITIES = (8, 16, 32, 64, 106, 128, 256)
"""Capacities, in documents, for which a report gives the share of packs that fit.

The capacities 64 and 106 are taken from the published example (P90 43, P99 106).
"""


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Statistics of the packs of one epoch."""

    method: str
    slots: int
    """Token slots of a pack."""
    packs: int
    fill: float
    """Share of the token slots of all packs that hold tokens of documents."""
    emptiest: float
    """Fill of the emptiest pack."""
    documents_p50: int
    documents_p90: int
    documents_p99: int
    documents_max: int
    coverage: dict[int, float]
    """For each capacity, the share of packs with at most that number of documents."""
    counts: TokenCounts
    targets: TargetCounts | None
    """Counts of targets; None if only the lengths of documents are known."""
    padded_tokens: int
    """Slots that hold no token: ``packs * slots == tokens_kept + padded_tokens`` without a blend.
    """
    alignment: int = 1
    """Each document begins at a multiple of this number of slots."""
    alignment_padding: int = 0
    """Padded slots between the end of a document and the next multiple of ``alignment``. The other
    padded slots are the tails of packs.
    """
    graph_capacities: tuple[int, ...] = ()
    """Capacities that CUDA graphs are captured for; none without graphs."""
    packs_beyond: int = 0
    """Packs with more documents than the largest graph capacity; these packs run eagerly."""
    held_empty: bool = False
    """True if the largest graph capacity limits the packs and keeps them less full: one more
    document of mean length would have fitted into the mean pack.
    """

    @classmethod
    def from_packs(
        cls,
        pieces: Pieces,
        packs: Packs,
        packer: Packer,
        capacities: Sequence[int] = CAPACITIES,
        capture_sizes: CaptureSizes | None = None,
        blended: bool = False,
    ) -> PackingReport:
        """Measure the packs that ``packer`` made of ``pieces``.

        Args:
            capacities: capacities, in documents, for which the coverage is reported.
            capture_sizes: capture sizes of the CUDA graphs; None without graphs.
            blended: True if a blend drew the pieces, so that packs do not hold each piece once.

        Raises:
            ValueError: the packs of an epoch without a blend hold another number of tokens than
                ``pieces``.
        """
        tokens = packs.sums(pieces.length)
        if not blended and int(tokens.sum()) != pieces.counts.tokens_kept:
            raise ValueError(
                f"the packs hold {int(tokens.sum())} tokens, but the pieces have {pieces.counts.tokens_kept}; "
                "the packs were made from other pieces."
            )
        per_pack = packs.documents_per_pack
        total = len(packs) * packer.slots
        occupied = int(aligned(pieces.length[packs.order], packer.alignment).sum())
        one_more = occupied * (1 + 1 / max(float(per_pack.mean()), 1)) <= total
        return cls(
            method=packer.method,
            slots=packer.slots,
            packs=len(packs),
            fill=int(tokens.sum()) / total,
            emptiest=int(tokens.min()) / packer.slots,
            documents_p50=percentile(per_pack, 0.5),
            documents_p90=percentile(per_pack, 0.9),
            documents_p99=percentile(per_pack, 0.99),
            documents_max=percentile(per_pack, 1.0),
            coverage=coverage(per_pack, capacities),
            counts=pieces.counts,
            targets=pieces.targets,
            padded_tokens=total - int(tokens.sum()),
            alignment=packer.alignment,
            alignment_padding=occupied - int(tokens.sum()),
            graph_capacities=() if capture_sizes is None else capture_sizes.capacities,
            packs_beyond=0
            if capture_sizes is None
            else int((per_pack > capture_sizes.largest).sum()),
            held_empty=packer.room is not None and int(per_pack.max()) == packer.room and one_more,
        )

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values for a JSON file."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """Return the report as a few lines of text for a console."""
        full = min(
            (capacity for capacity, share in self.coverage.items() if share == 1),
            default=max(self.coverage),
        )
        shown = {capacity: share for capacity, share in self.coverage.items() if capacity <= full}
        covered = ", ".join(f"{capacity}: {share:.1%}" for capacity, share in shown.items())
        return [
            f"{self.packs} packs of {self.slots} slots, {self.fill:.2%} full (the emptiest {self.emptiest:.1%}), "
            f"packed by {self.method}.",
            f"Documents per pack: P50 {self.documents_p50}, P90 {self.documents_p90}, P99 {self.documents_p99}, "
            f"most {self.documents_max}. Packs covered by a capacity of {covered}.",
            *[
                part.sentence()
                for part in (self.counts, self.targets)
                if part is not None and not part.all_kept
            ],
            *self._alignment_sentences(),
            *self._graph_sentences(),
        ]

    def _alignment_sentences(self) -> list[str]:
        if self.alignment == 1:
            return []
        share = self.alignment_padding / (self.packs * self.slots)
        return [
            f"Documents begin at multiples of {self.alignment} slots: {self.alignment_padding} slots ({share:.2%}) are "
            f"padding after documents, {self.padded_tokens - self.alignment_padding} are unused at the ends of packs."
        ]

    def _graph_sentences(self) -> list[str]:
        if not self.graph_capacities:
            return []
        noun, verb = (
            ("capacities", "cover") if len(self.graph_capacities) > 1 else ("capacity", "covers")
        )
        covered = (
            "every pack"
            if not self.packs_beyond
            else f"all but {self.packs_beyond} of {self.packs} packs"
        )
        eager = ", which run eagerly" if self.packs_beyond else ""
        sizes = ", ".join(str(capacity) for capacity in self.graph_capacities)
        sentences = [f"CUDA graphs: {noun} {sizes} {verb} {covered}{eager}."]
        if self.held_empty:
            sentences.append(
                f"CUDA graphs: packs are only {self.fill:.1%} full because they hold at most "
                f"{self.graph_capacities[-1]} documents; use a larger {flags.CUDA_GRAPH_MAX_PACKED_SEQS}, or auto, to "
                "fill them."
            )
        return sentences
