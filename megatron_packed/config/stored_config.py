"""Checks of the configuration stored in a checkpoint: does it have the form that a run writes?

A checksum detects accidental damage. A file that was changed on purpose has a valid checksum and
must still end in a clear error.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_packed.config.options import Field
from megatron_packed.config.run import stored_values
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.value_checks import within_bounds

_SIZES = ("global_batch_size", "micro_batch_size", "seq_length")
"""Derived sizes that a stored configuration must contain and that are never None."""


def stored_problem(value: Any) -> str | None:
    """Return the problem of a stored configuration, with its place; None if there is none."""
    if not isinstance(value, dict) or not all(
        isinstance(section, dict) for section in value.values()
    ):
        return wrong(value, "sections of options")
    of_model = tuple(field.name for field in section_fields(ModelConfig) if field.required)
    for section, required in (("model", of_model), ("training", ("bf16",)), ("packing", _SIZES)):
        missing = [name for name in required if name not in value.get(section, {})]
        if missing if section in value else section != "packing":
            return f".{'.'.join([section, *missing[:1]])} is missing"
    for field, stored in stored_values(value):
        if not _fits(field, stored):
            return f".{field.key}{wrong(stored, field.kind.word)}"
    return None


def _fits(field: Field, value: Any) -> bool:
    """Return whether a stored value has the type and the bounds of its option. Choices are not
    checked, because they differ between versions.
    """
    if value is None:
        return field.kind.optional and field.name not in _SIZES
    if field.option.word and value == field.option.word:
        return True
    if field.kind.many != isinstance(value, list):
        return False
    for item in value if field.kind.many else [value]:
        typed = type(item) is field.kind.base or (field.kind.base is float and type(item) is int)
        if not typed or (
            field.kind.base in (int, float)
            and not (is_number(item) and within_bounds(field.option, item))
        ):
            return False
    return True


def wrong(value: Any, expected: str) -> str:
    """Return a clause for a value of the wrong form."""
    return f" is {repr(value)[:60]}, but must be {expected}"


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number of usual size, below 1e300."""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)
