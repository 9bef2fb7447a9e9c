"""Flags that describe a model in a file of flags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from megatron_packed.config.options import Field
from megatron_packed.config.run import RunConfig
from megatron_packed.config.section import section_fields, unchecked
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import as_flag, section_to_dict


def model_flags(model: ModelConfig) -> list[str]:
    """Return the flags that set the options of a model, without derived ones that have no effect.

    A model without Mamba layers has a number of Mamba heads all the same, because the number is
    derived from the hidden size. Without the flag, it is derived again.

    Example:
        ``["--hybrid-layer-pattern '*-*-'", "--hidden-size 64", ...]``
    """
    values = section_to_dict(model)
    flags = []
    for about in section_fields(ModelConfig):
        value = getattr(model, about.name)
        if value is None or value == about.default:
            continue
        if about.option.derived and not _has_effect(about, model):
            without = unchecked(ModelConfig, {**values, about.name: None})
            if value == without.derive(lambda *names: True).get(about.name):
                continue
        flags.append(as_flag(about, value))
    return flags


def _has_effect(about: Field, model: ModelConfig) -> bool:
    """Return whether an option whose conditions depend on the model alone has an effect."""
    run = cast(RunConfig, SimpleNamespace(model=model))
    return all(condition.holds(run, 1) for condition in about.option.conditions)
