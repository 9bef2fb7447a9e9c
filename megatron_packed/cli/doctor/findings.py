"""Findings of ``megatron-packed doctor``, one per line of its report. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass
from enum import Enum
from typing import Any


class State(str, Enum):
    """Verdict of a finding."""

    WORKS = "works"
    """Installed, and everything that could be tested on this machine works."""
    FOUND = "found"
    """Installed and imported; nothing more can be tested on this machine."""
    ABSENT = "absent"
    """Not installed, but not required: something else is used instead."""
    SLOW = "slower"
    """Something slower is used instead, or a limit of the machine will slow runs down."""
    BROKEN = "broken"
    """Installed, but fails. Counts as a problem."""
    WRONG = "wrong"
    """An unrelated package with a similar name is installed, a package is too old, or a required
    package is missing. Counts as a problem.
    """

    @property
    def problem(self) -> bool:
        """Return whether the state counts as a problem, which sets the exit code to 1."""
        return self in (State.BROKEN, State.WRONG)


@dataclass(frozen=True)
class Finding:
    """Line of the report."""

    name: str
    state: State
    found: str = ""
    """Version or value."""
    _: KW_ONLY
    detail: str = ""
    """Observation, as a sentence without its full stop."""
    instead: str = ""
    """Replacement that is used instead."""
    fix: str = ""
    """Command that fixes or improves the state; empty if it would gain nothing."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}
