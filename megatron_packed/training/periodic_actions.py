"""Actions between the steps of a run: when one is due, and what it may do to the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_packed.training.exit_codes import ExitCode


def after_every_step() -> bool:
    """Return True: the action is always due."""
    return True


@dataclass(frozen=True)
class PeriodicAction:
    """Something that may follow a step, alike on all ranks."""

    due: Callable[[], bool]
    run: Callable[[], ExitCode | None]
    """Return a reason to stop, or None."""
    pauses: bool = True
    """The metrics of the last step are read first, and the action's time counts for no step."""
    also_when_stopping: bool = False
    """Run after a step that gave a reason to stop, too."""
