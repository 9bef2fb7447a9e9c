"""Readers of files that name data, in Megatron's formats: words of a data path, or a JSON object of
splits.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_packed.config.data_blend import NamedData
from megatron_packed.config.parser.text_file import read_text_file
from megatron_packed.config.value_checks import MOST_VALUES

SPLITS = ("train", "valid", "test")
MOST_PATH_BYTES = 2**20
"""Maximum bytes of a file of data paths: more than MOST_VALUES words of usual length."""


def read_data_args(path: str) -> NamedData:
    """Return the training data that a file names as ``WEIGHT PATH`` pairs or as paths only, with
    any white space between words.
    """
    try:
        arguments = read_text_file(path, MOST_PATH_BYTES).split()
        _check_number(arguments)
    except ValueError as error:
        return NamedData(fault=str(error))
    return NamedData(tuple(arguments), fault="" if arguments else "names no data")


def read_per_split_data_args(path: str) -> NamedData:
    """Return the data that a JSON object names under ``train`` and, optionally, ``valid`` and
    ``test``.

    Each value is a list of words, or a text of words; null and an empty list name no data.

    Example:
        ``{"train": ["3", "a", "1", "b"], "valid": "c", "test": null}``.
    """
    try:
        arguments = _arguments_by_split(read_text_file(path, MOST_PATH_BYTES))
    except ValueError as error:
        return NamedData(fault=str(error))
    train, valid, test = (tuple(arguments.get(split, ())) for split in SPLITS)
    return NamedData(train, valid, test)


def _arguments_by_split(text: str) -> dict[str, list[str]]:
    """Return the words of each split.

    Raises:
        ValueError: a clause with the problem of the text.
    """
    try:
        # Weights stay text, so that they are exact. A duplicate key is an error, because JSON would
        # silently drop the first value.
        splits = json.loads(text, parse_int=str, parse_float=str, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(splits, dict):
        raise ValueError("does not contain a JSON object")
    for split, arguments in splits.items():
        if split not in SPLITS:
            raise ValueError(f"has the key {split!r}, but only train, valid and test are allowed")
        if isinstance(arguments, str):
            splits[split] = arguments.split()
        elif arguments is None:
            splits[split] = []
        elif not isinstance(arguments, list) or not all(
            isinstance(argument, str) and argument for argument in arguments
        ):
            raise ValueError(
                f"must name the data of {split!r} as a list of words, or as one text of words"
            )
        _check_number(splits[split])
    if not splits.get("train"):
        raise ValueError("names no training data")
    return splits


def _check_number(arguments: list[str]) -> None:
    if len(arguments) > MOST_VALUES:
        raise ValueError(f"has {len(arguments):,} words, but at most {MOST_VALUES:,} are allowed")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice"
        )
    return mapping
