"""Description of actions that run between steps: when they are due, and whether they pause steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_packed.config.exit_codes import ExitCode


def after_every_step() -> bool:
    return True


@dataclass(frozen=True)
class PeriodicAction:
    """Action that may follow a step, at the same steps on all ranks."""

    due: Callable[[], bool]
    run: Callable[[], ExitCode | None]
    """Function of the action; returns an exit code as a reason to stop, or None."""
    pauses: bool = True
    """True if the metrics of the last step are read before the action, and the action's time does not
    count as step time.
    """
    also_when_stopping: bool = False
    """True if the action also runs after a step that gave a reason to stop."""
