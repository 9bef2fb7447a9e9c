"""Counts of targets, compared with a loop over all targets, for every over-long policy.

Some of the documents were shortened before.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron_packed.data.packing.pieces import cut_documents, targets_of_depths


@dataclass
class Masks:
    """Documents that have only target marks."""

    masks: list[np.ndarray]
    lost: tuple[int, int] = (0, 0)
    """Tokens and targets that each document lost when it was shortened."""
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = np.array([len(mask) for mask in self.masks])

    def __len__(self) -> int:
        return len(self.masks)

    @property
    def source_lengths(self) -> np.ndarray:
        return self.lengths + self.lost[0]

    @property
    def source_targets(self) -> np.ndarray:
        return np.array([int(mask[1:].sum()) for mask in self.masks]) + self.lost[1]

    def count_targets(self, documents, starts, lengths) -> np.ndarray:
        places = zip(documents, starts, lengths, strict=True)
        return np.array(
            [int(self.masks[d][s + 1 : s + n].sum()) for d, s, n in places], dtype=np.int64
        )


PROMPT_AND_ANSWER = np.array([0] * 10 + [1] * 3)
"""Target marks of 10 tokens of a prompt and 3 tokens of an answer."""


@pytest.mark.parametrize(
    ("policy", "longest", "expected"),
    [
        # kept, truncated, split and dropped targets, and documents without a target
        ("truncate", 11, (1, 2, 0, 0, 0)),
        ("truncate", 10, (0, 3, 0, 0, 1)),
        ("split", 10, (2, 0, 1, 0, 0)),  # the second piece begins with a target
        ("split", 9, (3, 0, 0, 0, 0)),
        ("drop", 12, (0, 0, 0, 3, 1)),
        ("error", 13, (3, 0, 0, 0, 0)),
    ],
)
def test_targets_of_one_document(policy, longest, expected):
    masks = Masks([PROMPT_AND_ANSWER])
    pieces, targets = cut_documents(masks, longest, policy, only_with_targets=False)
    found = pieces.targets
    assert (found.documents_in, found.targets_in, targets.sum()) == (1, 3, expected[0])
    assert expected == (
        found.targets_kept,
        found.targets_truncated,
        found.targets_split,
        found.targets_dropped,
        found.documents_without_targets,
    )


@pytest.mark.parametrize("only_with_targets", [False, True])
@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_the_books_balance_on_random_documents(policy, only_with_targets):
    rng = np.random.default_rng(0)
    for lost in ((0, 0), (7, 3)):
        masks = [(rng.random(length) < 0.1).astype(int) for length in rng.integers(2, 60, 40)]
        data = Masks(masks, lost)
        pieces, targets = cut_documents(data, 16, policy, only_with_targets=only_with_targets)
        tokens, counts = pieces.counts, pieces.targets
        assert counts.targets_in == data.source_targets.sum()
        assert counts.targets_in == (
            counts.targets_kept
            + counts.targets_truncated
            + counts.targets_split
            + counts.targets_dropped
        )
        triples = list(zip(pieces.document, pieces.start, pieces.length, strict=True))
        in_packs = [int(masks[d][s + 1 : s + n].sum()) for d, s, n in triples]
        assert targets.tolist() == in_packs
        for depth, later in enumerate(targets_of_depths(data, pieces, targets, 3), start=1):
            wanted = [int(masks[d][s : s + n][1 + depth :].sum()) for d, s, n in triples]
            assert later.tolist() == wanted and sum(wanted) > 0
        assert counts.targets_kept == sum(in_packs)
        of_documents = np.bincount(pieces.document, weights=in_packs, minlength=len(masks))
        assert counts.documents_without_targets == (of_documents == 0).sum()
        assert tokens.tokens_in == data.source_lengths.sum()
        assert tokens.tokens_in == (
            tokens.tokens_kept
            + tokens.tokens_truncated
            + tokens.tokens_dropped
            + tokens.tokens_without_targets
        )
        assert tokens.tokens_kept == pieces.length.sum()
        assert (0 in in_packs) is not only_with_targets
        assert (tokens.pieces_without_targets > 0) is only_with_targets
        if lost[0]:
            assert tokens.documents_truncated == len(masks)


def test_pieces_without_a_target_are_left_out_and_counted():
    """Pieces without a target are left out and counted.

    The first document is split into 5, 5 and 3 tokens, and only the piece with the answer is kept.
    The second document has no target, so nothing of it is kept.
    """
    data = Masks([PROMPT_AND_ANSWER, np.zeros(4, int), np.array([0, 1])])
    pieces, targets = cut_documents(data, 5, "split", only_with_targets=True)
    triples = zip(
        pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True
    )
    assert list(triples) == [(0, 10, 3), (2, 0, 2)]
    assert targets.tolist() == [2, 1]
    counts = pieces.counts
    assert (counts.pieces_without_targets, counts.documents_of_pieces_without_targets) == (3, 2)
    assert counts.tokens_without_targets == 14
    assert (counts.tokens_kept, counts.tokens_in) == (5, 19)


def test_nothing_left_out_leaves_the_pieces_as_they_are():
    data = Masks([PROMPT_AND_ANSWER, np.array([0, 1])])
    every, _ = cut_documents(data, 13, "truncate", only_with_targets=False)
    some, _ = cut_documents(data, 13, "truncate", only_with_targets=True)
    for name in ("document", "start", "length"):
        assert np.array_equal(getattr(every, name), getattr(some, name))
    assert every.counts == some.counts
