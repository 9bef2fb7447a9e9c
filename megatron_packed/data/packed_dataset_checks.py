"""Checks of the arguments of `PackedDataset`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from megatron_packed.config.sections.data_parts.tokenizer import ANSWER_ENDS

StrPath = str | os.PathLike[str]


def check_integers(**values: Any) -> None:
    """Check that each value is an integer.

    Raises:
        ValueError: with the name and the value.
    """
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; give an integer.")


def check_pack_sizes(
    tokens_per_pack: int, max_documents: int | None, max_document_length: int | None
) -> None:
    """Check the sizes of packs and documents.

    Raises:
        ValueError: with the option, its value and the cure.
    """
    optional = {"max_documents": max_documents, "max_document_length": max_document_length}
    given = {name: value for name, value in optional.items() if value is not None}
    check_integers(tokens_per_pack=tokens_per_pack, **given)
    if tokens_per_pack < 2:
        raise ValueError(f"tokens_per_pack is {tokens_per_pack}; it must be at least 2.")
    if max_document_length is not None and not 2 <= max_document_length <= tokens_per_pack:
        raise ValueError(
            f"max_document_length ({max_document_length}) must be at least 2 and at most tokens_per_pack "
            f"({tokens_per_pack})."
        )
    if max_documents is not None and max_documents > tokens_per_pack:
        raise ValueError(
            f"max_documents ({max_documents}) is more than tokens_per_pack ({tokens_per_pack}), but every document "
            "has at least one token; give a smaller max_documents."
        )


def list_of_paths(paths: StrPath | Sequence[StrPath]) -> list[StrPath]:
    """Return the paths as a list.

    Raises:
        ValueError: there is no path, or a value is not a path.
    """
    if isinstance(paths, Iterable) and not isinstance(paths, str):
        found: list[Any] = list(paths)
    else:
        found = [paths]
    if not found or not all(map(_is_path, found)):
        raise ValueError(f"paths is {paths!r}; give a path or a list of at least one path.")
    return found


def _is_path(value: object) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value != "")


def check_options(
    rank: int,
    world_size: int,
    policy: str,
    sft: bool,
    chat_template: StrPath | None,
    answer_end: str,
) -> None:
    """Refuse options that contradict each other.

    Raises:
        ValueError: with the option, its value and the cure.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank ({rank}) is not one of world_size ({world_size}) ranks; give a rank from 0 to world_size - 1."
        )
    if policy == "truncate_prompt" and not sft:
        raise ValueError(
            "overlong_policy truncate_prompt keeps the last answer of a conversation; add sft=True, or choose "
            "another policy."
        )
    if chat_template is not None and not sft:
        raise ValueError("chat_template is for conversations only; add sft=True, or leave it out.")
    if answer_end not in ANSWER_ENDS:
        raise ValueError(f"answer_end is {answer_end!r}; give {' or '.join(ANSWER_ENDS)}.")
