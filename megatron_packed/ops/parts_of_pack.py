"""Parts of a pack whose scans pass states to each other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Pending(Protocol):
    """Rows that another part sends."""

    def wait(self) -> Tensor:
        """Make the current stream wait for the rows and for the own message, and return the rows."""


class MessagesOfParts(Protocol):
    """Messages between the parts of a pack."""

    def __call__(self, message_1X: Tensor, *, back: bool = False) -> Pending:
        """Start to send a row to all later parts, and to receive one from each earlier part.

        With ``back`` earlier and later parts change places.
        """


class PartOfPack(NamedTuple):
    """One of c consecutive parts of a pack. Each process has one of them."""

    number: int
    parts: int
    document_before_1: Tensor | None
    """``(1,)`` int32, the document of the token before the part; None for the first part."""
    start: MessagesOfParts
