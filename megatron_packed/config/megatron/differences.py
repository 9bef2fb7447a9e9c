"""Differences from Megatron-LM's flags as data, for the tables of docs/coming_from_megatron.md."""

from __future__ import annotations

from megatron_packed.config.flag_rows import flag_rows
from megatron_packed.config.parser.help_text import default_text
from megatron_packed.config.run import every_field


def differences() -> list[tuple[str, str, str, str]]:
    """Return rows of (flag, Megatron-LM's behaviour, this project's behaviour, reason)."""
    rows = []
    for described in every_field():
        if described.option.megatron is not None:
            theirs, why = described.option.megatron
            rows.append((described.flag, theirs, default_text(described), why))
    return [*rows, *map(tuple, flag_rows("megatron/differences.json"))]
