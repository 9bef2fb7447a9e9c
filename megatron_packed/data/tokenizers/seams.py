"""Seams between the pieces of a document: answers whose place changes no token.

Trained text is encoded separately from the text before it, as at inference. In a document with
several answers, an earlier answer is also part of the history of a later one, and a served history
is encoded at once. If the answer begins with a line end, for example, one token may then cover this
line end and the one before it. Such an answer gets a document of its own, so that the tokens before
every trained answer are those of its prompt. With ``--multi-turn last`` it is context instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_packed.data.sources.strict_json import BROKEN
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import (
    ChatDocument,
    ChatFormat,
    TextPiece,
    divided,
    joined_text,
    only_learned,
)


class _Seam(NamedTuple):
    """Text between two special tokens that has the beginning or the end of an answer inside."""

    answer: int
    """Number of the answer among the trained pieces of its document."""
    parts: tuple[str, ...]
    """The text, divided at the beginning and at the end of the answer."""


def with_natural_seams(
    conversations: Sequence[list[ChatDocument]],
    chat: ChatFormat,
    tokenizer: Tokenizer,
    special: re.Pattern[str],
) -> list[tuple[list[ChatDocument], int]]:
    """Return documents of conversations whose histories have the tokens of the served histories.

    Args:
        conversations: documents of each conversation.
        chat: chat format that made them.
        special: pattern whose ``split`` divides a text at special tokens.
    Returns:
        The documents of each conversation, and the number of answers that became context.
    """
    seams = [[list(_seams(part, special)) for part in parts] for parts in conversations]
    texts = {
        text
        for of_conversation in seams
        for of_document in of_conversation
        for seam in of_document
        for text in ("".join(seam.parts), *seam.parts)
    }
    ordered = sorted(texts)
    tokens = dict(zip(ordered, tokenizer.encode_batch(ordered))) if ordered else {}

    def is_natural(seam: _Seam) -> bool:
        joined, parts = tokens["".join(seam.parts)], [tokens[part] for part in seam.parts]
        return np.array_equal(joined, np.concatenate(parts))

    result = []
    for documents, of_conversation in zip(conversations, seams):
        parted: list[ChatDocument] = []
        left_out = 0
        for document, of_document in zip(documents, of_conversation):
            alone = sorted({seam.answer for seam in of_document if not is_natural(seam)})
            parts = _apart(document, chat, alone) if alone else [document]
            if chat.last_only:
                left_out += len(alone)
                parts = parts[-1:]
            parted += parts
        parted.sort(key=lambda document: len(document.conversation.messages))
        result.append((parted, left_out))
    return result


def _seams(document: ChatDocument, special: re.Pattern[str]) -> Iterator[_Seam]:
    """Yield the seams of all answers of a document but the last one."""
    spans = _spans(document.pieces)
    if not document.as_served or len(spans) < 2:
        return
    text = joined_text(document.pieces)
    borders = [0, *(at for match in special.finditer(text) for at in match.span()), len(text)]
    for answer, span in enumerate(spans[:-1]):
        regions: dict[tuple[int, int], list[int]] = {}
        for place in span:
            if place not in borders:  # special tokens do not change the text next to them
                at = int(np.searchsorted(borders, place))
                regions.setdefault((borders[at - 1], borders[at]), []).append(place)
        for (start, end), places in regions.items():
            parts = tuple(
                text[first:last].replace(BROKEN, "")
                for first, last in pairwise([start, *places, end])
            )
            yield _Seam(answer, parts)


def _apart(document: ChatDocument, chat: ChatFormat, alone: Sequence[int]) -> list[ChatDocument]:
    """Return a document without some of its answers, and one document for each of these."""
    talk = document.conversation
    text = joined_text(document.pieces)
    spans = _spans(document.pieces)
    numbers = [
        number
        for number, message in enumerate(talk.messages)
        if message["role"] == "assistant" and message.get("train", True)
    ]
    documents = []
    for answer in alone:
        messages = only_learned(talk.messages[: numbers[answer] + 1], {numbers[answer]})
        part = talk._replace(messages=messages)
        documents.append(document._replace(conversation=part, pieces=chat.pieces(part)))
    remaining = [answer for answer in range(len(spans)) if answer not in alone]
    messages = only_learned(talk.messages, {numbers[answer] for answer in remaining})
    pieces = divided(text, [spans[answer] for answer in remaining])
    return [
        *documents,
        document._replace(conversation=talk._replace(messages=messages), pieces=pieces),
    ]


def _spans(pieces: Sequence[TextPiece]) -> list[tuple[int, int]]:
    """Return the character ranges of the trained pieces."""
    spans, at = [], 0
    for piece in pieces:
        if piece.train:
            spans.append((at, at + len(piece.text)))
        at += len(piece.text)
    return spans
