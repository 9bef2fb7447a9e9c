"""Parts of a pack whose scans pass states to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor


class Pending(Protocol):
    """Result of a started collective."""

    def wait(self) -> Tensor:
        """Make the current stream wait for the result, and return it."""


class PartOfPack(NamedTuple):
    """One of c consecutive parts of a pack. Each process has one of them."""

    number: int
    document_before_1: Tensor | None
    """``(1,)`` int32, the document of the token before the part; None for the first part."""
    start_gather: Callable[[Tensor], Pending]
    """Starts an all-gather of ``(1, X)`` rows; the result is ``(c, X)`` in the order of parts."""
