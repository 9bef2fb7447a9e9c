"""Differences from Megatron-LM's flags as data, for the tables of docs/coming_from_megatron.md."""

from __future__ import annotations

from megatron_packed.config.parser.help_text import default_text
from megatron_packed.config.run import every_field
from megatron_packed.config.table_rows import table_rows


def differences() -> list[tuple[str, str, str, str]]:
    """Return rows of (flag, Megatron-LM's behaviour, this project's behaviour, reason)."""
    rows = []
    for field in every_field():
        if field.option.megatron is not None:
            theirs, why = field.option.megatron
            rows.append((field.flag, theirs, default_text(field), why))
    return [*rows, *map(tuple, table_rows("megatron/differences.json"))]
