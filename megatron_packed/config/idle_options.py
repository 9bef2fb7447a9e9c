"""Options that have no effect in a run, with the reasons, which a run prints at its start.

An option declares with ``only_if`` the conditions that it needs to have an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_packed.config.options import Field
from megatron_packed.config.run import RunConfig, every_field
from megatron_packed.config.section import section_fields, unchecked


def without_effect(run: RunConfig, processes: int) -> dict[str, str]:
    """Return the given options that have no effect, by key, each with the reason.

    An option on the command line or in an @file counts as given, unless its value requests nothing
    (``--eval-iters 0``). An option in a configuration file counts if its value is not the default,
    because the file that ``--print-config`` writes contains all options.
    """
    reasons = {}
    for field in every_field():
        conditions = field.option.conditions
        if conditions and _asked(run, field):
            missing = (each.reason for each in conditions if not each.holds(run, processes))
            if reason := next(missing, None):
                reasons[field.key] = reason
    return reasons


def sentence(idle: Mapping[str, str], run: RunConfig) -> str:
    """Return one line for the start of a run: ``no effect in this run: --rotary-base (...)``; empty
    if there are no options to list.
    """
    groups: dict[str, list[str]] = {}
    for field in every_field():
        if field.key in idle:
            value = run.value_of(field)
            groups.setdefault(idle[field.key], []).append(shown_flag(field, value))
    clauses = [f"{', '.join(flags)} ({reason})" for reason, flags in groups.items()]
    return f"no effect in this run: {'; '.join(clauses)}" if clauses else ""


def shown_flag(field: Field, value: Any) -> str:
    """Return the flag that sets a value: ``--no-load-optim`` for a switch that is off."""
    if field.kind.base is not bool:
        return field.flag
    return next(flag for flag, sets in field.switches.items() if sets is value)


def _asked(run: RunConfig, field: Field) -> bool:
    if not run.is_given(field.key):
        return False
    value, default = run.value_of(field), field.default
    if value in (None, (), "none", "auto") or (value == 0 and field.option.zero_is_off):
        return False
    if field.kind.base is bool:
        return bool(value != default)
    typed = run.origins is not None and run.origins[field.key].startswith(("flag", "@"))
    return typed or value != _derived(run, field)


def _derived(run: RunConfig, field: Field) -> Any:
    """Return the value that the option has when it is not given."""
    if not field.option.derived:
        return field.default
    section = getattr(run, field.section)
    others = {
        sibling.name: getattr(section, sibling.name) for sibling in section_fields(type(section))
    }
    return (
        unchecked(type(section), others | {field.name: None})
        .derive(lambda *names: True)
        .get(field.name)
    )
