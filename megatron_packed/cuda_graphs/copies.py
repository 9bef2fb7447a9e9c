"""Copies that captured functions queue by themselves, on streams of their own, and what captures
must know of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Copies(Protocol):
    """Moves activations to the host and back (``memory/activation_offload.py``).

    [Note: copies between graphs]
    Work on another stream belongs to a graph if it begins and ends in it. So a forward graph copies
    to the host what it need not keep and ends when that is done, and the memory serves the graphs
    behind it. A backward graph copies back what the graph behind it will read, into memory of the
    pool that lives until then: the copy lies under its own computation. Whoever replays a backward
    graph alone (an audit; a neighbour that runs eagerly) first replays what should have been copied
    for it, which is a graph, too.
    """

    def prepare_for_capture(self) -> None:
        """Behind the warm-ups, before the first capture: host memory in use by now is that of
        graphs.
        """

    def graph_boundary(self) -> None:
        """Last in a graph of a module: the current stream waits for all copies."""

    def prefetched_copies(self) -> Callable[[], None] | None:
        """Copies all that is here before its turn from the host once more; None if nothing is."""

    def abandon(self) -> None:
        """A capture has failed, and nobody may wait for what was queued in it."""
