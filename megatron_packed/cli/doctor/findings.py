"""Findings of an examination, line by line; nothing here imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class State(str, Enum):
    """Verdict of a line."""

    WORKS = "works"
    """Installed, and what could be tried here was."""
    FOUND = "found"
    """Installed and imported; there is nothing more to try on this machine."""
    ABSENT = "absent"
    """Not installed, and not needed: something else is used."""
    SLOW = "slower"
    """Something slower is used instead, or a limit of the machine will be felt."""
    BROKEN = "broken"
    """Installed, and fails. A problem."""
    WRONG = "wrong"
    """A stranger's package by a similar name, or none where one is required. A problem."""

    @property
    def problem(self) -> bool:
        """Return whether the exit code tells of it."""
        return self in (State.BROKEN, State.WRONG)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line."""

    name: str
    state: State
    found: str = ""
    """Version or value."""
    detail: str = ""
    """What was seen, as a sentence without its full stop."""
    instead: str = ""
    """What is used in its place."""
    fix: str = ""
    """One command; empty where nothing would be gained."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}
