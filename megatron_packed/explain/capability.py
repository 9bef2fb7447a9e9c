"""One line of ``--explain``."""

from __future__ import annotations

from typing import NamedTuple

ON, PARTIAL, OFF = "on", "partial", "off"


class Capability(NamedTuple):
    """Feature of a run, whether the run has it, the reason, and a better setting."""

    name: str
    state: str
    """``on``, ``partial`` or ``off``."""
    reason: str
    advice: str = ""
    """Setting that would improve the state; empty if there is none."""
