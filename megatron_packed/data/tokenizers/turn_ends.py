"""Ends of answers in the text of a chat template.

A template prints the end of a turn after an answer, for example ``<|im_end|>``. Rendering a small
conversation shows which special tokens these are, so no table of names is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, NamedTuple

from megatron_packed.data.errors import BadLine
from megatron_packed.data.tokenizers.base import special_pattern
from megatron_packed.data.tokenizers.chat_template import Rendered

Messages = list[dict[str, Any]]

_QUESTION, _ANSWER = "Which colour is snow?", "Snow is white."
_QUESTION_2, _ANSWER_2 = "Which colour is coal?", "Coal is black."
_ONE_TURN: Messages = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
]
_TWO_TURNS: Messages = [
    *_ONE_TURN,
    {"role": "user", "content": _QUESTION_2},
    {"role": "assistant", "content": _ANSWER_2},
]
PROBES: tuple[Messages, ...] = (
    _TWO_TURNS,
    [{"role": "system", "content": "Be brief."}, *_TWO_TURNS],
    _ONE_TURN,
)
"""Conversations that are rendered to find the end of a turn; some templates refuse the first ones.
"""


class TurnEnd(NamedTuple):
    """End of a turn, which a template prints after an answer."""

    text: str
    """Text from the end of the answer to the last special token of the turn, without white space at
    its beginning."""
    token: str
    """Spelling of the last special token in ``text``."""


def find_turn_end(
    render: Callable[[Messages], str], special_tokens: Iterable[str]
) -> TurnEnd | None:
    """Find the end of a turn of a template.

    The end is the text that follows both an answer in the middle of a conversation and the last
    answer. If the two answers have no special token in common, the end is the special token that
    directly follows the last answer.

    Args:
        render: renders messages to text.
    Returns:
        The end of a turn; None if the template prints no special token after an answer.
    """
    special = [token for token in special_tokens if token]
    for messages in PROBES if special else ():
        try:
            text = render(messages)
        except BadLine:
            continue
        inner, found_2, rest = text.partition(_ANSWER)[2].partition(_QUESTION_2)
        last = rest.partition(_ANSWER_2)[2] if found_2 else inner
        if _ANSWER in text and (_ANSWER_2 in rest or messages is _ONE_TURN):
            pattern = special_pattern(special)
            return _end_of(pattern.split(inner) if found_2 else [], pattern.split(last))
    return None


def _end_of(inner: list[str], last: list[str]) -> TurnEnd | None:
    """Return the end of a turn, from the texts after two answers, divided at special tokens."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(inner, last)))
    parts = common // 2 * 2  # special tokens have odd places
    if not parts and len(last) > 1 and not last[0].strip():
        parts = 2
    return TurnEnd("".join(last[:parts]).lstrip(), last[parts - 1]) if parts else None


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

    def cut(self, rendered: Rendered) -> Rendered:
        """Move the end of every range to the end of its turn, and remove the text after the last
        range.

        No loss depends on the removed text. A conversation without a range is returned unchanged.
        """
        text, spans = rendered
        moved = [(start, self._end_of_span(text, start, stop)) for start, stop in spans]
        return Rendered(text[: moved[-1][1]], moved) if moved else rendered

    def extends(self, rendered: Rendered) -> bool:
        """Return True if a range lacks the end of its turn, so that `cut` adds the end."""
        return any(
            after > before
            for (_, before), (_, after) in zip(rendered.spans, self.cut(rendered).spans)
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
        found: list[tuple[int, str]] = []
        while True:
            while stop > start and text[stop - 1].isspace():
                stop -= 1
            last = (text[max(start, stop - length) : stop] for length in self._lengths)
            token = next((part for part in last if part in self._special), None)
            if token is None:
                return found
            found.append((stop, token))
            stop -= len(token)
