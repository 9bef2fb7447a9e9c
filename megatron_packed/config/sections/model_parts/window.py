"""Values of ``--window-size`` and ``--window-attn-skip-freq``, in Megatron's spelling."""

from __future__ import annotations

import re
from functools import lru_cache

MOST_WINDOWED_LAYERS = 10_000
_TOKENS = re.compile(r"\s*(\d+|[][()+*,])")


def window_sides(text: str) -> tuple[int, int]:
    """Return the numbers of visible tokens before and after a token.

    Args:
        text: ``left,right``, also in parentheses.
    Raises:
        ValueError: the text has another form.
    Example:
        ``"4095,0"`` is ``(4095, 0)``.
    """
    match = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text.strip())
    if match is None:
        raise ValueError("has another form than left,right")
    return int(match[1]), int(match[2])


@lru_cache(maxsize=64)
def layers_with_window(text: str | None, layers: int) -> tuple[bool, ...]:
    """Return for each layer of a pattern whether it has the window.

    Args:
        text: ``N``: every N-th layer has no window. A list such as ``[1]*3+[0]``: layers with 0
            have no window. None: all layers have it.
        layers: number of layers of the pattern.
    Raises:
        ValueError: the text has another form, or a list has another number of entries.
    """
    if text is None:
        return (True,) * layers
    if text.strip().isdigit():
        every = int(text)
        if every == 0:
            raise ValueError("is 0, but every N-th layer needs N of at least 1")
        return tuple(number % every != 0 for number in range(1, layers + 1))
    entries = _List(text).entries()
    if len(entries) != layers:
        raise ValueError(f"has {len(entries)} entries, but the pattern has {layers} layers")
    return tuple(entry == 1 for entry in entries)


class _List:
    """Parser of sums and products of lists of 0 and 1. It runs no code of its text.

    ::

        sum = product {"+" product}
        product = item {"*" number} | number "*" item
        item = "[" [digit {"," digit}] "]" | "(" sum ")"
    """

    def __init__(self, text: str) -> None:
        self._words: list[str] = []
        place, text = 0, text.rstrip()
        while place < len(text):
            match = _TOKENS.match(text, place)
            if match is None:
                position = len(text) - len(text[place:].lstrip())
                raise ValueError(f"has {text[position]!r} at position {position + 1}")
            self._words.append(match[1])
            place = match.end()

    def entries(self) -> list[int]:
        """Return the entries of the complete text."""
        entries = self._sum()
        if self._words:
            raise ValueError(f"has {self._words[0]!r} after a complete list")
        return entries

    def _sum(self) -> list[int]:
        entries = self._product()
        while self._words[:1] == ["+"]:
            self._words.pop(0)
            entries += self._product()
        return entries

    def _product(self) -> list[int]:
        factor = self._number() if self._words[:1] and self._words[0].isdigit() else None
        if factor is not None:
            self._expect("*")
        entries = self._times(self._item(), 1 if factor is None else factor)
        while self._words[:1] == ["*"]:
            self._words.pop(0)
            entries = self._times(entries, self._number())
        return entries

    def _item(self) -> list[int]:
        if self._words[:1] == ["("]:
            self._words.pop(0)
            entries = self._sum()
            self._expect(")")
            return entries
        self._expect("[")
        entries = []
        while self._words[:1] not in ([], ["]"]):
            entries.append(self._number())
            if entries[-1] > 1:
                raise ValueError(f"has the entry {entries[-1]}, but entries are 0 and 1")
            if self._words[:1] == [","]:
                self._words.pop(0)
            elif self._words[:1] != ["]"]:
                break
        self._expect("]")
        return entries

    def _number(self) -> int:
        if not self._words or not self._words[0].isdigit():
            raise ValueError("lacks a number")
        return int(self._words.pop(0))

    def _expect(self, word: str) -> None:
        if self._words[:1] != [word]:
            raise ValueError(f"lacks {word!r}")
        self._words.pop(0)

    def _times(self, entries: list[int], factor: int) -> list[int]:
        if len(entries) * factor > MOST_WINDOWED_LAYERS:
            raise ValueError(f"has more than {MOST_WINDOWED_LAYERS:,} entries")
        return entries * factor
