"""One line of ``--explain``."""

from __future__ import annotations

from typing import NamedTuple

ON, PARTIAL, OFF = "on", "partial", "off"


class Capability(NamedTuple):
    """A thing that a run has or lacks, with the reason and the next best setting."""

    name: str
    state: str
    """``on``, ``partial`` or ``off``."""
    reason: str
    advice: str = ""
    """The next best setting, where there is one."""
