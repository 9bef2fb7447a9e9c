"""Cutting of documents into pieces for packs, with counts of every token and every target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_packed.data.documents import Documents
from megatron_packed.data.packing.pieces import Pieces, TargetCounts
from megatron_packed.packed.array_types import Int64Array, IntegerArray


def cut_documents(
    documents: Documents, max_tokens: int, policy: str, *, only_with_targets: bool
) -> tuple[Pieces, Int64Array]:
    """Cut documents that are longer than ``max_tokens``, and count the lost tokens and targets.

    Args:
        policy: one of `pieces.OVERLONG_POLICIES`.
        only_with_targets: True leaves out pieces without a target.
    Returns:
        The pieces, and the number of targets of each piece, ``(S,)``.
    Raises:
        ValueError: see `Pieces.cut`.
    """
    cut = Pieces.cut(documents.lengths, max_tokens, policy, documents.source_lengths)
    targets = documents.count_targets(cut.document, cut.start, cut.length)
    every = np.arange(len(documents.lengths))
    document_targets = documents.count_targets(every, np.zeros_like(every), documents.lengths)
    kept_targets = np.zeros(every.size, np.int64)
    np.add.at(kept_targets, cut.document, targets)
    pieces = replace(
        cut, targets=_account(documents.source_targets, document_targets, kept_targets, policy)
    )
    if not only_with_targets:
        return pieces, targets
    return pieces.with_targets(targets), targets[targets > 0]


def _account(
    sources: Int64Array,
    document_targets: Int64Array,
    kept_targets: Int64Array,
    policy: str,
) -> TargetCounts:
    """Count the targets that each policy lost.

    Targets lost when tokenisation shortened a document count as truncated. Targets lost when the
    document was cut into pieces count under ``policy``.

    Args:
        sources: ``(D,)`` targets of each document before it was shortened.
        document_targets: ``(D,)`` targets of each tokenised document.
        kept_targets: ``(D,)`` targets of the pieces of each document.
    """
    cut = int((document_targets - kept_targets).sum())
    split, dropped = (cut if policy == name else 0 for name in ("split", "drop"))
    counts = TargetCounts(
        documents_in=sources.size,
        targets_in=int(sources.sum()),
        targets_kept=int(kept_targets.sum()),
        targets_truncated=int((sources - document_targets).sum()) + cut - split - dropped,
        targets_split=split,
        targets_dropped=dropped,
        documents_without_targets=int(np.count_nonzero(kept_targets == 0)),
    )
    accounted = (
        counts.targets_kept
        + counts.targets_truncated
        + counts.targets_split
        + counts.targets_dropped
    )
    assert counts.targets_in == accounted, counts
    return counts


def targets_of_depths(
    documents: Documents, pieces: Pieces, targets: IntegerArray, depths: int
) -> list[Int64Array]:
    """Return the targets of each piece, ``(S,)``, at each depth of multi-token prediction.

    At depth k these are the targets of the piece except those among its first k + 1 tokens, as no
    token of the piece is k + 1 tokens before them. Only these tokens are read.

    Args:
        targets: ``(S,)`` targets of each piece.
        depths: number of depths.
    """
    depth_targets = []
    for depth in range(1, depths + 1):
        first = np.minimum(pieces.length, depth + 1)
        skipped = documents.count_targets(pieces.document, pieces.start, first)
        depth_targets.append(np.asarray(targets) - skipped)
    return depth_targets
