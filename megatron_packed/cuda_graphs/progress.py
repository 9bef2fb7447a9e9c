"""How far tuning and captures have come, in words."""

from __future__ import annotations

import time
from collections.abc import Callable

_QUIET_SECONDS = 2.0
"""Tuning that is done sooner says nothing."""


def how_far(begun: float, done: int, total: int) -> str:
    """Of parts that take about equally long.

    Args:
        begun: ``time.perf_counter()`` at the start of the first part.

    Example:
        30 s for 2 of 3: ``"2 of 3, about 15 s left"``; at the end ``"3 of 3"``.
    """
    left = (time.perf_counter() - begun) / done * (total - done)
    return f"{done} of {total}" + (f", about {left:,.0f} s left" if done < total else "")


def say_tuned(
    say: Callable[[str], None], capacity: int, begun: float, done: int, total: int
) -> None:
    """Says that kernels are tuned for a capacity, if all that takes so long that one wonders."""
    if time.perf_counter() - begun > _QUIET_SECONDS:
        say(f"tuned kernels for up to {capacity} documents ({how_far(begun, done, total)})")
