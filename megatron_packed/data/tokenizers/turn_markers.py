"""Special tokens with which a chat template begins and ends turns and documents, and ends of answers.

Rendering small conversations shows which special tokens these are, so no table of templates is
needed. The module needs no library, because the child process that renders templates imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from megatron_packed.data.errors import BadLine

Messages = list[dict[str, Any]]
Spans = Sequence[tuple[int, int]]
"""Character ranges of a text, in ascending order."""
Render = Callable[..., str]
"""Renderer of messages and, optionally, tools to text."""

DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eod|>")
"""Usual spellings of the end-of-document token."""
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
"""Variables of a tokenizer that name tokens of documents, not of their content."""
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
_SYSTEM = {"role": "system", "content": "Be brief."}
PROBES: tuple[Messages, ...] = (_TWO_TURNS, [_SYSTEM, *_TWO_TURNS], _ONE_TURN)
"""Conversations that are rendered to find the end of a turn; some templates refuse the first ones.
"""
_CALL_ID = "abcdefghi"  # some templates accept only identifiers of nine letters
_FUNCTION = "colour_of"
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": _FUNCTION, "arguments": {"thing": "snow"}},
}
_CALLING: Messages = [
    _ONE_TURN[0],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
_RESULT = {"role": "tool", "name": _FUNCTION, "tool_call_id": _CALL_ID, "content": "white"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _FUNCTION,
            "description": "Return the colour of a thing.",
            "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
        },
    }
]


_THOUGHT = "Snow reflects all light."
_OF_THOUGHTS = re.compile("think|thought|reason", re.IGNORECASE)
"""Names of tokens around thoughts. A prompt may begin a thought, which no rendering tells apart from a turn.
"""
_LONGEST_HEADER = 24
"""Most characters between two special tokens of a header; longer text is the prose of a template."""


class TurnEnd(NamedTuple):
    """End of a turn, which a template prints after an answer."""

    text: str
    """Text from the end of the answer to the last special token of the turn, without white space at
    its beginning."""
    token: str
    """Spelling of the last special token in ``text``."""


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

    def cut(self, text: str, spans: Spans) -> tuple[str, Spans]:
        """Move the end of every range to the end of its turn, and remove the text after the last
        range.

        No loss depends on the removed text. A conversation without a range is returned unchanged.
        """
        moved = [(start, self._end_of_span(text, start, stop)) for start, stop in spans]
        return text[: moved[-1][1]] if moved else text, moved

    def extends(self, text: str, spans: Spans) -> bool:
        """Return True if a range lacks the end of its turn, so that `cut` adds the end."""
        return any(
            new_end > old_end for (_, old_end), (_, new_end) in zip(spans, self.cut(text, spans)[1])
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


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose ``split`` divides a text at the given tokens.

    The text between tokens has even places in the result, the tokens have odd places. If several
    tokens match, the longest one is taken.
    """
    return re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of elements at the beginning that two sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


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
        inner, found_2, remainder = text.partition(_ANSWER)[2].partition(_QUESTION_2)
        last = remainder.partition(_ANSWER_2)[2] if found_2 else inner
        if _ANSWER in text and (_ANSWER_2 in remainder or messages is _ONE_TURN):
            pattern = special_pattern(special)
            return _end_of(pattern.split(inner) if found_2 else [], pattern.split(last))
    return None


def _end_of(inner: list[str], last: list[str]) -> TurnEnd | None:
    """Return the end of a turn, from the texts after two answers, divided at special tokens."""
    parts = common_length(inner, last) // 2 * 2  # special tokens have odd places
    if not parts and len(last) > 1 and not last[0].strip():
        parts = 2
    return TurnEnd("".join(last[:parts]).lstrip(), last[parts - 1]) if parts else None


def find_turn_markers(
    render: Render, prompt: Render, special_tokens: Iterable[str], variables: Mapping[str, Any]
) -> frozenset[str]:
    """Find the special tokens with which a template begins and ends turns and documents.

    Tokens that the template prints inside of an answer, for example ``<think>`` and
    ``<tool_call>``, are no turn markers. Neither are tokens in the prose of a default system
    message, which may explain them.

    Args:
        render: renders messages, and tools if given, to text.
        prompt: renders messages, and tools if given, to the text after which an answer is
            generated.
        special_tokens: spellings of the special tokens of the tokenizer.
        variables: variables of the template, for example ``eos_token``.
    """
    special = frozenset(token for token in special_tokens if token)
    if not special:
        return special
    named = {variables[name] for name in _NAMED if name in variables}
    markers = special & {*named, *DOCUMENT_ENDS}
    pattern = special_pattern(special)
    for tokens in (*_of_questions(render, pattern, None), *_of_answers(render, pattern, None)):
        markers |= set(tokens)
    tags = _tags(render, pattern) - markers
    # A template may explain the tokens of a call where it defines the tools.
    for tokens in (
        *_of_headers(render, prompt, pattern),
        *_of_questions(render, pattern, _TOOLS),
        *_of_answers(render, pattern, _TOOLS),
    ):
        markers |= set(tokens) - tags
    return frozenset(token for token in markers if not _OF_THOUGHTS.search(token))


def _of_questions(
    render: Render, pattern: re.Pattern[str], tools: list[Any] | None
) -> Iterator[Iterable[str]]:
    """Yield the special tokens around the contents of system and user messages."""
    for messages in ([_ONE_TURN[0]], [_SYSTEM, _ONE_TURN[0]]):
        with suppress(BadLine):
            remainder = render(messages, tools)
            for message in messages:
                prefix, separator, remainder = remainder.partition(message["content"])
                if not separator:
                    return
                yield _outside_prose(prefix, pattern)
            yield _outside_prose(remainder, pattern)


def _of_answers(
    render: Render, pattern: re.Pattern[str], tools: list[Any] | None
) -> Iterator[Iterable[str]]:
    """Yield the special tokens that follow answers, and those of the result of a tool."""
    for messages in PROBES:
        with suppress(BadLine):
            text = render(messages, tools)
            inner, found_2, remainder = text.partition(_ANSWER)[2].partition(_QUESTION_2)
            yield _tokens(inner, pattern)
            yield _tokens(remainder.partition(_ANSWER_2)[2] if found_2 else "", pattern)
    with suppress(BadLine):
        # After a plain answer, so that no token of a call is credited to the result.
        after = render([*_ONE_TURN, _RESULT], tools).partition(_ANSWER)[2]
        if _RESULT["content"] in after:
            yield _tokens(after, pattern)
            return
    with suppress(BadLine):
        called, answered = render(_CALLING, tools), render([*_CALLING, _RESULT], tools)
        yield _added_tokens(called, answered, pattern)


def _of_headers(
    render: Render, prompt: Render, pattern: re.Pattern[str]
) -> Iterator[Iterable[str]]:
    """Yield the special tokens of the header of an answer; a thought may begin in it."""
    for tools in (None, _TOOLS):
        with suppress(BadLine):
            question = [_ONE_TURN[0]]
            yield _added_tokens(render(question, tools), prompt(question, tools), pattern)


def _tags(render: Render, pattern: re.Pattern[str]) -> set[str]:
    """Return the special tokens directly before and after a thought, and the name of a call."""
    thinking = {**_ONE_TURN[1], **dict.fromkeys(("reasoning_content", "thinking"), _THOUGHT)}
    tags: set[str] = set()
    for messages, content in (
        ([_ONE_TURN[0], thinking], _THOUGHT),
        ([*_CALLING, _RESULT], _FUNCTION),
    ):
        with suppress(BadLine):
            parts = pattern.split(render(messages))
            for at, part in enumerate(parts):
                if not at % 2 and content in part:
                    tags |= {*parts[max(at - 1, 0) : at], *parts[at + 1 : at + 2]}
    return tags


def _tokens(text: str, pattern: re.Pattern[str]) -> list[str]:
    return pattern.split(text)[1::2]


def _outside_prose(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the special tokens at the beginning and at the end of a text, up to its prose."""
    parts = pattern.split(text)
    tokens: list[str] = []
    for ordered in (parts, parts[::-1]):
        for at, part in enumerate(ordered):
            if at % 2:
                tokens.append(part)
            elif len(part.strip()) > _LONGEST_HEADER:
                break
    return tokens


def _added_tokens(base: str, after: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the special tokens of ``after`` from the first part that differs from ``base``."""
    parts = pattern.split(after)
    same = common_length(pattern.split(base), parts)
    return [token for at, token in enumerate(parts) if at % 2 and at >= same]
