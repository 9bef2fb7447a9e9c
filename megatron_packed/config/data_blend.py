"""Data paths as Megatron takes them: paths alone, or a weight before each, and ``--split`` into
proportions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class BlendedPaths:
    """Paths, and how much of what is read each contributes."""

    paths: tuple[str, ...]
    weights: tuple[Fraction, ...] | None
    """Shares of the tokens, which sum up to 1; None without weights: everything is read equally
    often.
    """

    @classmethod
    def of(cls, words: tuple[str, ...]) -> BlendedPaths:
        """Read the words of a data path; of those that `blend_fault` finds wrong, the paths without
        weights.

        Example:
            ``3 a 1 b`` are a and b with 3/4 and 1/4; ``a b`` have no weights.
        """
        numbers = [_number(word) for word in words]
        weights = [number for number in numbers[::2] if number is not None and number > 0]
        if len(words) < 2 or numbers[0] is None:
            return cls(words, None)
        if blend_fault(words):
            return cls(tuple(word for word, number in zip(words, numbers) if number is None), None)
        total = sum(weights, Fraction(0))
        return cls(words[1::2], tuple(weight / total for weight in weights))


def blend_fault(words: tuple[str, ...]) -> str:
    """What is wrong with the weights of a data path; empty where nothing is."""
    if len(words) < 2 or _number(words[0]) is None:
        return ""
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or None in weights:
        return "a weight must stand before every path, or before none"
    wrong = [
        word for word, weight in zip(words[::2], weights) if weight is not None and weight <= 0
    ]
    return (
        f"the weight {wrong[0]} must be more than 0; leave out what is not to be read"
        if wrong
        else ""
    )


def _number(word: str) -> Fraction | None:
    """Exactly, so that shares do not depend on rounding; no fractions, as Megatron reads none."""
    try:
        return (
            None if "/" in word or len(word) > 64 or not abs(float(word)) < 1e18 else Fraction(word)
        )
    except ValueError:
        return None


def split_shares(text: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """Shares of training, validation and test documents from ``969,30,1``, which sum up to 1.

    None where the text is not one to three proportions from 0, the first above 0.
    """
    numbers = [_number(word) for word in text.split(",")]
    given = [number for number in numbers if number is not None and number >= 0]
    if len(given) != len(numbers) or len(given) > 3 or not given[0]:
        return None
    train, valid, test = (*given, Fraction(0), Fraction(0))[:3]
    total = train + valid + test
    return train / total, valid / total, test / total
