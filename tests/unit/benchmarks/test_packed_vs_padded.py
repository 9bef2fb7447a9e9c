"""`benchmarks/packed_vs_padded.py` on the CPU: both sides do the same work, and a difference fails."""

import numpy as np
import pytest

from packed_vs_padded import ROWS, padded_batches, padding_share, sample_of

DOCUMENTS = [np.arange(1, 1 + length) for length in (5, 9, 3, 17, 8, 4, 2, 6, 30, 7)]


def test_padded_rows_are_documents_whose_padding_is_no_target():
    first, second = padded_batches(DOCUMENTS)
    assert first.layout.total_tokens == ROWS * 24 and second.layout.total_tokens == 2 * 32
    assert (
        first.packed.document_lengths.tolist() == [24] * ROWS
    )  # Each row attends only to itself, as in dense attention.
    assert first.num_target_tokens == sum(len(document) - 1 for document in DOCUMENTS[:ROWS])
    labels = first.labels.view(ROWS, 24)[3]
    assert labels[:16].tolist() == list(range(2, 18)) and not labels[16:].any()


def test_padding_share_and_sample():
    lengths = np.array([4] * 7 + [8] + [2] * 8)
    assert padding_share(lengths) == pytest.approx(1 - (36 + 16) / (64 + 16))
    assert padding_share(lengths, sort_window=16) == pytest.approx(1 - (16 + 36) / (16 + 64))
    assert sample_of(lengths, 64).size == 8 and sample_of(lengths, 65).size == 16
