"""Conversion of a configuration to and from plain data for checkpoints, and the hash of a model."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_packed.config.cross_rules import cross_rules
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.options import Field
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.config.run import SECTIONS, RunConfig, every_field, unchecked_run
from megatron_packed.config.section import Section, section_fields, unchecked
from megatron_packed.config.sections.model import ModelConfig

_HASH_VERSION = 1  # increase it when the default of a model field changes


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return a configuration as a dictionary that JSON can hold: ``{"model": {"hidden_size": 64,
    ...}, ...}``.
    """
    return {name: section_to_dict(getattr(config, name)) for name in SECTIONS}


def section_to_dict(section: Section) -> dict[str, Any]:
    """Return the fields of one section; tuples become lists."""
    values = {
        described.name: getattr(section, described.name)
        for described in section_fields(type(section))
    }
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def as_flags(section: Section) -> list[str]:
    """Return the flags that set the values of a section, e.g. ``--hidden-size 64``.

    Each entry sets one option, quoted for a shell or an @file. Defaults are left out.
    """
    flags = []
    for about in section_fields(type(section)):
        value = getattr(section, about.name)
        if value != about.default and value is not None:
            flags.append(as_flag(about, value))
    return flags


def given_flags(config: RunConfig) -> list[str]:
    """Return the flags of the values that the user gave, each quoted for a shell or an @file.

    In a configuration created by a program, these are all values that differ from their defaults.
    """
    if config.origins is None:
        return [flag for name in SECTIONS for flag in as_flags(getattr(config, name))]
    values = (
        (about, getattr(getattr(config, about.section), about.name)) for about in every_field()
    )
    return [
        as_flag(about, v) for about, v in values if config.is_given(about.key) and v is not None
    ]


def as_flag(about: Field, value: Any) -> str:
    """Return the flag that sets an option to ``value``, quoted for a shell or an @file. Several
    values may be a list or a tuple.
    """
    if isinstance(value, bool):
        return next(spelling for spelling, means in about.switches.items() if means is value)
    words = value if isinstance(value, (tuple, list)) else (value,)
    return shlex.join([about.flag, *map(str, words)])


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """Return the configuration from a dictionary that ``to_dict`` made. Missing sections and fields
    have their defaults.

    Raises:
        ConfigError: lists every problem: unknown sections or fields, and wrong values.
    """
    problems = _unknown_keys(data)
    sections: dict[str, Section] = {}
    for name, kind in SECTIONS.items():
        given = data.get(name, {})
        known = {described.name for described in section_fields(kind)}
        try:
            values = (
                {key: value for key, value in given.items() if key in known}
                if isinstance(given, Mapping)
                else {}
            )
            required = {
                described.name: None for described in section_fields(kind) if described.required
            }
            sections[name] = kind(**{**required, **values})
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    run = unchecked_run(sections)
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
    described = {f.name: f for f in section_fields(ModelConfig)}
    kept = unchecked(
        ModelConfig, {name: value for name, value in stored.items() if name in described}
    )
    # A checkpoint that is older than an option lacks the option, so derive its value here.
    derived = kept.derive(lambda *names: True)
    found = []
    for name, about in described.items():
        before, now = getattr(kept, name), getattr(model, name)
        before = derived.get(name) if before is None else before
        if before != now and not about.option.training_only:
            given = "without it" if before is None else f"with {as_given(about, before)}"
            found.append(
                Problem(
                    about.flag,
                    as_given(about, now),
                    f"the checkpoint was made {given}",
                    "give the value of the checkpoint, or load another checkpoint",
                )
            )
    return found


def changed_options(
    stored: Mapping[str, Any], current: Mapping[str, Any], keys: Collection[str]
) -> list[str]:
    """Return the options that differ from the options of the run that saved a checkpoint: ``["--lr
    0.1, was 0.2"]``.

    Args:
        stored, current: ``to_dict`` of the two runs. Options that only one of the two contains are
            skipped.
        keys: sections (``optim``) or single options (``training.seed``) to compare.
    """
    found = []
    for about, then, now in differing_options(stored, current, keys):
        before, after = (as_given(about, value) for value in (then, now))
        found.append(f"{about.flag} {after}, was {before}")
    return found


def restoring_words(
    stored: Mapping[str, Any], current: Mapping[str, Any], keys: Collection[str]
) -> str:
    """Return the cure that restores the options of a checkpoint, such as ``give --lr 0.2 and leave
    out --seed``.
    """
    differing = list(differing_options(stored, current, keys))
    by_default = [about.flag for about, then, _ in differing if then in (None, [], about.default)]
    given = [as_flag(about, then) for about, then, _ in differing if about.flag not in by_default]
    both = (("give", given), ("leave out", by_default))
    return " and ".join(f"{verb} {' '.join(flags)}" for verb, flags in both if flags)


def differing_options(
    stored: Mapping[str, Any], current: Mapping[str, Any], keys: Collection[str]
) -> Iterator[tuple[Field, Any, Any]]:
    """Yield each option of these sections and keys whose values differ, with the value in the
    checkpoint and the current value.
    """
    for about in every_field():
        then, now = (config.get(about.section, {}) for config in (stored, current))
        if (
            {about.section, about.key}.isdisjoint(keys)
            or about.name not in then
            or about.name not in now
        ):
            continue
        if then[about.name] != now[about.name]:
            yield about, then[about.name], now[about.name]


def as_given(about: Field, value: object) -> str:
    """Return a value as the user gives it with the flag, or ``not given`` for None. A switch is on or
    off; for a negated flag such as ``--disable-bias-linear``, on means that the field is False.
    """
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value != about.option.negated else "off"
    return (
        " ".join(map(str, value)) or "not given" if isinstance(value, (list, tuple)) else str(value)
    )


def _identity(model: ModelConfig) -> dict[str, Any]:
    held = section_to_dict(model)
    values = {}
    for described in section_fields(ModelConfig):
        name, expected = described.name, described.default
        if described.option.derived:
            expected = (
                unchecked(ModelConfig, {**held, name: None}).derive(lambda *names: True).get(name)
            )
        if not described.option.training_only and held[name] != expected:
            values[name] = held[name]
    return values


def _unknown_keys(data: Mapping[str, Any]) -> list[Problem]:
    found = []
    for name, section in data.items():
        if name not in SECTIONS:
            found.append(
                Problem(
                    name, "", "is not a section", did_you_mean(nearest(name, SECTIONS), "remove it")
                )
            )
        elif not isinstance(section, Mapping):
            found.append(
                Problem(name, repr(section), "must contain fields with values", "give a mapping")
            )
        else:
            known = [described.name for described in section_fields(SECTIONS[name])]
            for key in section:
                if key not in known:
                    cure = did_you_mean(nearest(key, known), "remove it")
                    found.append(Problem(f"{name}.{key}", "", f"is not an option of {name}", cure))
    return found
