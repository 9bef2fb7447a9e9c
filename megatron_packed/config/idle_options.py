"""Options that have no effect in a run, with the reasons, which a run prints at its start.

An option declares with ``only_if`` the conditions that it needs to have an effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_packed.config.options import Field
from megatron_packed.config.run import RunConfig, every_field
from megatron_packed.config.section import value_when_not_given


def without_effect(run: RunConfig, processes: int) -> dict[str, str]:
    """Return the given options that have no effect, by key, each with the reason.

    An option on the command line or in an @file counts as given, unless its value requests nothing
    (``--eval-iters 0``). An option in a configuration file counts if its value is not the default,
    because the file that ``--print-config`` writes contains all options.
    """
    reasons = {}
    for field in every_field():
        conditions = field.option.conditions
        if conditions and _requests(run, field):
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
            flag = field.flag_for(run.value_of(field))
            groups.setdefault(idle[field.key], []).append(flag)
    clauses = [f"{', '.join(flags)} ({reason})" for reason, flags in groups.items()]
    return f"no effect in this run: {'; '.join(clauses)}" if clauses else ""


def _requests(run: RunConfig, field: Field) -> bool:
    if not run.is_given(field.key):
        return False
    value, default = run.value_of(field), field.default
    if value in (None, (), "none", "auto") or (value == 0 and field.option.zero_is_off):
        return False
    if field.kind.base is bool:
        return bool(value != default)
    typed = run.origins is not None and run.origins[field.key].startswith(("flag", "@"))
    return typed or value != value_when_not_given(getattr(run, field.section), field)
