"""Lines of text in a terminal, beside a column. Nothing here imports torch."""

from __future__ import annotations

import textwrap

WIDTH = 118
"""Largest number of characters of a line in a terminal."""


def beside(head: str, text: str) -> list[str]:
    """Return ``head`` and ``text`` to the right of it, in lines of at most `WIDTH` characters."""
    indent = " " * len(head)
    lines = textwrap.wrap(
        text, max(WIDTH - len(head), 40), break_long_words=False, break_on_hyphens=False
    )
    first, *others = lines or [""]
    return [(head + first).rstrip(), *(indent + line for line in others)]
