"""Tokens that end an answer, in config.json and generation_config.json of a fine-tuned model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_packed.checkpoint.original_facts import IDS
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


def with_ids(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    ids: SpecialIds,
    *,
    keeping: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both files with the ends of the training before those of the original.

    Args:
        ids: tokens of the training.
        keeping: True if the original's numbers mean the same tokens in the training. Then all of
            them stay, because a server may need its ends for other kinds of answers. Otherwise the
            numbers of the training replace all of them.
    """
    original = {ENDS: list(ends_of(config, generation))} if keeping else {}
    numbers = ids.keeping(original).fields()
    if keeping:
        numbers = {ENDS: numbers[ENDS]}
    changed = dict(config)
    if _TEXT in config:
        changed[_TEXT] = {**config[_TEXT], **numbers}
    outer = {
        name: value for name, value in numbers.items() if name in config or _TEXT not in config
    }
    changed |= outer
    if generation is None:
        text = _text_model(config)
        generation = {name: text[name] for name in IDS if text.get(name) is not None}
    generation_fields = {**generation, **numbers}
    return changed, {name: value for name, value in generation_fields.items() if value is not None}


def _text_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get(_TEXT, {})
    return text if text.get(ENDS) is not None else config


def _listed(ends: Any) -> tuple[int, ...]:
    """Return the value of ``eos_token_id``, which may be null, a number or a list."""
    listed = ends if isinstance(ends, list) else [ends]
    return tuple(end for end in listed if type(end) is int)
