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
    for described in every_field():
        conditions = described.option.conditions
        if conditions and _asked(run, described):
            missing = (each.reason for each in conditions if not each.holds(run, processes))
            if reason := next(missing, None):
                reasons[described.key] = reason
    return reasons


def sentence(idle: Mapping[str, str], run: RunConfig) -> str:
    """Return one line for the start of a run: ``no effect in this run: --rotary-base (...)``; empty
    if there are no options to list.
    """
    groups: dict[str, list[str]] = {}
    for described in every_field():
        if described.key in idle:
            value = getattr(getattr(run, described.section), described.name)
            groups.setdefault(idle[described.key], []).append(shown_flag(described, value))
    words = [f"{', '.join(flags)} ({reason})" for reason, flags in groups.items()]
    return f"no effect in this run: {'; '.join(words)}" if words else ""


def shown_flag(described: Field, value: Any) -> str:
    """Return the flag that sets a value: ``--no-load-optim`` for a switch that is off."""
    if described.kind.base is not bool:
        return described.flag
    return next(flag for flag, sets in described.switches.items() if sets is value)


def _asked(run: RunConfig, described: Field) -> bool:
    if not run.is_given(described.key):
        return False
    value, default = getattr(getattr(run, described.section), described.name), described.default
    if value in (None, (), "none", "auto") or (value == 0 and described.option.zero_is_off):
        return False
    if described.kind.base is bool:
        return bool(value != default)
    typed = run.origins is not None and run.origins[described.key].startswith(("flag", "@"))
    return typed or value != _derived(run, described)


def _derived(run: RunConfig, described: Field) -> Any:
    """Return the value that the option has when it is not given."""
    if not described.option.derived:
        return described.default
    section = getattr(run, described.section)
    others = {one.name: getattr(section, one.name) for one in section_fields(type(section))}
    return (
        unchecked(type(section), others | {described.name: None})
        .derive(lambda *names: True)
        .get(described.name)
    )
