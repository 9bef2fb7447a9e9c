"""Data paths in Megatron's format: paths only, or a weight before each path; and the proportions of
``--split``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

_LARGEST = 1e18
"""Bound of a weight or proportion; larger ones are slips."""
_MOST_CHARACTERS = 64
"""Limit of the characters of a weight, which is computed exactly."""


class NamedData(NamedTuple):
    """Words of the data paths of each split."""

    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    fault: str = ""
    """Problem of the file that names them; if it is not empty, no data is named."""


@dataclass(frozen=True)
class BlendedPaths:
    """Data paths, and the share of the training tokens that each contributes."""

    paths: tuple[str, ...]
    """Paths in the given order. With weights, each path occurs once."""
    weights: tuple[Fraction, ...] | None
    """Shares of the tokens, which sum to 1. None without weights: all data is read equally often.
    """

    @classmethod
    def from_arguments(cls, arguments: tuple[str, ...]) -> BlendedPaths:
        """Return the paths and weights that the words of a data path give.

        If `blend_fault` finds the words wrong, the paths are returned without weights. Weights of
        the same path are added, because its documents are drawn from one stream.

        Example:
            ``3 a 1 b`` gives a and b with weights 3/4 and 1/4, and so does ``1 a 1 b 2 a``; ``a b``
            has no weights.
        """
        numbers = [_number(word) for word in arguments]
        weights = [number for number in numbers[::2] if number is not None and number > 0]
        if len(arguments) < 2 or not _spells_number(arguments[0]):
            return cls(arguments, None)
        if blend_fault(arguments):
            return cls(tuple(word for word in arguments if not _spells_number(word)), None)
        total = sum(weights, Fraction(0))
        shares = dict.fromkeys(arguments[1::2], Fraction(0))
        for path, weight in zip(arguments[1::2], weights):
            shares[path] += weight / total
        return cls(tuple(shares), tuple(shares.values()))


def blend_fault(arguments: tuple[str, ...]) -> str:
    """Return the problem of the weights of a data path; empty if they are right."""
    if len(arguments) < 2 or not _spells_number(arguments[0]):
        return ""
    large = [word for word in arguments[::2] if _spells_number(word) and _number(word) is None]
    if large:
        return (
            f"the weight {large[0][:80]} must be a number below {_LARGEST:g} of at most "
            f"{_MOST_CHARACTERS} characters (only the ratios of weights count)"
        )
    weights = [_number(word) for word in arguments[::2]]
    if len(arguments) % 2 or None in weights:
        return "either every path or no path must have a weight before it"
    not_positive = [
        word for word, weight in zip(arguments[::2], weights) if weight is not None and weight <= 0
    ]
    return (
        f"the weight {not_positive[0]} must be more than 0; leave out paths that are not to be read"
        if not_positive
        else ""
    )


def _spells_number(word: str) -> bool:
    """Return whether a word is a number of any size, also infinity or NaN."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _number(word: str) -> Fraction | None:
    """Return the exact number that a word spells, so that shares do not depend on rounding; None
    for other words, and for numbers that are too large or too long.

    Fractions such as 1/2 are not numbers, as in Megatron.
    """
    if not _spells_number(word) or len(word) > _MOST_CHARACTERS:
        return None
    value = float(word)
    if not abs(value) < _LARGEST:
        return None
    # 1e-999999999 is 0 as a float; as an exact fraction it would need gigabytes.
    return Fraction(word) if value else Fraction(0)


def split_shares(text: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """Return the shares of training, validation and test documents of a text such as ``969,30,1``;
    they sum to 1.

    Return None unless the text has one to three proportions that are at least 0, the first above 0.
    """
    numbers = [_number(word) for word in text.split(",")]
    proportions = [number for number in numbers if number is not None and number >= 0]
    if len(proportions) != len(numbers) or len(proportions) > 3 or not proportions[0]:
        return None
    train, valid, test = (*proportions, Fraction(0), Fraction(0))[:3]
    total = train + valid + test
    return train / total, valid / total, test / total
