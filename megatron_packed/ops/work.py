"""Floating-point operations of an op, for documents of any lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OpWork:
    """Operations of one call of an op in the forward pass, apart from products with weights.

    It contains products, and no elementwise work.
    """

    per_token: int = 0
    per_visible_pair: int = 0
    """Operations for a token and each token that it sees in its document."""
    window: int | None = None
    """Number of tokens that a token sees; None for all earlier tokens and itself."""
    chunk: int = 1
    """Number of tokens in which a document is divided."""
    per_pair_in_chunk: int = 0
    per_chunk: int = 0


NO_WORK = OpWork()
