"""Flags that describe a model in a file of flags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from megatron_packed.config.idle_model_options import MODEL_IDLE
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
    idle, values = _idle_in_every_run(model), section_to_dict(model)
    flags = []
    for about in section_fields(ModelConfig):
        value = values[about.name]
        if value is None or value == about.default:
            continue
        if about.option.derived and about.key in idle:
            without = unchecked(ModelConfig, {**values, about.name: None})
            if value == without.derive(lambda *names: True).get(about.name):
                continue
        flags.append(as_flag(about, value))
    return flags


def _idle_in_every_run(model: ModelConfig) -> set[str]:
    """Return the keys of options that have no effect in any run of the model.

    The rules see a run of long documents with several expert-parallel ranks.
    """
    other: dict[str, Any] = {
        "packing": SimpleNamespace(max_document_length=1 << 62),
        "parallel": SimpleNamespace(expert_model_parallel_size=2),
    }
    run = cast(RunConfig, SimpleNamespace(model=model, **other))
    return {key for idle in MODEL_IDLE if idle.applies(run, 1) for key in idle.options}
