"""Files that name data in place of options, as Megatron reads them: words of a path, or a JSON
object of splits.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from megatron_packed.config.parser.text_file import read_text_file
from megatron_packed.config.value_checks import MOST_VALUES

SPLITS = ("train", "valid", "test")
MOST_BYTES = 2**20
"""Limit of a file of data paths: more than MOST_VALUES words of usual length."""


class NamedData(NamedTuple):
    """The words of data paths, by what they are for."""

    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    fault: str = ""
    """What is wrong with the file that was to name them; then it names nothing."""


def read_data_args(path: str) -> NamedData:
    """Training data from a file of words, ``WEIGHT PATH`` or paths alone, with any white space
    between them.
    """
    text, fault = _read(path)
    if not fault:
        fault = _number_fault(text.split()) or ("" if text.split() else "names no data")
    return NamedData(fault=fault) if fault else NamedData(train=tuple(text.split()))


def read_per_split_data_args(path: str) -> NamedData:
    """All data from a JSON object with ``train``, and perhaps ``valid`` and ``test``: a list of
    words, or a text of them; null and an empty list name nothing.

    Example:
        ``{"train": ["3", "a", "1", "b"], "valid": "c", "test": null}``.
    """
    text, fault = _read(path)
    if fault:
        return NamedData(fault=fault)
    try:
        # A weight counts as it is written, and of a key that comes twice neither is passed over.
        found = json.loads(text, parse_int=str, parse_float=str, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        return NamedData(fault=f"is no JSON ({error})")
    if not isinstance(found, dict):
        return NamedData(fault="holds no JSON object")
    for split, words in found.items():
        if split not in SPLITS:
            return NamedData(fault=f"holds the key {split!r}; it may hold train, valid and test")
        if isinstance(words, str):
            found[split] = words.split()
        elif words is None:
            found[split] = []
        elif not isinstance(words, list) or not all(
            isinstance(word, str) and word for word in words
        ):
            return NamedData(
                fault=f"must name the data of {split!r} by a list of words, or by a text of them"
            )
        if fault := _number_fault(found[split]):
            return NamedData(fault=fault)
    if not found.get("train"):
        return NamedData(fault="names no training data")
    train, valid, test = (tuple(found.get(split, ())) for split in SPLITS)
    return NamedData(train, valid, test)


def _number_fault(words: list[str]) -> str:
    return (
        f"holds {len(words):,} words, and {MOST_VALUES:,} are read"
        if len(words) > MOST_VALUES
        else ""
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"it holds the key {next(key for key in keys if keys.count(key) > 1)!r} twice"
        )
    return found


def _read(path: str) -> tuple[str, str]:
    """The text of a file, and why there is none."""
    try:
        return read_text_file(path, MOST_BYTES), ""
    except ValueError as error:
        return "", str(error)
