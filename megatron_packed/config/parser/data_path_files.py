"""Readers of files that name data, in Megatron's formats: words of a data path, or a JSON object of
splits.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from megatron_packed.config.parser.text_file import read_text_file
from megatron_packed.config.value_checks import MOST_VALUES

SPLITS = ("train", "valid", "test")
MOST_BYTES = 2**20
"""Maximum bytes of a file of data paths: more than MOST_VALUES words of usual length."""


class NamedData(NamedTuple):
    """Words of the data paths of each split."""

    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    fault: str = ""
    """Problem of the file; if it is not empty, no data is named."""


def read_data_args(path: str) -> NamedData:
    """Return the training data that a file names as ``WEIGHT PATH`` pairs or as paths only, with
    any white space between words.
    """
    text, fault = _read(path)
    if not fault:
        fault = _number_fault(text.split()) or ("" if text.split() else "names no data")
    return NamedData(fault=fault) if fault else NamedData(train=tuple(text.split()))


def read_per_split_data_args(path: str) -> NamedData:
    """Return the data that a JSON object names under ``train`` and, optionally, ``valid`` and
    ``test``.

    Each value is a list of words, or a text of words; null and an empty list name no data.

    Example:
        ``{"train": ["3", "a", "1", "b"], "valid": "c", "test": null}``.
    """
    text, fault = _read(path)
    if fault:
        return NamedData(fault=fault)
    try:
        # Weights stay text, so that they are exact. A duplicate key is an error, because JSON would
        # silently drop the first value.
        arguments_of_split = json.loads(
            text, parse_int=str, parse_float=str, object_pairs_hook=_once
        )
    except (ValueError, RecursionError) as error:
        return NamedData(fault=f"is not valid JSON ({error})")
    if not isinstance(arguments_of_split, dict):
        return NamedData(fault="does not contain a JSON object")
    for split, arguments in arguments_of_split.items():
        if split not in SPLITS:
            return NamedData(
                fault=f"has the key {split!r}, but only train, valid and test are allowed"
            )
        if isinstance(arguments, str):
            arguments_of_split[split] = arguments.split()
        elif arguments is None:
            arguments_of_split[split] = []
        elif not isinstance(arguments, list) or not all(
            isinstance(word, str) and word for word in arguments
        ):
            return NamedData(
                fault=(
                    f"must name the data of {split!r} as a list of words, or as one text of words"
                )
            )
        if fault := _number_fault(arguments_of_split[split]):
            return NamedData(fault=fault)
    if not arguments_of_split.get("train"):
        return NamedData(fault="names no training data")
    train, valid, test = (tuple(arguments_of_split.get(split, ())) for split in SPLITS)
    return NamedData(train, valid, test)


def _number_fault(arguments: list[str]) -> str:
    return (
        f"has {len(arguments):,} words, but at most {MOST_VALUES:,} are allowed"
        if len(arguments) > MOST_VALUES
        else ""
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice"
        )
    return mapping


def _read(path: str) -> tuple[str, str]:
    """Return the text of a file and an empty error, or an empty text and the error."""
    try:
        return read_text_file(path, MOST_BYTES), ""
    except ValueError as error:
        return "", str(error)
