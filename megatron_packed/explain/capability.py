"""Capabilities of a run or of a machine: one record for each, and their table in a terminal.

Nothing here imports torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH = 118
"""Largest number of characters of a line in a terminal."""
_VALUE_WIDTH = 24
"""Largest width of the column of values; a longer value shifts its own line only."""
ON, PARTIAL, OFF = "on", "partial", "off"
"""States of a capability of a run. Those of a machine are in `cli.doctor.findings`."""


class Capability(NamedTuple):
    """Feature of a run, or package, kernel or limit of a machine, with the reason of its state."""

    name: str
    state: str
    detail: str = ""
    """Reason or observation, as a sentence without its full stop."""
    fix: str = ""
    """Setting or command that improves the state; empty if there is none."""
    found: str = ""
    """Version or value."""
    instead: str = ""
    """Replacement that is used instead."""

    @property
    def text(self) -> str:
        """Reason and better setting."""
        return "; ".join(filter(None, (self.detail, self.fix)))


def row(name: str, *cases: tuple[Any, ...]) -> Capability:
    """Return the capability of the first case that holds.

    Args:
        cases: condition, state, reason, and a better setting if there is one.
    """
    return next(Capability(name, *fields) for holds, *fields in cases if holds)


def table(rows: Sequence[Capability]) -> list[str]:
    """Return the lines of a table: name, state, value, and in words the reason and a better setting."""
    width = max(len(row.name) for row in rows)
    value = min(max(len(row.found) for row in rows), _VALUE_WIDTH)
    lines = []
    for row in rows:
        head = f"{row.name.ljust(width)}  {row.state.ljust(len(PARTIAL))}  "
        head += f"{row.found.ljust(value)}  " * (value > 0)
        instead = row.instead and f"used instead: {row.instead}"
        lines += beside(head, ". ".join(filter(None, (row.detail, instead))))
        if row.fix:  # on a line of its own, from which a command is copied
            lines.append(f"{' ' * len(head)}-> {row.fix}")
    return lines


def beside(head: str, text: str) -> list[str]:
    """Return ``head`` and ``text`` to the right of it, in lines of at most `WIDTH` characters."""
    indent = " " * len(head)
    lines = textwrap.wrap(
        text, max(WIDTH - len(head), 40), break_long_words=False, break_on_hyphens=False
    )
    first, *others = lines or [""]
    return [(head + first).rstrip(), *(indent + line for line in others)]
