"""Encoding of samples to token numbers and target masks.

Trained and untrained pieces of a document are encoded separately. No token then covers both kinds
of text. The tokens before an answer are the same as the tokens of a prompt in inference.

Some tokenizers do not split cleanly (`base.Tokenizer.splits_cleanly`). They encode the complete
document, and the character offsets of the tokens decide which tokens are targets. If a token covers
both trained and untrained text, the line is unusable.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, cast

import numpy as np

from megatron_packed.config.sections.data_parts.tokenizer import LETTERS, TOKENS
from megatron_packed.data.errors import BadLine, DataError, Notes
from megatron_packed.data.sources.line_schema import (
    Conversation,
    LineSample,
    PromptCompletion,
    TokenSequence,
)
from megatron_packed.data.sources.strict_json import BROKEN
from megatron_packed.data.tokenizers.base import OffsetTokenizer, TokenIds, Tokenizer
from megatron_packed.data.tokenizers.chat_format import (
    ChatDocument,
    ChatFormat,
    TextPiece,
    joined_text,
)
from megatron_packed.packed.array_types import UInt8Array

if TYPE_CHECKING:
    from megatron_packed.data.tokenizers.chat_template import Tools
    from megatron_packed.data.tokenizers.turn_markers import Messages

KnownTokens = dict[bool, dict[str, TokenIds]]
"""Cache of the tokens of texts: ``known[special][text]``, where ``special`` is the encoding mode.
"""


class Cut(NamedTuple):
    """Record of a shortened document: its size before, and the parts that were cut."""

    source_tokens: int
    source_targets: int
    turns: int = 0
    """Number of turns that were removed completely."""
    inside: bool = False
    """True if tokens of the last turn, of the system message or of a prompt were cut."""
    answer: bool = False
    """True if the answer lost tokens at its end."""
    question: bool = False
    """True if the last user message, or the prompt, lost tokens of its middle."""


class EncodedDocument(NamedTuple):
    """Tokens and targets of one document, as they are stored."""

    ids: TokenIds
    """``(L,)`` token numbers."""
    targets: UInt8Array
    """``(L,)``, 1 for tokens to train on; always 0 at index 0, because no token precedes it."""
    cut: Cut | None = None
    """Record of the shortening; None if the document was not shortened."""
    later_documents: int = 0
    """Number of documents of the same conversation that end with later answers."""


class TextDocument(NamedTuple):
    """One document of a sample, as text."""

    sample: LineSample
    """The sample, or the part of a conversation that the document holds."""
    pieces: list[TextPiece]


class EncodedLine(NamedTuple):
    """Documents of one line."""

    documents: list[EncodedDocument]
    notes: Notes
    """Notes about parts of the line that are not learned as they are written."""


class HasTurnMarkers(Protocol):
    """Chat format, or the turn markers of one."""

    @property
    def turn_markers(self) -> frozenset[str]:
        """Special tokens that begin and end turns."""


class TurnMarkers(NamedTuple):
    """Turn markers of a chat format that is closed, or that another process has."""

    turn_markers: frozenset[str]


class TextNotes:
    """Search for special tokens that a text spells, which are encoded as letters.

    Args:
        tokenizer: tokenizer of the text.
        chat: chat format of the tokenizer, which is read at the first special token, because most
            plain texts spell none. Its turn markers show that a template has rendered a
            text, except those that usual text spells: ``<s>`` and ``</s>`` are also HTML. The
            token with which a rendered text begins counts at this place only.
    """

    def __init__(self, tokenizer: Tokenizer, chat: HasTurnMarkers) -> None:
        self._named = tokenizer.template_variables
        self._first = self._named.get("bos_token", "")
        self._special = frozenset(tokenizer.special_tokens)
        self._chat = chat
        self._others = [token for token in self._special if not _IN_BRACKETS.fullmatch(token)]

    @cached_property
    def _markers(self) -> frozenset[str]:
        from megatron_packed.data.tokenizers.turn_markers import DOCUMENT_ENDS

        usual = {token for name, token in self._named.items() if name != "eos_token"}
        return self._chat.turn_markers - usual - {*DOCUMENT_ENDS}

    def find(self, text: str) -> Notes:
        """Return the notes of one text."""
        notes: Notes = Counter()
        spelled = [token for token in _IN_BRACKETS.findall(text) if token in self._special]
        spelled += [token for token in self._others if token in text]
        for token, count in Counter(spelled).items():
            kind = "turn_markers" if token in self._markers else "letters"
            notes[kind, token] = 1 if kind == "turn_markers" else count
        if self._first and text.startswith(self._first):
            notes["turn_markers", self._first] = 1
        return notes


_IN_BRACKETS = re.compile(r"<[^<>\n]{1,80}>|\[[^\[\]\n]{1,80}\]")
"""Form of nearly all special tokens. One search for it is faster than one for each token."""


def with_special_tokens(tokenizer: Tokenizer, pieces: list[TextPiece]) -> list[TextPiece]:
    """Return pieces of markup after an empty plain piece, which gives the document its prefix.

    A text that spells the prefix itself gets no second one.
    """
    prefix = tokenizer.decode(tokenizer.prefix_ids)
    if prefix and joined_text(pieces).startswith(prefix):
        return pieces
    return [TextPiece("", False, False), *pieces]


@dataclass(frozen=True, kw_only=True)
class SampleEncoder:
    """Encoder of samples with one tokenizer and one chat format. Several threads may use it."""

    tokenizer: Tokenizer
    chat: ChatFormat
    special_tokens_in_text: str | None = None
    """Value of ``--special-tokens-in-text``."""
    shortens: ClassVar[bool] = False
    """True if the encoder shortens over-long documents. The cache then also stores their original
    sizes.
    """

    def encode(self, lines: Sequence[Sequence[LineSample]]) -> list[EncodedLine | BadLine]:
        """Encode the documents of each line; an unusable line gives a `BadLine` instead.

        Each document ends with the end-of-document token, except conversations whose chat format
        ends them (`ChatFormat.ends_documents`, `ChatFormat.ends_turns`), and tokens that are given
        as such.

        Raises:
            DataError: the tokenizer makes a token outside of its vocabulary, or the chat template
                exceeds its limits too often.
        """
        cache: KnownTokens | None = {} if self.shortens else None
        outcomes: list[EncodedLine | BadLine] = []
        numbers: list[int] = []
        drafts: list[tuple[Notes, TextDocument | list[ChatDocument]]] = []
        for number, samples in enumerate(lines):
            notes: Notes = Counter()
            try:
                of_line = [(notes, self._draft(sample, notes)) for sample in samples]
            except BadLine as bad_line:
                outcomes.append(bad_line)
                continue
            outcomes.append(EncodedLine([], notes))
            numbers += [number] * len(of_line)
            drafts += of_line
        parts = self._text_documents(drafts)
        encoded = iter(
            encode_pieces(self.tokenizer, [part.pieces for group in parts for part in group], cache)
        )
        for number, group in zip(numbers, parts):
            documents = [next(encoded) for _ in group]
            outcome = outcomes[number]
            if isinstance(outcome, BadLine):
                continue
            finished = [self._finished(*pair, cache) for pair in zip(documents, group)]
            refused = next((part for part in finished if isinstance(part, BadLine)), None)
            if refused is not None:
                outcomes[number] = refused
                continue
            usable = [part for part in finished if isinstance(part, EncodedDocument)]
            if len(usable) < len(finished):
                outcome.notes["left_out", "question_too_long"] += len(finished) - len(usable)
            last = len(usable) - 1
            outcome.documents.extend(
                part._replace(later_documents=last - at) for at, part in enumerate(usable)
            )
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, EncodedLine) and lines[number] and not outcome.documents:
                outcomes[number] = BadLine("question_too_long")
        return outcomes

    def _draft(self, sample: LineSample, notes: Notes) -> TextDocument | list[ChatDocument]:
        """Return the document of a sample as text, or the documents of a conversation."""
        if isinstance(sample, Conversation):
            documents, of_sample = self.chat.documents(sample)
            notes.update(of_sample)
            return documents
        if isinstance(sample, TokenSequence):
            return TextDocument(sample, [])
        if isinstance(sample, PromptCompletion):
            return TextDocument(sample, self._prompt_completion(sample, notes))
        if self.special_tokens_in_text == TOKENS:
            pieces = with_special_tokens(self.tokenizer, [TextPiece(sample.text, True, True)])
            return TextDocument(sample, pieces)
        notes.update(self._text_notes.find(sample.text))
        return TextDocument(sample, [TextPiece(sample.text, True, False)])

    def _text_documents(
        self, drafts: Sequence[tuple[Notes, TextDocument | list[ChatDocument]]]
    ) -> list[list[TextDocument]]:
        """Return the documents of each draft, and add to the notes of its line."""
        chats = [draft for _, draft in drafts if isinstance(draft, list)]
        natural = [(documents, 0) for documents in chats]
        if self.tokenizer.splits_cleanly and chats:
            from megatron_packed.data.tokenizers.seams import with_natural_seams

            natural = with_natural_seams(chats, self.chat, self.tokenizer, self._special_texts)
        conversations = iter(natural)
        groups = []
        for notes, draft in drafts:
            if isinstance(draft, TextDocument):
                groups.append([draft])
                continue
            documents, left_out = next(conversations)
            if left_out:
                notes["not_served", "answers of earlier turns"] += left_out
            groups.append([TextDocument(part.conversation, part.pieces) for part in documents])
        return groups

    def _prompt_completion(self, sample: PromptCompletion, notes: Notes) -> list[TextPiece]:
        """Return the pieces of a prompt and its completion.

        Special tokens in a completion act as such, except turn markers, as in the answers of
        conversations.
        """
        prompt, completion = sample
        if self.special_tokens_in_text == TOKENS:
            return with_special_tokens(
                self.tokenizer, [TextPiece(prompt, False, True), TextPiece(completion, True, True)]
            )
        notes.update(self._text_notes.find(prompt))
        of_completion = self._text_notes.find(completion)
        notes.update(key for key in of_completion if key[0] == "turn_markers")
        pieces = [TextPiece(prompt, False, False), TextPiece(completion, True, False)]
        if not self._special or self.special_tokens_in_text == LETTERS:
            return pieces
        parts = self._special_texts.split(completion)
        if len(parts) == 1:
            return pieces
        for token in self.chat.turn_markers.intersection(parts[1::2]):
            notes["letters", token] += parts.count(token)
            parts = [token[0] + BROKEN + token[1:] if part == token else part for part in parts]
        return [pieces[0], TextPiece("".join(parts), True, True)]

    @cached_property
    def _text_notes(self) -> TextNotes:
        return TextNotes(self.tokenizer, self.chat)

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        from megatron_packed.data.tokenizers.turn_markers import special_pattern

        special = self.tokenizer.special_tokens
        return special_pattern(special) if special else re.compile("(?!)")

    def _has_end(self, sample: LineSample, last: int) -> bool:
        """Return True if a document needs no end-of-document token after its token ``last``."""
        if not isinstance(sample, Conversation):
            return False
        ends_turn = self.chat.ends_turns and self.chat.turn_end is not None
        return self.chat.ends_documents or (ends_turn and last in self._special)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.special_tokens.values())

    def _finished(
        self, document: EncodedDocument | BadLine, part: TextDocument, cache: KnownTokens | None
    ) -> EncodedDocument | BadLine | None:
        """Return a complete document; None to leave it out.

        Args:
            cache: tokens of encoded texts for further renderings of the same line.
        """
        if isinstance(part.sample, TokenSequence):
            return self._given_tokens(part.sample)
        return document if isinstance(document, BadLine) else self._finish(document, part.sample)

    def _given_tokens(self, sample: TokenSequence) -> EncodedDocument | BadLine:
        """Return a document whose tokens are given; nothing is added."""
        size = self.tokenizer.vocab_size
        if not 0 <= min(sample.ids) <= max(sample.ids) < size:
            return BadLine(
                "token_outside", f"tokens {min(sample.ids)} to {max(sample.ids)} of {size}"
            )
        wanted = [1] * len(sample.ids) if sample.targets is None else sample.targets
        targets = np.array(wanted, np.uint8)
        targets[0] = 0
        if not targets.any():
            return BadLine("no_trainable_token")
        return EncodedDocument(np.array(sample.ids, np.int32), targets)

    def _finish(self, document: EncodedDocument, sample: LineSample) -> EncodedDocument | BadLine:
        ids, targets = document.ids, document.targets
        check_tokens(ids, self.tokenizer)
        if not targets.any():
            answers = sample.messages if isinstance(sample, Conversation) else []
            masked = not any(m["role"] == "assistant" and m.get("train", True) for m in answers)
            return BadLine("all_masked" if answers and masked else "no_trainable_token")
        if not self._has_end(sample, int(ids[-1])):
            eod = self.tokenizer.eod_id
            if ids[-1] != eod:  # some templates already end with the end-of-document token
                ids, targets = np.append(ids, np.int32(eod)), np.append(targets, np.uint8(0))
            targets[-1] = 1
        targets[0] = 0
        return EncodedDocument(ids, targets) if targets.any() else BadLine("no_trainable_token")


def check_tokens(ids: TokenIds, tokenizer: Tokenizer) -> None:
    """Check that all tokens are in the vocabulary of their tokenizer.

    Raises:
        DataError: a token is not.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer made token numbers from {ids.min()} to {ids.max()}, but its vocabulary has "
            f"{tokenizer.vocab_size} tokens; use tokenizer files that belong together."
        )


def encode_pieces(
    tokenizer: Tokenizer, documents: Sequence[Sequence[TextPiece]], cache: KnownTokens | None = None
) -> list[EncodedDocument | BadLine]:
    """Encode documents given as pieces, without an end-of-document token.

    Documents without markup begin with the tokenizer's prefix.

    Args:
        cache: tokens of texts that were encoded before; new texts are added. Only tokenizers that
            split cleanly use the cache.
    """
    if not tokenizer.splits_cleanly:
        return _encode_whole(tokenizer, documents)
    try:
        return _encode_split(tokenizer, documents, cache)
    except BadLine as bad_line:  # encode one by one, so that only the bad document is rejected
        if len(documents) == 1:
            return [bad_line]
        return [
            outcome
            for document in documents
            for outcome in encode_pieces(tokenizer, [document], cache)
        ]


def encode_with_borders(
    tokenizer: Tokenizer,
    pieces: Sequence[TextPiece],
    borders: Sequence[int],
    cache: KnownTokens | None = None,
) -> tuple[EncodedDocument, list[int]]:
    """Encode one document with markup, and find the tokens at given characters of its text.

    Args:
        borders: character numbers in ascending order. A tokenizer that splits cleanly makes no
            token across a border.
    Returns:
        The document, and for each border the number of tokens that end at or before the border.
    Raises:
        BadLine: the tokenizer cannot encode the text.
    """
    if tokenizer.splits_cleanly:
        documents = []
        for part in encode_pieces(tokenizer, _split_at(pieces, borders), cache):
            if isinstance(part, BadLine):
                raise part
            documents.append(part)
        places = np.cumsum([len(document.ids) for document in documents[:-1]]).tolist()
        ids, targets = (np.concatenate([document[at] for document in documents]) for at in (0, 1))
        return EncodedDocument(ids.astype(np.int32), targets.astype(np.uint8)), places
    document = _encode_one(cast(OffsetTokenizer, tokenizer), pieces)
    text = joined_text(pieces)
    _, offsets = cast(OffsetTokenizer, tokenizer).encode_with_offsets(text, special=True)
    return document, [int(np.count_nonzero(offsets[:, 1] <= border)) for border in borders]


def prompt_tokens(
    tokenizer: Tokenizer,
    chat: ChatFormat,
    messages: Messages,
    tools: Tools = None,
) -> list[int]:
    """Return the tokens of a prompt with ``messages``, encoded as in the training data.

    Raises:
        BadLine: the chat format or the tokenizer cannot use the messages.
    """
    [document] = encode_pieces(tokenizer, [chat.prompt(messages, tools)])
    if isinstance(document, BadLine):
        raise document
    return [int(token) for token in document.ids]


def answer_ends(tokenizer: Tokenizer, chat: ChatFormat | None = None) -> frozenset[int]:
    """Return the tokens after which an answer, or without a chat format a text, is complete.

    They are the end-of-document token and the last special token of the end of a turn.
    """
    ends = {tokenizer.eod_id}
    if chat is not None and chat.turn_end is not None:
        ends.add(tokenizer.special_tokens[chat.turn_end.token])
    return frozenset(ends)


# ------------------------------------------------------------------------------------------------------
# encoding piece by piece


def _encode_split(
    tokenizer: Tokenizer, documents: Sequence[Sequence[TextPiece]], cache: KnownTokens | None
) -> list[EncodedDocument | BadLine]:
    plain, special = _Batch(tokenizer, False, cache), _Batch(tokenizer, True, cache)
    breaks: re.Pattern[str] | None = None
    if any(piece.markup and BROKEN in piece.text for pieces in documents for piece in pieces):
        from megatron_packed.data.tokenizers.turn_markers import special_pattern

        breaks = special_pattern(tokenizer.special_tokens)  # slow with thousands of them

    def added(piece: TextPiece) -> list[_Batch]:
        """Add the parts of a piece to the batches, and return the batch of each."""
        if not piece.markup or BROKEN not in piece.text:
            batches = [special if piece.markup else plain]
            batches[0].add(piece.text)
            return batches
        assert breaks is not None
        parts = breaks.split(piece.text)
        batches = [special if at % 2 else plain for at in range(len(parts))]
        for batch, part in zip(batches, parts):
            batch.add(part.replace(BROKEN, ""))
        return batches

    batches_of = [[added(piece) for piece in pieces] for pieces in documents]
    plain.encode()
    special.encode()
    encoded: list[EncodedDocument | BadLine] = []
    for pieces, batches in zip(documents, batches_of):
        ids: list[TokenIds] = [_prefix(tokenizer, pieces)]
        sizes, train = [len(ids[0])], [False]
        for piece, of_piece in zip(pieces, batches):
            parts = [batch.take() for batch in of_piece]
            ids.extend(parts)
            sizes.append(sum(map(len, parts)))
            train.append(piece.train)
        encoded.append(
            EncodedDocument(np.concatenate(ids), np.repeat(np.array(train, np.uint8), sizes))
        )
    return encoded


class _Batch:
    """Batch of texts: one call encodes all texts, then ``take`` returns them in order."""

    def __init__(self, tokenizer: Tokenizer, special: bool, cache: KnownTokens | None) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._cache = None if cache is None else cache.setdefault(special, {})
        self._texts: list[str] = []
        self._encoded: list[TokenIds] = []
        self._next = 0

    def add(self, text: str) -> None:
        self._texts.append(text)

    def encode(self) -> None:
        cache = self._cache
        new = (
            self._texts
            if cache is None
            else [text for text in dict.fromkeys(self._texts) if text not in cache]
        )
        encoded = self._tokenizer.encode_batch(new, special=self._special) if new else []
        if cache is not None:
            cache.update(zip(new, encoded))
            encoded = [cache[text] for text in self._texts]
        self._encoded = encoded

    def take(self) -> TokenIds:
        self._next += 1
        return self._encoded[self._next - 1]


def _split_at(pieces: Sequence[TextPiece], borders: Sequence[int]) -> list[list[TextPiece]]:
    """Split the pieces of a document with markup at ``borders``.

    The borders are character numbers in the text of all pieces. Every part has at least one piece,
    which may be empty.
    """
    parts: list[list[TextPiece]] = []
    remaining = list(pieces)
    for length in np.diff([0, *borders]).tolist():
        part = [TextPiece("", False, True)]
        while remaining and length:
            piece = remaining.pop(0)
            part.append(piece._replace(text=piece.text[:length]))
            if len(piece.text) > length:
                remaining.insert(0, piece._replace(text=piece.text[length:]))
            length -= len(part[-1].text)
        parts.append(part)
    return [*parts, remaining or [TextPiece("", False, True)]]


def _prefix(tokenizer: Tokenizer, pieces: Sequence[TextPiece]) -> TokenIds:
    """Return the tokens before a document; a template that begins a document prints them itself."""
    return np.array(() if pieces and pieces[0].markup else tokenizer.prefix_ids, np.int32)


# ---------------------------------------------------------------------------------------------------------
# encoding of complete documents


def _encode_whole(
    tokenizer: Tokenizer, documents: Sequence[Sequence[TextPiece]]
) -> list[EncodedDocument | BadLine]:
    encoded: list[EncodedDocument | BadLine] = []
    for pieces in documents:
        try:
            encoded.append(_encode_one(cast(OffsetTokenizer, tokenizer), pieces))
        except BadLine as bad_line:
            encoded.append(bad_line)
    return encoded


def _encode_one(tokenizer: OffsetTokenizer, pieces: Sequence[TextPiece]) -> EncodedDocument:
    text = joined_text(pieces)
    if BROKEN in text:
        raise BadLine("special_token_in_content")
    ids, offsets = tokenizer.encode_with_offsets(
        text, special=any(piece.markup for piece in pieces)
    )
    # 1 for each trained character; a token is a target if all of its characters are trained
    trained = np.repeat(
        np.array([piece.train for piece in pieces], np.int64),
        np.array([len(piece.text) for piece in pieces], np.int64),
    )
    num_trained = np.concatenate([[0], np.cumsum(trained)])
    starts, ends = offsets[:, 0], offsets[:, 1]
    ends = np.where(
        ends > starts, ends, np.minimum(starts + 1, len(text))
    )  # a token without characters counts with the next character
    inside = num_trained[ends] - num_trained[starts]
    special = tokenizer.special_tokens.values()
    for at in np.flatnonzero((inside != 0) & (inside != ends - starts)).tolist():
        covered = text[starts[at] : ends[at]]
        first = starts[at] + len(covered) - len(covered.lstrip())
        last = first + len(covered.strip())
        # A special token may include the white space next to it, as <|end|> of Phi-3 does.
        if ids[at] not in special or num_trained[last] - num_trained[first] not in (
            0,
            last - first,
        ):
            raise BadLine("token_across_boundary", f"characters {starts[at]} to {ends[at]}")
        inside[at] = num_trained[last] - num_trained[first]
    prefix = _prefix(tokenizer, pieces)
    targets = np.concatenate([np.zeros(len(prefix), np.uint8), (inside > 0).astype(np.uint8)])
    return EncodedDocument(np.concatenate([prefix, ids]), targets)
