"""Shortening of over-long conversations and prompts (``--overlong-policy truncate_prompt``).

A shortened conversation keeps its last answer and the question of this answer. It loses, in this
order and only as much as needed:

1. whole earlier turns. The chat template renders the system message, the tool definitions and the
   latest turns that fit.
2. tokens of the last turn, if this turn is too long by itself. Its passages are the contents of its
   user and tool messages before the last answer. The longest passages are lowered to a common
   length. Each loses its middle, and keeps as many tokens of its beginning as of its end.
3. the middle of the system message.
4. the earliest messages of the last turn after the question: calls of tools with their results.
5. the end of the answer and of its turn.

The question is never cut. It is the instruction of a line with ``instruction``; only the ``input``
after it is a passage. In other conversations the question is the end of the last user message:
its last 100 to 200 characters, from the beginning of a sentence or of a word. Messages of the
assistant that stay, and all text that the template prints around messages, are never cut either. If
they and the question leave no room for one token of the answer, the document is left out
(``question_too_long``).

A prompt with a completion has one passage: the prompt, without the question at its end. It loses
its middle, then the completion loses its end.

A passage is found by rendering the conversation with another text in its place, so that any
template can be used. If the template refuses the other text, or prints it in another way than it
stands or as JSON, the passage is not cut.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.line_schema import (
    Conversation,
    PromptCompletion,
)
from megatron_packed.data.sources.strict_json import BROKEN
from megatron_packed.data.sources.token_lines import TokenSequence
from megatron_packed.data.tokenizers.chat_format import TextPiece, joined_text
from megatron_packed.data.tokenizers.encode import (
    Cut,
    EncodedDocument,
    KnownTokens,
    SampleEncoder,
    TextDocument,
    encode_pieces,
    encode_with_borders,
)
from megatron_packed.data.tokenizers.turn_markers import Messages
from megatron_packed.packed.array_types import Int64Array

_NEAR_MISS = 8
"""Largest error, in tokens, of an estimate that is based on an exact count of other text."""
_TRIES = 4
"""Number of renderings whose turns are chosen by estimates; later ones use bisection."""
_QUESTION = 200
"""Largest number of characters at the end of a message that are never cut. They are about two
English sentences, and 50 tokens are little even of a limit of 512. At least half of them stay,
because the last sentence may be short, like "Thanks!"."""
_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*\s+|[。！？]["'”’」』）]*\s*|\n\s*""")
_WORD_END = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True)
class ShorteningEncoder(SampleEncoder):
    """Encoder that shortens documents of more than ``max_tokens`` tokens.

    Other documents take no additional time.
    """

    max_tokens: int
    """Largest number of tokens of a document. At least 2: a target and the token before it."""
    shortens: ClassVar[bool] = True

    def _finished(
        self, document: EncodedDocument | BadLine, part: TextDocument, cache: KnownTokens | None
    ) -> EncodedDocument | BadLine | None:
        """Return a complete document of at most `max_tokens` tokens; None if its question is too long.

        Documents whose tokens are given have no known turns and stay as they are.
        """
        finished = super()._finished(document, part, cache)
        if not isinstance(finished, EncodedDocument) or len(finished.ids) <= self.max_tokens:
            return finished
        if isinstance(part.sample, TokenSequence):
            return finished
        assert cache is not None
        try:
            return _Shortener(self, part, finished, cache).shortened()
        except BadLine as bad_line:
            return None if bad_line.reason == "question_too_long" else bad_line

    def rendered(self, talk: Conversation, cache: KnownTokens) -> EncodedDocument:
        """Render and encode a conversation of any length, without shortening it.

        Raises:
            BadLine: the conversation cannot be rendered or encoded, or has no target.
        """
        [document] = encode_pieces(self.tokenizer, [self.chat.pieces(talk)], cache)
        return self.finished(document, talk)

    def finished(self, document: EncodedDocument | BadLine, talk: Conversation) -> EncodedDocument:
        """Add the end-of-document token if needed.

        Raises:
            BadLine: the document is unusable.
        """
        outcome = document if isinstance(document, BadLine) else self._finish(document, talk)
        if isinstance(outcome, BadLine):
            raise outcome
        return outcome


class _Turns(NamedTuple):
    """Turns of a conversation, as numbers of messages. A turn begins at a message of the user.

    The last answer is the last trained assistant message.
    """

    head: int
    """Number of leading system messages."""
    starts: list[int]
    """First message of each turn, up to the turn of the last answer."""
    last: int
    """Message number of the last answer."""
    end: int
    """Number of the first message after the turn of the last answer."""
    total: int
    """Number of all turns, including those after the last answer."""

    @classmethod
    def from_messages(cls, messages: Sequence[dict[str, Any]]) -> _Turns:
        roles = [message["role"] for message in messages]
        head = next((number for number, role in enumerate(roles) if role != "system"), len(roles))
        answers = [number for number, role in enumerate(roles) if role == "assistant"]
        trained = [number for number in answers if messages[number].get("train", True)]
        last = (trained or answers)[-1]
        starts = [
            head,
            *(number for number in range(head + 1, len(roles)) if roles[number] == "user"),
        ]
        end = next((start for start in starts if start > last), len(roles))
        return cls(head, [start for start in starts if start <= last], last, end, len(starts))


class _Passage(NamedTuple):
    """Characters ``start:stop`` of the content of a message. Tokens of their middle may be cut."""

    message: int
    start: int
    stop: int
    kind: int
    """One of `_OTHER`, `_ASKED` and `_SYSTEM`."""


_OTHER, _ASKED, _SYSTEM = range(3)
"""Kinds of passages: other messages before the answer, the last user message, system messages."""


class _Layout(NamedTuple):
    """A document, and the tokens of it that may be cut."""

    document: EncodedDocument
    answer: int
    """Token at which the last answer begins."""
    spans: list[tuple[int, int, int]]
    """First token, token after the last one, and kind of each passage that was found."""

    @property
    def least(self) -> int:
        """Number of tokens before the answer that are never cut."""
        return self.answer - sum(stop - start for start, stop, _ in self.spans)

    @property
    def least_with_answer(self) -> int:
        return self.least + len(self.document.ids) - self.answer


@dataclass(frozen=True)
class _Shortener:
    """Shortening of one document."""

    _encoder: ShorteningEncoder
    _part: TextDocument
    _document: EncodedDocument
    _cache: KnownTokens

    @property
    def _limit(self) -> int:
        return self._encoder.max_tokens

    def shortened(self) -> EncodedDocument:
        """Return the shortened document, with the record of its shortening.

        Raises:
            BadLine: the question is too long.
        """
        sample = self._part.sample
        if isinstance(sample, Conversation):
            return self._conversation(sample, _Turns.from_messages(sample.messages))
        # plain text is not shortened, because all of its tokens are trained
        assert isinstance(sample, PromptCompletion), sample
        return self._fitted(self._prompt_layout())

    def _conversation(self, talk: Conversation, turns: _Turns) -> EncodedDocument:
        first, lost = turns.starts[-1], turns.total - 1
        try:
            count, document = self._latest_turns(talk, turns)
            if document is not None:
                return self._recorded(document, turns=turns.total - count)
        except (
            BadLine
        ):  # the template raises an error for fewer turns: keep all turns, and cut tokens
            first, lost = turns.head, 0
        for start, turns_lost in ((first, lost), (turns.head, 0)):
            messages = [*talk.messages[: turns.head], *talk.messages[start : turns.last + 1]]
            try:
                layout = self._fewest_messages(talk._replace(messages=messages))
            except BadLine:
                continue
            return self._fitted(layout, turns_lost)
        layout = self._layout(talk, turns.last)
        if turns.last + 1 < len(talk.messages):
            layout = layout._replace(document=_without_what_follows(layout.document))
        return self._fitted(layout, turns.total - len(turns.starts))

    def _latest_turns(
        self, talk: Conversation, turns: _Turns
    ) -> tuple[int, EncodedDocument | None]:
        """Render the system message and the largest number of latest turns that fit.

        The turns end with the turn of the last answer. If the estimates are exact, one rendering is
        enough, or two if the next larger number of turns is estimated to be nearly within the
        limit.

        Returns:
            The number of turns and the document, or ``(0, None)`` if no turn fits.
        Raises:
            BadLine: the template raises an error for a conversation with fewer turns.
        """
        messages, head = talk.messages, talk.messages[: turns.head]
        places, exact = self._places(messages, turns.starts)
        size = len(self._document.ids)
        sizes = [
            size - place for place in reversed(places)
        ]  # estimated sizes with the last 1, 2, ... turns; all have about the same error.
        # If no turn follows the last answer, the document with all turns is known to be too long.
        low, high = 0, len(turns.starts) + (turns.end < len(messages))
        fitting, tries, room = None, 0, self._limit + 0.0
        while high - low > 1:
            at = bisect_right(sizes, room) if tries < _TRIES else (low + high) // 2
            if exact and fitting is not None and at <= low and sizes[low] > room + _NEAR_MISS:
                break
            at = min(max(at, low + 1), high - 1)
            shorter = talk._replace(messages=[*head, *messages[turns.starts[-at] : turns.end]])
            document = self._encoder.rendered(shorter, self._cache)
            room = self._limit - (len(document.ids) - sizes[at - 1])
            tries += 1
            if len(document.ids) <= self._limit:
                low, fitting = at, document
            else:
                high = at
        return low, fitting

    def _places(self, messages: Messages, starts: list[int]) -> tuple[list[float], bool]:
        """Estimate the token of the complete document at which each turn begins.

        The ends of the answers are exact if the targets have one run of tokens for each trained
        answer. The beginnings of turns are interpolated between them.

        Returns:
            The estimated places, and True if the ends of all answers are exact.
        """
        answers = [
            number + 1 for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        trained = [number for number in answers if messages[number - 1].get("train", True)]
        targets = self._document.targets
        ends = (
            np.flatnonzero(targets[:-1] > targets[1:]) + 1
        ).tolist()  # the list lacks a run of targets that reaches the end of the document
        seen = len(trained) - len(ends) in (0, 1)
        numbers, tokens = zip(
            (0, 0), *zip(trained, ends if seen else ()), (len(messages), len(targets))
        )
        places: list[float] = np.interp(starts, numbers, tokens).tolist()
        return places, seen and trained == answers

    # -- the tokens that may be cut

    def _fewest_messages(self, talk: Conversation) -> _Layout:
        """Remove the earliest messages after the question until the last answer fits.

        A message of the assistant is removed together with the results of tools that follow it.
        The last message of the conversation is the last answer.

        Raises:
            BadLine: the template raises an error for the conversation with all of its messages.
        """
        messages, last = talk.messages, len(talk.messages) - 1
        layout = self._layout(talk, last)
        question = _last_user(messages, last)
        steps = [n for n in range(question + 1, last) if messages[n]["role"] == "assistant"]
        if layout.least_with_answer <= self._limit or not steps:
            return layout
        layouts = {0: layout}

        def fits(removed: int) -> bool:
            after = [*steps, last][removed]
            shorter = [*messages[: steps[0]], *messages[after:]]
            layouts[removed] = self._layout(talk._replace(messages=shorter), len(shorter) - 1)
            return layouts[removed].least_with_answer <= self._limit

        with suppress(BadLine):  # the template may refuse the shorter turn
            removed = bisect_left(range(1, len(steps)), True, key=fits) + 1
            if removed not in layouts:
                fits(removed)
            return layouts[removed]
        return layout

    def _layout(self, talk: Conversation, last: int) -> _Layout:
        """Encode a conversation, and find its last answer and the passages of its prompt.

        Args:
            last: number of the message that is the last answer.
        Raises:
            BadLine: the template raises an error for the conversation.
        """
        encoder = self._encoder
        pieces = self._part.pieces if talk == self._part.sample else encoder.chat.pieces(talk)
        answer, prompt_text = self._answer(talk, last, pieces)

        def render(messages: Messages) -> str:
            if prompt_text is not None:
                return joined_text(encoder.chat.prompt(messages[:last], talk.tools))
            return joined_text(encoder.chat.pieces(talk._replace(messages=messages)))

        text = joined_text(pieces) if prompt_text is None else prompt_text
        places = _places_of(_passages(talk, last), talk.messages, text, render)
        places = [place for place in places if place[1] <= answer]
        borders = [border for start, stop, _ in places for border in (start, stop)]
        document, tokens = encode_with_borders(
            encoder.tokenizer, pieces, [*borders, answer], self._cache
        )
        spans = self._spans(tokens, [kind for _, _, kind in places])
        return _Layout(encoder.finished(document, talk), tokens[-1], spans)

    def _prompt_layout(self) -> _Layout:
        """Find the question at the end of a prompt, and the completion, in the given tokens."""
        tokenizer, document = self._encoder.tokenizer, self._document
        answer = int(document.targets.argmax())
        start = min(len(tokenizer.prefix_ids), answer)
        prompt = joined_text([piece for piece in self._part.pieces if not piece.train])
        question = prompt[_question_start(prompt) :]
        # After other text the question may have a few more tokens than alone.
        most = len(tokenizer.encode(question)) + _NEAR_MISS
        first = max(answer - most, start)
        while first < answer:
            between = tokenizer.decode(document.ids[first + 1 : answer])
            if not between.rstrip().endswith(question.strip()):
                break
            first += 1
        return _Layout(document, answer, [(start, first, _ASKED)])

    def _spans(self, tokens: list[int], kinds: list[int]) -> list[tuple[int, int, int]]:
        """Return the spans of a `_Layout`, from the tokens at the borders of each passage."""
        # A tokenizer that does not split cleanly may make one token of the characters before and
        # after the beginning of a passage. This token belongs to no passage.
        across = not self._encoder.tokenizer.splits_cleanly
        return [
            (min(start + across, stop), stop, kind)
            for start, stop, kind in zip(tokens[::2], tokens[1::2], kinds)
        ]

    def _answer(
        self, talk: Conversation, last: int, pieces: list[TextPiece]
    ) -> tuple[int, str | None]:
        """Find the character at which the text of the last answer begins, and the prompt before it.

        Returns:
            The character, and the text of the prompt; None if the conversation does not begin with
            this text.
        """
        history = talk.messages[:last]
        with suppress(BadLine):
            prompt_text = joined_text(self._encoder.chat.prompt(history, talk.tools))
            if joined_text(pieces).startswith(prompt_text) and (prompt_text or not history):
                return _trained_from(pieces, len(prompt_text)), prompt_text
        at = len(joined_text(pieces))
        if not all(piece.train for piece in pieces):  # the last trained piece is the answer
            trained = max(number for number, piece in enumerate(pieces) if piece.train)
            at = len(joined_text(pieces[:trained]))
        return at, None

    # -- the cut

    def _fitted(self, layout: _Layout, turns_lost: int = 0) -> EncodedDocument:
        """Cut a document to the limit, in the order that the module's docstring lists.

        Args:
            turns_lost: number of turns that were removed before.
        Raises:
            BadLine: no token of the answer fits.
        """
        document, answer, spans = layout
        size, least = len(document.ids), layout.least
        of_answer = size - answer
        # The first token of a document is no target, so a token before the answer has to stay.
        room = max(self._limit - least - of_answer, int(least == 0 < answer))
        lengths = np.array([stop - start for start, stop, _ in spans], np.int64)
        system = np.array([kind == _SYSTEM for _, _, kind in spans], np.bool_)
        lowered = lengths.copy()
        lowered[~system] = _lowered(lengths[~system], room - int(lengths[system].sum()))
        lowered[system] = _lowered(lengths[system], room - int(lowered[~system].sum()))
        of_answer = min(of_answer, self._limit - least - int(lowered.sum()))
        stays = np.arange(size) < answer + of_answer
        question = False
        for (start, stop, kind), length in zip(spans, lowered.tolist()):
            stays[start + (length + 1) // 2 : stop - length // 2] = False
            question |= kind == _ASKED and length < stop - start
        targets = document.targets[stays]
        targets[:1] = 0
        if of_answer < 1 or not targets.any():
            raise BadLine(
                "question_too_long",
                f"{least} tokens of the prompt are never cut, and a document has at most {self._limit}",
            )
        shorter = EncodedDocument(document.ids[stays], targets)
        return self._recorded(
            shorter,
            turns_lost,
            inside=len(shorter.ids) < size or not turns_lost,
            question=question,
            answer=answer + of_answer < size,
        )

    def _recorded(
        self,
        document: EncodedDocument,
        turns: int = 0,
        inside: bool = False,
        question: bool = False,
        answer: bool = False,
    ) -> EncodedDocument:
        source = self._document
        cut = Cut(source.ids.size, int(source.targets.sum()), turns, inside, answer, question)
        return document._replace(cut=cut)


# ------------------------------------------------------------------------------------------------
# passages of a prompt


def _passages(talk: Conversation, last: int) -> list[_Passage]:
    """Return the passages of the prompt of the message ``last``. Empty passages are left out."""
    question = _last_user(talk.messages, last)
    passages = []
    for number, message in enumerate(talk.messages[:last]):
        if message["role"] == "assistant":
            continue
        content, instruction = message["content"], talk.instruction
        start, stop = 0, len(content)
        kind = _SYSTEM if message["role"] == "system" else _OTHER
        if number == question:
            kind = _ASKED
            if instruction is not None and content.startswith(instruction):
                start = stop - len(content[len(instruction) :].lstrip())
            else:
                stop = _question_start(content)
        if start < stop:
            passages.append(_Passage(number, start, stop, kind))
    return passages


def _last_user(messages: Sequence[dict[str, Any]], last: int) -> int:
    """Return the number of the last user message before the message ``last``; -1 without one."""
    return max((n for n in range(last) if messages[n]["role"] == "user"), default=-1)


def _question_start(text: str) -> int:
    """Return the first character of the end of a text that is never cut.

    The end has at most `_QUESTION` characters. It begins with a sentence if it then has at least
    half of them, else with a word if there is one.
    """
    stop = len(text.rstrip())
    first = max(stop - _QUESTION, 0)
    if first == 0:
        return 0
    for end, latest in ((_SENTENCE_END, stop - _QUESTION // 2), (_WORD_END, stop)):
        match = end.search(text, first, latest)
        if match is not None:
            # Tokens of a word begin with the space before it, but with no line end.
            return match.end() - (text[match.end() - 1] == " ")
    return first


def _places_of(
    passages: list[_Passage],
    messages: Messages,
    text: str,
    render: Callable[[Messages], str],
) -> list[tuple[int, int, int]]:
    """Find the passages in a rendered text.

    The messages are rendered again with a name in place of each passage. The text between the names
    is then the text between the passages. If it is not, for example because the template reads a
    message, or a message quotes the template, then each passage is looked for alone.

    Args:
        text: the text of ``messages``.
        render: renders messages to text.
    Returns:
        First character, character after the last one, and kind of each passage that was found, in the
        order of the text.
    """
    if not passages:
        return []
    prefix = next(name for name in map("part{}of".format, count()) if name not in text)
    changed = list(messages)
    for number, passage in enumerate(passages):
        content = messages[passage.message]["content"]
        content = f"{content[: passage.start]}{prefix}{number}x{content[passage.stop :]}"
        changed[passage.message] = {**messages[passage.message], "content": content}
    places: list[tuple[int, int, int]] = []
    with suppress(BadLine):
        segments = re.split(f"{prefix}([0-9]+)x", render(changed))
        order = [passages[int(number)] for number in segments[1::2]]
        if sorted(order) == sorted(passages):
            places = _between(segments[::2], order, messages, text)
    if not places and len(passages) > 1:
        alone = (_places_of([passage], messages, text, render) for passage in passages)
        places = sorted(place for places_alone in alone for place in places_alone)
    return places


def _between(
    segments: Sequence[str], passages: list[_Passage], messages: Messages, text: str
) -> list[tuple[int, int, int]]:
    """Find the passages between the segments of a text; return an empty list if they are not there."""
    places: list[tuple[int, int, int]] = []
    at, ends = len(segments[0]), len(text) - len(segments[-1])
    if not (text.startswith(segments[0]) and text.endswith(segments[-1])):
        return []
    for number, passage in enumerate(passages):
        last = number == len(passages) - 1
        stop = ends if last else text.find(segments[number + 1], at)
        content = messages[passage.message]["content"][passage.start : passage.stop]
        if stop < at or not _is_printed(text[at:stop], content):
            return []
        places.append((at, stop, passage.kind))
        at = stop + len(segments[number + 1])
    return places


def _is_printed(text: str, content: str) -> bool:
    """Return True if a template printed ``content`` as ``text``.

    A template may trim the content, or print it as JSON.
    """
    text = text.replace(BROKEN, "").strip()
    return text == content.strip() or any(
        text == json.dumps(form, ensure_ascii=ascii_only)[1:-1].strip()
        for form in (content, content.strip())
        for ascii_only in (False, True)
    )


def _lowered(lengths: Int64Array, room: int) -> Int64Array:
    """Lower the largest lengths to a common one, so that their sum is at most ``room``.

    Lengths that are not an exact share are 1 larger from the first on, so that the room is filled.
    A negative room counts as 0.
    """
    room = max(room, 0)
    if lengths.sum() <= room:
        return lengths
    levels = range(1, int(lengths.max()) + 1)
    level = bisect_right(levels, room, key=lambda level: np.minimum(lengths, level).sum())
    lowered = np.minimum(lengths, level)
    lowered[np.flatnonzero(lengths > level)[: room - int(lowered.sum())]] += 1
    return lowered


def _without_what_follows(document: EncodedDocument) -> EncodedDocument:
    """Remove the tokens between the last answer and the end of the document."""
    ids, targets = document.ids, document.targets
    stays = np.arange(len(ids)) <= np.flatnonzero(targets[:-1]).max(initial=-1)
    stays[-1] = targets[-1]
    return EncodedDocument(ids[stays], targets[stays])


def _trained_from(pieces: Sequence[TextPiece], start: int) -> int:
    """Return the first trained character at or after ``start``; ``start`` if there is none."""
    end = 0
    for piece in pieces:
        end += len(piece.text)
        if piece.train and end > start:
            return max(end - len(piece.text), start)
    return start
