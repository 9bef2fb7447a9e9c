"""Documents that are tokens already: the columns that Hugging Face's trainers write.

``input_ids`` or ``token_ids`` are the tokens. ``labels`` decides what is learned: a label is the
token at its own position, or -100 for a token that is not learned. Masks of 0 and 1 can do the
same: ``loss_mask``, ``completion_mask`` or ``assistant_masks``. Without them, every token is
learned. Tokens whose ``attention_mask`` is 0 are padding and are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_packed.data.errors import BadLine, printable
from megatron_packed.data.sources.strict_json import JsonObject, expect, type_name

TOKEN_ID_FIELDS = ("input_ids", "token_ids")
"""Names of the field of the tokens."""
_LABELS, _ATTENTION = "labels", "attention_mask"
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
TOKEN_FIELDS = frozenset({*TOKEN_ID_FIELDS, _LABELS, _ATTENTION, *_MASKS})
"""Fields of a line of tokens."""
_NOT_LEARNED = -100
_LARGEST = 2**31 - 1


class TokenSequence(NamedTuple):
    """Document that is tokens already. No prefix and no end-of-document token is added."""

    ids: list[int]
    targets: list[int] | None
    """1 for each token that is learned, else 0; None if the line has no labels and no mask."""


def token_sequence(line: JsonObject) -> TokenSequence:
    """Return the document of a line with tokens.

    Raises:
        BadLine: a field is no list of numbers, has another length, or contradicts another field.
    """
    name = next(name for name in TOKEN_ID_FIELDS if name in line)
    ids = _numbers(name, line[name], None)
    if not ids:
        raise BadLine("empty_text", name)
    targets_by_field: dict[str, list[int]] = {}
    if line.get(_LABELS) is not None:
        labels = _numbers(_LABELS, line[_LABELS], len(ids), lowest=_NOT_LEARNED)
        targets_by_field[_LABELS] = [
            _is_learned(at, *pair) for at, pair in enumerate(zip(labels, ids))
        ]
    for mask in _MASKS:
        if line.get(mask) is not None:
            targets_by_field[mask] = _mask(mask, line[mask], len(ids))
    names = list(targets_by_field)
    for other in names[1:]:
        if targets_by_field[other] != targets_by_field[names[0]]:
            at = next(
                n
                for n, pair in enumerate(zip(targets_by_field[other], targets_by_field[names[0]]))
                if len({*pair}) > 1
            )
            raise BadLine("contradictory_masks", f"{names[0]} and {other} differ at token {at}")
    targets = targets_by_field[names[0]] if names else None
    if line.get(_ATTENTION) is not None:
        attention = _mask(_ATTENTION, line[_ATTENTION], len(ids))
        ids = [token for token, keeps in zip(ids, attention) if keeps]
        targets = targets and [target for target, keeps in zip(targets, attention) if keeps]
        if not ids:
            raise BadLine("empty_text", f"{_ATTENTION} is 0 for all tokens")
    return TokenSequence(ids, targets)


def _numbers(name: str, value: Any, length: int | None, lowest: int = 0) -> list[int]:
    """Return a list of token numbers after a check of its elements and of its length."""
    for at, number in enumerate(expect(name, value, list)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise BadLine(
                "wrong_type", f"{name}[{at}] is a {type_name(number)}, not a token number"
            )
        if not lowest <= number <= _LARGEST:
            raise BadLine(
                "wrong_type", f"{name}[{at}] is {printable(str(number), 40)}, no token number"
            )
    if length is not None and len(value) != length:
        raise BadLine(
            "wrong_type", f"{name} has {len(value)} numbers, but the line has {length} tokens"
        )
    return list(value)


def _mask(name: str, value: Any, length: int) -> list[int]:
    """Return a mask of 0 and 1 after a check of its elements and of its length."""
    if isinstance(value, list):
        value = [int(part) if isinstance(part, bool) else part for part in value]
    mask = _numbers(name, value, length)
    for at, part in enumerate(mask):
        if part > 1:
            raise BadLine("bad_train_flag", f"{name}[{at}] is {part}, not 0 or 1")
    return mask


def _is_learned(at: int, label: int, token: int) -> int:
    """Return 1 for a label that is the token at its position, and 0 for -100."""
    if label not in (_NOT_LEARNED, token):
        raise BadLine(
            "wrong_type",
            f"{_LABELS}[{at}] is {label}, but the token at its position is {token}; labels are not shifted, and -100 "
            "is not learned",
        )
    return int(label == token)
