"""Refusal of options whose layers are not complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from megatron_packed.config.errors import Problem
from megatron_packed.config.layer_pattern import ATTENTION
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.model_parts.stack import StackOptions

NOT_BUILT = {
    "attention_norm_placement": ATTENTION,
}
"""Fields of `ModelConfig` that accept only their default in a pattern with the layer."""


def not_built_problems(config: StackOptions, sound: Sound) -> Iterator[Problem]:
    """Yield a problem for each option of `NOT_BUILT` that differs from its default."""
    for field in fields(config):
        if field.name not in NOT_BUILT or not sound(field.name, "hybrid_layer_pattern"):
            continue
        assert field.default is not MISSING
        value = getattr(config, field.name)
        used = NOT_BUILT[field.name] in config.hybrid_layer_pattern
        if value != field.default and used:
            yield Problem(config.flag(field.name), str(value), "is not supported", "leave it out")
