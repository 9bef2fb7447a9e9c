"""What was replayed and what was not, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_packed.config import flag_names as flags


class GraphFallbackError(RuntimeError):
    """Something ran, or would run, eagerly where that was forbidden."""


@dataclass
class GraphCounters:
    """Counts since the start, on this rank; all known on the host."""

    replays: int = 0
    """Micro-batches that ran in the slot."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Micro-batches that ran eagerly, by reason."""
    module_fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls of single modules that ran eagerly within a replayed micro-batch, by reason."""
    captures: int = 0
    """Graphs captured, each of one module's forward or backward, or of the tables, for one capture
    size.
    """
    capture_seconds: float = 0.0
    memory_mib: float = 0.0
    """Memory that graphs hold."""

    @property
    def hit_rate(self) -> float:
        """Share of the micro-batches that were replayed; 0 before the first."""
        total = self.replays + self.fallbacks.total()
        return self.replays / total if total else 0.0

    def fall_back(self, reason: str, *, strict: bool, too_many: bool) -> None:
        """Count a micro-batch that runs eagerly.

        Args:
            strict: it must not.
            too_many: it, or that of another rank, has more documents than the largest capacity.
        Raises:
            GraphFallbackError: ``strict``.
        """
        if strict:
            cure = f"; raise {flags.CUDA_GRAPH_MAX_PACKED_SEQS} or cap the packer by {flags.MAX_DOCUMENTS_PER_PACK}"
            why = reason + cure * too_many
            raise GraphFallbackError(
                f"a micro-batch would run eagerly, which {flags.CUDA_GRAPH_STRICT} forbids: {why}."
            )
        self.fallbacks[reason] += 1

    def sentences(self) -> list[str]:
        """For the console and the report."""
        lines = [
            f"CUDA graphs: {self.replays:,} micro-batches replayed, {self.fallbacks.total():,} run eagerly "
            f"(hit rate {100 * self.hit_rate:.1f} %); {self.captures} graphs, {self.memory_mib:,.0f} MiB, captured in "
            f"{self.capture_seconds:.1f} s"
        ]
        lines += [
            f"  {count:,} x eager: {reason}" for reason, count in self.fallbacks.most_common()
        ]
        lines += [
            f"  {count:,} x one module eager: {reason}"
            for reason, count in self.module_fallbacks.most_common()
        ]
        return lines
