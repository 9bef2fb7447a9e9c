"""Megatron-LM's flags that are refused by name, from ``refused_flags.json``."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_packed.config.table_rows import table_rows


@dataclass(frozen=True)
class RefusedFlags:
    """Flags that are refused for the same reason."""

    reason: str
    nearest: str
    flags: tuple[str, ...]


REFUSED = tuple(
    RefusedFlags(row["reason"], row["nearest"], tuple(row["flags"]))
    for row in table_rows("megatron/refused_flags.json")
)
REFUSAL_OF: dict[str, RefusedFlags] = {flag: group for group in REFUSED for flag in group.flags}
