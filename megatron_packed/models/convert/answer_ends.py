"""Tokens that end an answer, in config.json and generation_config.json of a fine-tuned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_packed.models.convert.original_facts import IDS
from megatron_packed.models.convert.trained_config import SpecialIds

ENDS = "eos_token_id"
_TEXT = "text_config"
"""Object of config.json that describes the text model of a model with vision."""


def ends_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the tokens at which transformers ends an answer.

    Args:
        config: content of config.json.
        generation: content of generation_config.json; None if there is no file.
    """
    return _listed((_text_model(config) if generation is None else generation).get(ENDS))


def with_ends(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, ends: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both files with the ends of the training before those of the original.

    The ends of the original stay, because a server may need them for other kinds of answers.

    Args:
        ends: tokens that end an answer of the training.
    """
    both = SpecialIds(ends=tuple(ends)).keeping({ENDS: list(ends_of(config, generation))})
    value = both.fields()[ENDS]
    changed = dict(config)
    if _TEXT in config:
        changed[_TEXT] = {**config[_TEXT], ENDS: value}
    if ENDS in config or _TEXT not in config:
        changed[ENDS] = value
    if generation is None:
        text = _text_model(config)
        generation = {name: text[name] for name in IDS if text.get(name) is not None}
    return changed, {**generation, ENDS: value}


def _text_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get(_TEXT, {})
    return text if text.get(ENDS) is not None else config


def _listed(ends: Any) -> tuple[int, ...]:
    """Return the value of ``eos_token_id``, which may be null, a number or a list."""
    listed = ends if isinstance(ends, list) else [ends]
    return tuple(end for end in listed if type(end) is int)
