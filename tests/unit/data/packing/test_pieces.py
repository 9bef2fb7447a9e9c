"""Tests of over-long documents: every token is counted, and pieces have the right start and length."""

from dataclasses import asdict

import numpy as np
import pytest

from megatron_packed.data.packing.pieces import OVERLONG_POLICIES, Pieces, TokenCounts

LENGTHS = np.array([5, 12, 8, 1, 24, 9, 3])  # the tests cut documents of more than 8 tokens


def listed(pieces: Pieces) -> list[tuple[int, int, int]]:
    return list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist()))


WHOLE = [(0, 0, 5), (2, 0, 8), (3, 0, 1), (6, 0, 3)]
"""Documents, starts and lengths of those that are not cut."""


@pytest.mark.parametrize(
    ("policy", "of_long", "kept", "counts"),
    [
        (
            "truncate",
            [(1, 0, 8), (4, 0, 8), (5, 0, 8)],
            41,
            {"documents_truncated": 3, "tokens_truncated": 21},
        ),
        (
            "split",
            [(1, 0, 8), (1, 8, 4), (4, 0, 8), (4, 8, 8), (4, 16, 8), (5, 0, 8), (5, 8, 1)],
            62,
            {"documents_split": 3},
        ),
        ("drop", [], 17, {"documents_dropped": 3, "tokens_dropped": 45}),
    ],
)
def test_pieces_and_counts_of_a_policy(policy, of_long, kept, counts):
    pieces = Pieces.cut(LENGTHS, 8, policy)
    assert listed(pieces) == sorted([*WHOLE, *of_long])
    none = dict.fromkeys(asdict(pieces.counts), 0)
    want = {**none, "documents_in": 7, "tokens_in": 62, "tokens_kept": kept, **counts}
    assert pieces.counts == TokenCounts(**want)


def test_error_names_the_longest():
    with pytest.raises(
        ValueError,
        match=r"3 documents are longer than 8 tokens \(the longest is document 4 with 24\)",
    ):
        Pieces.cut(LENGTHS, 8, "error")
    assert listed(Pieces.cut(LENGTHS, 24, "error")) == [
        (n, 0, length) for n, length in enumerate(LENGTHS.tolist())
    ]


def test_the_books_balance_on_random_data():
    rng = np.random.default_rng(0)
    for _ in range(30):
        lengths = rng.integers(1, 50, rng.integers(0, 40))
        longest = int(rng.integers(1, 30))
        for policy in ("truncate", "split", "drop"):
            pieces = Pieces.cut(lengths, longest, policy)
            counts = pieces.counts
            assert (
                counts.tokens_in
                == lengths.sum()
                == counts.tokens_kept + counts.tokens_truncated + counts.tokens_dropped
            )
            assert counts.tokens_kept == pieces.length.sum()
            assert pieces.keeps_everything == (pieces.length.sum() == lengths.sum())
            assert (
                pieces.length.size == 0
                or 1 <= pieces.length.min() <= pieces.length.max() <= longest
            )
            assert ((pieces.start + pieces.length) <= lengths[pieces.document]).all()
            if policy == "split":  # the pieces cover the documents in order, without gap or overlap
                assert [(d, t) for d, s, n in listed(pieces) for t in range(s, s + n)] == [
                    (d, t) for d, length in enumerate(lengths.tolist()) for t in range(length)
                ]


@pytest.mark.parametrize(
    ("lengths", "longest", "policy", "message"),
    [
        ([3, 0], 8, "truncate", "document 1 has 0 tokens"),
        ([3], 0, "truncate", "at least 1"),
        (
            [3],
            8,
            "cut",
            f"unknown over-long policy 'cut'; choose one of {', '.join(OVERLONG_POLICIES)}",
        ),
    ],
)
def test_wrong_input_is_refused(lengths, longest, policy, message):
    with pytest.raises(ValueError, match=message):
        Pieces.cut(np.array(lengths), longest, policy)
