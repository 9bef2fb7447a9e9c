"""Flags that describe a model in a file of flags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from megatron_packed.config.options import Field
from megatron_packed.config.run import RunConfig
from megatron_packed.config.section import section_fields, value_when_not_given
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import as_flag


def model_flags(model: ModelConfig) -> list[str]:
    """Return the flags that set the options of a model, without derived ones that have no effect.

    A model without Mamba layers has a number of Mamba heads all the same, because the number is
    derived from the hidden size. Without the flag, it is derived again.

    Example:
        ``["--hybrid-layer-pattern '*-*-'", "--hidden-size 64", ...]``
    """
    flags = []
    for field in section_fields(ModelConfig):
        value = getattr(model, field.name)
        idle = field.option.derived and not _has_effect(field, model)
        if value not in (None, field.default) and not (
            idle and value == value_when_not_given(model, field)
        ):
            flags.append(as_flag(field, value))
    return flags


def _has_effect(field: Field, model: ModelConfig) -> bool:
    """Return whether an option whose conditions depend on the model alone has an effect."""
    run = cast(RunConfig, SimpleNamespace(model=model))
    return all(condition.holds(run, 1) for condition in field.option.conditions)
