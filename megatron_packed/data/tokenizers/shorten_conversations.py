"""Shortening of over-long conversations and prompts (``--overlong-policy truncate_prompt``).

A shortened conversation keeps its last answer and loses its earliest turns. The chat template
renders the system message and the latest turns that fit. If the last turn is too long by itself,
tokens are removed in this order:

1. the front of its prompt;
2. the front of the system message;
3. the header of the answer;
4. the end of the answer and of its turn.

A prompt with a completion loses the front of the prompt, then the end of the completion.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.line_schema import Conversation, PromptCompletion, Sample
from megatron_packed.data.tokenizers.chat_format import TextPiece
from megatron_packed.data.tokenizers.encode import (
    Cut,
    EncodedDocument,
    KnownTokens,
    SampleEncoder,
    encode_pieces,
    encode_with_borders,
)

_NEAR_MISS = 8
"""Largest error, in tokens, of an estimate that is based on an exact count and the sizes of turns.
"""
_TRIES = 4
"""Number of renderings whose turns are chosen by estimates; later ones use bisection."""


@dataclass(frozen=True, kw_only=True)
class ShorteningEncoder(SampleEncoder):
    """Encoder that shortens documents of more than ``max_tokens`` tokens.

    Other documents take no additional time.
    """

    max_tokens: int
    """Largest number of tokens of a document. At least 2: a target and the token before it."""
    shortens: ClassVar[bool] = True

    def encode(self, lines: Sequence[Sequence[Sample]]) -> list[list[EncodedDocument] | BadLine]:
        """Encode the documents of each line and shorten long ones; see `SampleEncoder.encode`."""
        known: KnownTokens = {}
        outcomes = self._encode(lines, known)
        for samples, outcome in zip(lines, outcomes):
            if isinstance(outcome, BadLine):
                continue
            for at, (sample, document) in enumerate(zip(samples, outcome)):
                if len(document.ids) > self.max_tokens:
                    outcome[at] = _Shortener(self, sample, document, known).shortened()
        return outcomes

    def rendered(self, talk: Conversation, known: KnownTokens) -> EncodedDocument:
        """Render and encode a conversation of any length, without shortening it.

        Raises:
            BadLine: the conversation cannot be rendered or encoded, or has no target.
        """
        [document] = encode_pieces(self.tokenizer, [self.chat.pieces(talk)], known)
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
    def of(cls, messages: Sequence[dict[str, Any]]) -> _Turns:
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


class _Shortener:
    """Shortening of one document."""

    def __init__(
        self,
        encoder: ShorteningEncoder,
        sample: Sample,
        document: EncodedDocument,
        known: KnownTokens,
    ) -> None:
        self._encoder = encoder
        self._sample = sample
        self._document = document
        self._known = known
        self._limit = encoder.max_tokens

    def shortened(self) -> EncodedDocument:
        """Return the shortened document, with the record of its shortening."""
        if isinstance(self._sample, Conversation):
            return self._conversation(self._sample, _Turns.of(self._sample.messages))
        assert isinstance(self._sample, PromptCompletion), (
            self._sample
        )  # plain text is not shortened, because all of its tokens are trained
        prefix = len(self._encoder.tokenizer.prefix_ids)
        answer = int(self._document.targets.argmax())
        return self._fitted(self._document, min(prefix, answer), answer, answer)

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
            with suppress(BadLine):
                return self._cut_inside(talk._replace(messages=messages), turns.head, turns_lost)
        document = self._document
        if turns.last + 1 < len(talk.messages):
            document = _without_what_follows(document)
        whole = len(document.ids)
        return self._fitted(document, 0, whole, whole, turns.total - len(turns.starts))

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
        whole = len(self._document.ids)
        sizes = [
            whole - place for place in reversed(places)
        ]  # estimated sizes with the last 1, 2, ... turns; all have about the same error.
        # If no turn follows the last answer, the document with all turns is known to be too long.
        low, high = 0, len(turns.starts) + (turns.end < len(messages))
        found, tries, room = None, 0, self._limit + 0.0
        while high - low > 1:
            at = bisect_right(sizes, room) if tries < _TRIES else (low + high) // 2
            if exact and found is not None and at <= low and sizes[low] > room + _NEAR_MISS:
                break
            at = min(max(at, low + 1), high - 1)
            kept = talk._replace(messages=[*head, *messages[turns.starts[-at] : turns.end]])
            document = self._encoder.rendered(kept, self._known)
            room = self._limit - (len(document.ids) - sizes[at - 1])
            tries += 1
            if len(document.ids) <= self._limit:
                low, found = at, document
            else:
                high = at
        return low, found

    def _places(
        self, messages: list[dict[str, Any]], starts: list[int]
    ) -> tuple[list[float], bool]:
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

    def _cut_inside(self, talk: Conversation, head: int, turns_lost: int) -> EncodedDocument:
        """Cut tokens of a conversation whose last message is the last answer.

        Raises:
            BadLine: the template raises an error for the conversation.
        """
        encoder = self._encoder
        pieces = encoder.chat.pieces(talk)
        header, answer = self._answer(talk, pieces)
        borders = [min(self._system(talk, head, pieces), header), header, answer]
        document, places = encode_with_borders(encoder.tokenizer, pieces, borders, self._known)
        return self._fitted(encoder.finished(document, talk), *places, turns_lost)

    def _answer(self, talk: Conversation, pieces: list[TextPiece]) -> tuple[int, int]:
        """Find the characters at which the header of the last answer and its text begin."""
        chat, text = self._encoder.chat, _text(pieces)
        before = talk.messages[:-1]
        with suppress(BadLine):
            asked = _text(chat.prompt(before, talk.tools))
            unasked = chat.complete_text(before, talk.tools)
            if text.startswith(asked) and (asked or not before):
                header = len(unasked) if asked.startswith(unasked) else len(asked)
                return header, _trained_from(pieces, len(asked))
        at = len(text)
        if not all(piece.train for piece in pieces):  # the last trained piece is the answer
            trained = max(number for number, piece in enumerate(pieces) if piece.train)
            at = len(_text(pieces[:trained]))
        return at, at

    def _system(self, talk: Conversation, head: int, pieces: list[TextPiece]) -> int:
        """Find the character at which the first message after the system message begins.

        The conversation is rendered again with other content of that message. The character is the
        first at which the two texts differ.
        """
        first = talk.messages[head]
        other = "b" if first["content"].lstrip().startswith("a") else "a"
        messages = [*talk.messages[:head], {**first, "content": other}, *talk.messages[head + 1 :]]
        try:
            changed = self._encoder.chat.pieces(talk._replace(messages=messages))
        except BadLine:
            return 0
        return sum(
            1
            for _ in takewhile(lambda pair: pair[0] == pair[1], zip(_text(pieces), _text(changed)))
        )

    def _fitted(
        self, document: EncodedDocument, system: int, header: int, answer: int, turns_lost: int = 0
    ) -> EncodedDocument:
        """Cut a document to the limit, in the order that the module's docstring lists.

        Args:
            system: token after the system message, at which the prompt begins.
            header: token at which the header of the answer begins.
            answer: token at which the answer begins.
            turns_lost: number of turns that were removed before.
        """
        size = len(document.ids)
        of_answer = min(size - answer, self._limit - min(answer, 1))
        of_header = min(answer - header, self._limit - of_answer)
        of_system = min(system, self._limit - of_answer - of_header)
        of_prompt = min(header - system, self._limit - of_answer - of_header - of_system)
        spans = [
            (system - of_system, system),
            (header - of_prompt, header),
            (answer - of_header, answer + of_answer),
        ]
        taken = np.concatenate([np.arange(start, stop) for start, stop in spans])
        targets = document.targets[taken]
        targets[0] = 0
        shorter = EncodedDocument(document.ids[taken], targets)
        return self._recorded(
            shorter,
            turns_lost,
            inside=len(taken) < size or not turns_lost,
            answer=of_answer < size - answer,
        )

    def _recorded(
        self, document: EncodedDocument, turns: int = 0, inside: bool = False, answer: bool = False
    ) -> EncodedDocument:
        source = self._document
        return document._replace(
            cut=Cut(source.ids.size, int(source.targets.sum()), turns, inside, answer)
        )


def _without_what_follows(document: EncodedDocument) -> EncodedDocument:
    """Remove the tokens between the last answer and the end of the document."""
    ids, targets, _ = document
    kept = np.arange(len(ids)) <= np.flatnonzero(targets[:-1]).max(initial=-1)
    kept[-1] = targets[-1]
    return EncodedDocument(ids[kept], targets[kept])


def _trained_from(pieces: Sequence[TextPiece], start: int) -> int:
    """Return the first trained character at or after ``start``; ``start`` if there is none."""
    end = 0
    for piece in pieces:
        end += len(piece.text)
        if piece.train and end > start:
            return max(end - len(piece.text), start)
    return start


def _text(pieces: Sequence[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)
