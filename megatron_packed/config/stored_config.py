"""A configuration that lies in a checkpoint: is it what a run writes?

A seal tells accidents. A file that was changed on purpose has a right one, and must end in a
sentence all the same.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_packed.config.options import Field
from megatron_packed.config.parser.flag_registry import every_field
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.value_checks import within

_MODEL = tuple(about.name for about in section_fields(ModelConfig) if about.required)
_SIZES = ("global_batch_size", "micro_batch_size", "seq_length")
"""Options that a configuration must have, and derived ones that are never empty."""


def stored_problem(value: Any) -> str | None:
    """Return what is wrong with the configuration of a checkpoint, with its place; None if nothing
    is.
    """
    if not isinstance(value, dict) or not all(
        isinstance(section, dict) for section in value.values()
    ):
        return wrong(value, "sections of options")
    for section, required in (("model", _MODEL), ("training", ("bf16",)), ("packing", _SIZES)):
        missing = [name for name in required if name not in value.get(section, {})]
        if missing if section in value else section != "packing":
            return f".{'.'.join([section, *missing[:1]])} is missing"
    for about in every_field():
        given = value.get(about.section, {})
        if about.name in given and not _fits(about, given[about.name]):
            return f".{about.key}{wrong(given[about.name], about.kind.word)}"
    return None


def _fits(about: Field, value: Any) -> bool:
    """Return whether a stored value has the type and the bounds of its option; choices come and go."""
    if value is None:
        return about.kind.optional and about.name not in _SIZES
    if about.kind.many != isinstance(value, list):
        return False
    for item in value if about.kind.many else [value]:
        typed = type(item) is about.kind.base or (about.kind.base is float and type(item) is int)
        if not typed or (
            about.kind.base in (int, float) and not (is_number(item) and within(about.option, item))
        ):
            return False
    return True


def wrong(value: Any, expected: str) -> str:
    """Return the words for a value that is not what it must be."""
    return f" is {repr(value)[:60]}, and must be {expected}"


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that arithmetic takes."""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)
