"""Ends of answers in rendered conversations: each trained answer ends with the end of its turn."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_packed.data.tokenizers.chat_template import Rendered, Spans
from megatron_packed.data.tokenizers.turn_markers import TurnEnd


class TurnCutter:
    """Cutter of rendered conversations: each trained answer ends with the end of its turn.

    Args:
        end: end of a turn; None if the template prints none.
        special_tokens: special tokens of the tokenizer.
    """

    def __init__(self, end: TurnEnd | None, special_tokens: Iterable[str]) -> None:
        self._end = end
        self._special = frozenset(special_tokens) - {""}
        # A vocabulary may have thousands of special tokens, but they have few different lengths.
        self._lengths = sorted(set(map(len, self._special)), reverse=True)
        self._follows = None if end is None else re.compile(r"\s*" + re.escape(end.text))

    def cut(self, text: str, spans: Spans) -> Rendered:
        """Move the end of every range to the end of its turn, and remove the text after the last
        range.

        No loss depends on the removed text. A conversation without a range is returned unchanged.
        """
        moved = [(start, self._end_of_span(text, start, stop)) for start, stop in spans]
        return Rendered(text[: moved[-1][1]] if moved else text, moved)

    def extends(self, text: str, spans: Spans) -> bool:
        """Return True if a range lacks the end of its turn, so that `cut` adds the end."""
        return any(
            new_end > old_end
            for (_, old_end), (_, new_end) in zip(spans, self.cut(text, spans).spans)
        )

    def _end_of_span(self, text: str, start: int, stop: int) -> int:
        """Return the character after the end of the turn whose trained range is ``start:stop``."""
        ends = self._special_before(text, start, stop)
        if self._end is not None:
            # The first end of the turn counts: a template may print the end of the document too.
            places = [place for place, token in ends if token == self._end.token]
            if places:
                return places[-1]
        follows = None if self._follows is None else self._follows.match(text, stop)
        if follows is not None:
            return follows.end()
        return ends[0][0] if ends else stop  # a call of a tool may have another end

    def _special_before(self, text: str, start: int, stop: int) -> list[tuple[int, str]]:
        """Return the special tokens at the end of ``text[start:stop]``, from the last one backwards.

        White space may separate the tokens. Each entry is the character after the token, and the
        token.
        """
        ends: list[tuple[int, str]] = []
        while True:
            while stop > start and text[stop - 1].isspace():
                stop -= 1
            last = (text[max(start, stop - length) : stop] for length in self._lengths)
            token = next((part for part in last if part in self._special), None)
            if token is None:
                return ends
            ends.append((stop, token))
            stop -= len(token)
