"""Conversion of a configuration to and from plain data for checkpoints, and the hash of a model."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

from megatron_packed.config.cross_rules import cross_rules
from megatron_packed.config.errors import ConfigError, Problem, Problems
from megatron_packed.config.options import Field, Stored
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.config.run import (
    SECTIONS,
    RunConfig,
    every_field,
    stored_values,
    unchecked_stored,
)
from megatron_packed.config.section import (
    Section,
    problems_of,
    section_fields,
    unchecked,
    value_when_not_given,
)
from megatron_packed.config.sections.model import ModelConfig

_HASH_VERSION = 1  # increase it when the default of a model field changes


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return a configuration as a dictionary that JSON can hold: ``{"model": {"hidden_size": 64,
    ...}, ...}``.
    """
    return {name: section_to_dict(getattr(config, name)) for name in SECTIONS}


def section_to_dict(section: Section) -> dict[str, Any]:
    """Return the fields of one section; tuples become lists."""
    values = {field.name: getattr(section, field.name) for field in section_fields(type(section))}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def as_flags(section: Section) -> list[str]:
    """Return the flags that set the values of a section, e.g. ``--hidden-size 64``.

    Each entry sets one option, quoted for a shell or an @file. Defaults are left out.
    """
    flags = []
    for field in section_fields(type(section)):
        value = getattr(section, field.name)
        if value != field.default and value is not None:
            flags.append(as_flag(field, value))
    return flags


def given_flags(config: RunConfig) -> list[str]:
    """Return the flags of the values that the user gave, each quoted for a shell or an @file.

    In a configuration created by a program, these are all values that differ from their defaults.
    """
    if config.origins is None:
        return [flag for name in SECTIONS for flag in as_flags(getattr(config, name))]
    values = ((field, config.value_of(field)) for field in every_field())
    return [
        as_flag(field, v) for field, v in values if config.is_given(field.key) and v is not None
    ]


def as_flag(field: Field, value: Any) -> str:
    """Return the flag that sets an option to ``value``, quoted for a shell or an @file. Several
    values may be a list or a tuple.
    """
    if isinstance(value, bool):
        return next(spelling for spelling, means in field.switches.items() if means is value)
    arguments = value if isinstance(value, (tuple, list)) else (value,)
    return shlex.join([field.flag, *map(str, arguments)])


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


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """Return the configuration from a dictionary that ``to_dict`` made. Missing sections and fields
    have their defaults.

    Raises:
        ConfigError: lists every problem: unknown sections or fields, and wrong values.
    """
    problems = list(_unknown_keys(data))
    run = unchecked_stored(
        {name: values for name, values in data.items() if isinstance(values, Mapping)}
    )
    for name in SECTIONS:
        problems += problems_of(getattr(run, name))
    if not problems:
        problems += cross_rules(run, lambda *keys: True)
    if problems:
        raise ConfigError(problems)
    return run


def model_hash(model: ModelConfig) -> str:
    """Return a hash of the function that the weights of a model belong to: 16 hexadecimal digits.

    Options that affect only training (``training_only``) are left out. So are fields with their
    default or derived value, so that a new option does not change the hash of older models.
    """
    identity = {"version": _HASH_VERSION, **_identity(model)}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def model_differences(stored: Mapping[str, Any], model: ModelConfig) -> list[Problem]:
    """Return the problems that prevent a checkpoint from being loaded into ``model``; empty if it
    fits.

    ``stored`` is the model section of the checkpoint, as in ``to_dict``.
    """
    stored_model = unchecked(ModelConfig, stored)
    # A checkpoint that is older than an option lacks the option, so derive its value here.
    derived = stored_model.derive(lambda *names: True)
    problems = []
    for field in section_fields(ModelConfig):
        stored_value, model_value = (getattr(each, field.name) for each in (stored_model, model))
        stored_value = derived.get(field.name) if stored_value is None else stored_value
        if stored_value != model_value and not field.option.training_only:
            setting = f"with {as_given(field, stored_value)}"
            rule = f"the checkpoint was made {'without it' if stored_value is None else setting}"
            cure = "give the value of the checkpoint, or load another checkpoint"
            problems.append(Problem(field.flag, as_given(field, model_value), rule, cure))
    return problems


def changed_options(stored: Stored, current: Stored, keys: Collection[str]) -> list[str]:
    """Return the options that differ from the options of the run that saved a checkpoint: ``["--lr
    0.1, was 0.2"]``.

    Args:
        stored, current: ``to_dict`` of the two runs. Options that only one of the two contains are
            skipped.
        keys: sections (``optim``) or single options (``training.seed``) to compare.
    """
    changes = []
    for field, stored_value, run_value in differing_options(stored, current, keys):
        previous, after = (as_given(field, value) for value in (stored_value, run_value))
        changes.append(f"{field.flag} {after}, was {previous}")
    return changes


def restoring_words(stored: Stored, current: Stored, keys: Collection[str]) -> str:
    """Return the cure that restores the options of a checkpoint, such as ``give --lr 0.2 and leave
    out --seed``.
    """
    differing = list(differing_options(stored, current, keys))
    by_default = [
        field.flag
        for field, stored_value, _ in differing
        if stored_value in (None, [], field.default)
    ]
    flags_to_give = [
        as_flag(field, stored_value)
        for field, stored_value, _ in differing
        if field.flag not in by_default
    ]
    both = (("give", flags_to_give), ("leave out", by_default))
    return " and ".join(f"{verb} {' '.join(flags)}" for verb, flags in both if flags)


def differing_options(
    stored: Stored, current: Stored, keys: Collection[str]
) -> Iterator[tuple[Field, Any, Any]]:
    """Yield each option of these sections and keys whose values differ, with the value in the
    checkpoint and the current value.
    """
    run_values = {field.key: value for field, value in stored_values(current)}
    for field, stored_value in stored_values(stored):
        run_value = run_values.get(field.key, stored_value)
        if run_value != stored_value and not {field.section, field.key}.isdisjoint(keys):
            yield field, stored_value, run_value


def as_given(field: Field, value: object) -> str:
    """Return a value as the user gives it with the flag, or ``not given`` for None. A switch is on or
    off; for a negated flag such as ``--disable-bias-linear``, on means that the field is False.
    """
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value != field.option.negated else "off"
    return (
        " ".join(map(str, value)) or "not given" if isinstance(value, (list, tuple)) else str(value)
    )


def _identity(model: ModelConfig) -> dict[str, Any]:
    return {
        field.name: value
        for field, value in stored_values({ModelConfig.title: section_to_dict(model)})
        if not field.option.training_only and value != value_when_not_given(model, field)
    }


def _unknown_keys(data: Mapping[str, Any]) -> Problems:
    for name, section in data.items():
        if name not in SECTIONS:
            cure = did_you_mean(nearest(name, SECTIONS), "remove it")
            yield Problem(name, "", "is not a section", cure)
        elif not isinstance(section, Mapping):
            rule = "must contain fields with values"
            yield Problem(name, repr(section), rule, "give a mapping")
        else:
            names = [field.name for field in section_fields(SECTIONS[name])]
            for key in section:
                if key not in names:
                    cure = did_you_mean(nearest(key, names), "remove it")
                    yield Problem(f"{name}.{key}", "", f"is not an option of {name}", cure)
