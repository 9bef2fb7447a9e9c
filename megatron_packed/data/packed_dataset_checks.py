"""Checks of the arguments of `PackedDataset`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

StrPath = str | os.PathLike[str]


def check_integers(**values: Any) -> None:
    """Check that each value is an integer or None, except for required values that are None.

    Raises:
        ValueError: with the name and the value.
    """
    for name, value in values.items():
        may_be_none = name in ("max_documents", "max_document_length")
        if (value is None and may_be_none) or (
            isinstance(value, Integral) and not isinstance(value, bool)
        ):
            continue
        raise ValueError(f"{name} is {value!r}; give an integer.")


def list_of_paths(paths: StrPath | Sequence[StrPath]) -> list[StrPath]:
    """Return the paths as a list.

    Raises:
        ValueError: there is no path, or a value is not a path.
    """
    several = isinstance(paths, Iterable) and not isinstance(paths, str)
    found = list(paths) if several else [paths]
    if not found or not all(map(_is_path, found)):
        raise ValueError(f"paths is {paths!r}; give a path or a list of at least one path.")
    return found


def _is_path(value: object) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value != "")


def check_options(
    rank: int,
    world_size: int,
    longest: int,
    tokens_per_pack: int,
    max_documents: int | None,
    policy: str,
    sft: bool,
    chat_template: StrPath | None,
) -> None:
    """Refuse options that contradict each other.

    Raises:
        ValueError: with the option, its value and the cure.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank ({rank}) is not one of world_size ({world_size}) ranks; give a rank from 0 to world_size - 1."
        )
    if tokens_per_pack < 2:
        raise ValueError(f"tokens_per_pack is {tokens_per_pack}; it must be at least 2.")
    if not 2 <= longest <= tokens_per_pack:
        raise ValueError(
            f"max_document_length ({longest}) must be at least 2 and at most tokens_per_pack ({tokens_per_pack})."
        )
    if max_documents is not None and max_documents > tokens_per_pack:
        raise ValueError(
            f"max_documents ({max_documents}) is more than tokens_per_pack ({tokens_per_pack}), but every document "
            "has at least one token; give a smaller max_documents."
        )
    if policy == "truncate_prompt" and not sft:
        raise ValueError(
            "overlong_policy truncate_prompt keeps the last answer of a conversation; add sft=True, or choose "
            "another policy."
        )
    if chat_template is not None and not sft:
        raise ValueError("chat_template is for conversations only; add sft=True, or leave it out.")
