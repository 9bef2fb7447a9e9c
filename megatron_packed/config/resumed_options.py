"""Options that affect packs, for a resumed run: they come from its checkpoint unless the user gives
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.flag_registry import every_field
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data_parts.tokenizer import (
    AT_DOCUMENT,
    AT_TURN,
    DATA_RULES,
    EARLIER_RULES,
)
from megatron_packed.config.serialise import as_flag

Stored = Mapping[str, Mapping[str, Any]]
"""Configuration in a checkpoint, as `serialise.to_dict` makes it; older checkpoints lack newer
options.
"""


def _whole_pack(stored: Stored) -> int:
    """Return the maximum document length of a run that was limited only by its packs."""
    slots: int = stored["packing"]["micro_batch_size"] * stored["packing"]["seq_length"]
    return slots


def _answer_end(stored: Stored) -> str:
    """Return the end of conversations in runs before ``--answer-end`` existed."""
    data = stored["data"]
    templated = data.get("sft", False) and data.get("sft_tokenizer_prompt_format") is None
    return AT_DOCUMENT if templated else AT_TURN


def _data_rules(stored: Stored) -> int:
    """Return the rules of runs before ``--data-rules`` existed; text has the same tokens."""
    return EARLIER_RULES if stored["data"].get("sft", False) else DATA_RULES


_BEFORE: Mapping[str, Callable[[Stored], Any]] = {
    "packing.overlong_policy": lambda stored: "truncate",
    "packing.max_document_length": _whole_pack,
    "packing.keep_pieces_without_targets": lambda stored: stored["data"].get("sft", False),
    "data.split_order": lambda stored: "file",
    "data.answer_end": _answer_end,
    "data.data_rules": _data_rules,
}
"""Options that older checkpoints do not contain and whose defaults affect packs, each with the
value that those runs used.
"""


def with_implied(stored: Stored) -> dict[str, dict[str, Any]]:
    """Return the configuration of a checkpoint, with values for the options that did not exist when
    it was saved.
    """
    full = {name: dict(section) for name, section in stored.items()}
    for about in every_field():
        if about.key in _BEFORE and {"packing", "data"} <= stored.keys():
            full.setdefault(about.section, {}).setdefault(about.name, _BEFORE[about.key](stored))
    return full


def implied_keys(config: RunConfig) -> set[str]:
    """Return the keys of options that a checkpoint decides because the user did not give them, e.g.
    ``packing.overlong_policy``.
    """
    return {
        about.key
        for about in every_field()
        if about.key in _BEFORE and not config.is_given(about.key)
    }


def packs_as_stored(config: RunConfig, stored: Stored) -> tuple[RunConfig, list[str]]:
    """Return the configuration that continues the packs of a checkpoint, and the flags that come
    from the checkpoint.

    Options that the user gave keep their values. If the checkpoint's values do not fit the other
    options, no option changes; the run is then refused when its packs are compared.
    """
    full, keys = with_implied(stored), implied_keys(config)
    changes: dict[str, dict[str, Any]] = {}
    flags = []
    for about in every_field():
        then = full.get(about.section, {}).get(about.name)
        if about.key in keys and then not in (
            None,
            getattr(getattr(config, about.section), about.name),
        ):
            changes.setdefault(about.section, {})[about.name] = then
            flags.append(as_flag(about, then))
    try:
        sections = {
            name: replace(getattr(config, name), **values) for name, values in changes.items()
        }
        return replace(config, **sections), flags
    except ConfigError:
        return config, []
