"""Assembly of a `MicroBatch` from pieces of documents.

The label at t is token t + 1, if that token is a target and belongs to the same piece. Otherwise t
has no label. The last token of a piece therefore has no label, and the first token of a piece is no
label.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_packed.data.documents import Documents
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.packed.array_types import IntegerArray
from megatron_packed.packed.micro_batch import Document, MicroBatch


def collate(
    dataset: Documents,
    pieces: Pieces,
    numbers: Sequence[int] | IntegerArray,
    *,
    total_tokens: int,
    capacity: int | None = None,
    scales: Sequence[float] | None = None,
    max_seqlen: int | None = None,
    alignment: int = 1,
) -> MicroBatch:
    """Build the micro-batch of one pack on the host.

    Args:
        numbers: numbers of the pieces in the pack, in order; empty for a pack without documents.
        total_tokens: slots of the pack.
        capacity, scales, max_seqlen, alignment: as for `MicroBatch.build`.
    Raises:
        DataError: the data on disk changed since it was written.
        ValueError: the pieces do not fit.
    Example:
        Pieces of 3 and 2 tokens, ``a b c`` with targets ``0 1 1`` and ``d e`` with ``0 0``, in 6
        slots: labels ``b c - - - -``, loss mask ``1 1 0 0 0 0``.
    """
    documents = []
    for number in numbers:
        tokens, targets = dataset.document(
            int(pieces.document[number]), int(pieces.start[number]), int(pieces.length[number])
        )
        documents.append(Document(tokens, targets))
    return MicroBatch.build(
        documents,
        total_tokens,
        capacity=capacity,
        scales=scales,
        max_seqlen=max_seqlen,
        alignment=alignment,
    )
