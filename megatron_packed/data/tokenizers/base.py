"""Interface of tokenizers, and the built-in byte tokenizer.

Text is encoded in one of two modes. **Plain** is for everything that people wrote: a special token
spelt in it
(``<|endoftext|>`` in a web page, ``<|im_end|>`` in a user's message) is ordinary characters. **With
specials** is for what a chat template printed.

A tokenizer that does not take a text raises `BadLine`, for that text alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import BadLine, DataError, printable

TokenIds = NDArray[np.int32]
Offsets = NDArray[np.int64]
"""``(L, 2)``: first and one-past-last character of each token."""

END_OF_DOCUMENT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
PADDING = "<|padding|>"
OWN_SPECIAL_TOKENS = (END_OF_DOCUMENT, TURN_START, TURN_END, PADDING)
"""Special tokens of the tokenizers that we make."""
_PROBE = ("The first part.", " A second\npart", "third", "\n\nfourth ")


class Tokenizer(Protocol):
    """Immutable, and usable from several threads."""

    vocab_size: int
    """Largest token number + 1."""
    eod_id: int
    """End of document; appended to every document and always trained."""
    pad_id: int
    """Equal to ``eod_id`` where the tokenizer has none. Nothing is ever masked because of its
    number.
    """
    prefix_ids: tuple[int, ...]
    """Tokens that the tokenizer puts before a text (beginning of sequence); not used where a chat
    template decides.
    """
    special_tokens: Mapping[str, int]
    """Spelling -> number of the tokens that only a template may produce."""
    splits_cleanly: bool
    """True if encoding pieces one by one gives the same text back as encoding them together, and
    special tokens split the text around them without touching it. False for tokenizers that put a
    space before what they encode.
    """
    chat_template: str | None
    """jinja2 source that came with the tokenizer."""
    template_variables: Mapping[str, str]
    """``bos_token``, ``eos_token`` and the like, as the template expects them."""
    fingerprint: str
    """Changes whenever any text could be encoded differently."""

    def encode(self, text: str, *, special: bool = False) -> TokenIds: ...

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]: ...

    def decode(
        self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = False
    ) -> str: ...

    def close(self) -> None:
        """Release processes; the tokenizer stays usable."""
        ...


class InProcess:
    """Base of tokenizers that run in this process."""

    def close(self) -> None:
        """Release nothing: there is no process."""


class OffsetTokenizer(Tokenizer, Protocol):
    """Additional interface of a tokenizer that does not split cleanly."""

    def encode_with_offsets(
        self, text: str, *, special: bool = False
    ) -> tuple[TokenIds, Offsets]: ...


def vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> int:
    """Entries of a model's vocabulary before padding: ``--vocab-size``, else the tokenizer's.

    Raises:
        DataError: there is no room for all of the tokenizer's.
    """
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"{flags.VOCAB_SIZE} {vocab_size} has no room for the {tokenizer.vocab_size} entries of the tokenizer; "
            "leave it out, or give at least as many."
        )
    return vocab_size or tokenizer.vocab_size


def probe_splits(tokenizer: Tokenizer) -> bool:
    """See `Tokenizer.splits_cleanly`: tried, since no file says it."""
    pieces = np.concatenate([tokenizer.encode(text) for text in _PROBE])
    if tokenizer.decode(tokenizer.encode("".join(_PROBE))) != tokenizer.decode(pieces):
        return False
    before, after = tokenizer.encode("a ").tolist(), tokenizer.encode(" b\n").tolist()
    return all(
        tokenizer.encode(f"a {content} b\n", special=True).tolist() == [*before, number, *after]
        for content, number in tokenizer.special_tokens.items()
    )


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Splits a text into what lies between the tokens and, at odd places, the tokens; the longest
    where several fit.
    """
    return re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")


def optional_package(name: str, version: str, needed: str) -> ModuleType:
    """A tokenizer's library.

    Args:
        version: from which on it has ``needed``, ``Class.method``.
    Raises:
        DataError: it is not installed, or too old.
    """
    try:
        module = importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"the tokenizer needs {name}, which is not installed: pip install 'megatron-packed[data]'."
        ) from None
    owner, _, method = needed.partition(".")
    if not hasattr(getattr(module, owner, None), method):
        raise DataError(
            f"the tokenizer needs {name} {version} or newer: pip install -U '{name}>={version}'."
        )
    return module


def read_bytes(file: Path) -> bytes:
    """A tokenizer's file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None


def read_text(file: Path) -> str:
    """A tokenizer's file of text.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text; it is damaged or no tokenizer file.") from None


def fingerprint_of(kind: str, *identity: Any) -> str:
    """A `Tokenizer.fingerprint`: ``kind`` and a hash of what decides how text is encoded."""
    return f"{kind}:{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}"


def known_tokens(ids: Sequence[int] | NDArray[np.integer], vocab_size: int) -> list[int]:
    """``ids`` as Python's numbers.

    Raises:
        DataError: one is outside of the vocabulary.
    """
    tokens = [int(token) for token in ids]
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} is outside of the tokenizer's vocabulary of {vocab_size}."
            )
    return tokens


class ByteTokenizer(InProcess):
    """Every byte of UTF-8 is a token (0 to 255), followed by `OWN_SPECIAL_TOKENS` (256 to 259).

    Nothing to download and nothing to train; a few times more tokens than a learned vocabulary.
    """

    vocab_size = 256 + len(OWN_SPECIAL_TOKENS)
    eod_id = 256
    pad_id = 256 + OWN_SPECIAL_TOKENS.index(PADDING)
    prefix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, int] = {
        token: 256 + n for n, token in enumerate(OWN_SPECIAL_TOKENS)
    }
    splits_cleanly = True
    chat_template: str | None = None
    template_variables: Mapping[str, str] = {
        "eos_token": END_OF_DOCUMENT,
        "bos_token": "",
        "pad_token": PADDING,
    }
    fingerprint = "bytes-1:" + ",".join(OWN_SPECIAL_TOKENS)
    _split = special_pattern(OWN_SPECIAL_TOKENS)

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        pieces = self._split.split(text) if special else [text]
        encoded = [self._piece(piece, at % 2 == 1) for at, piece in enumerate(pieces)]
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded)

    def _piece(self, piece: str, is_special: bool) -> TokenIds:
        if is_special:
            return np.array([self.special_tokens[piece]], np.int32)
        return np.frombuffer(piece.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        return [self.encode(text, special=special) for text in texts]

    def decode(
        self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = False
    ) -> str:
        raw = bytearray()
        for token in known_tokens(ids, self.vocab_size):
            if token < 256:
                raw.append(token)
            elif not skip_special:
                raw.extend(OWN_SPECIAL_TOKENS[token - 256].encode())
        return raw.decode("utf-8", errors="replace")


class NullTokenizer(InProcess):
    """Text that is token numbers already, separated by spaces: for measuring and debugging, and for
    indexed data sets whose tokenizer is not at hand.

    Args:
        vocab_size: numbers are below it.
        eod_id: end of document; by default the last number.
    """

    prefix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, int] = {}
    splits_cleanly = True
    chat_template: str | None = None
    template_variables: Mapping[str, str] = {}

    def __init__(self, vocab_size: int, eod_id: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod_id = self.pad_id = vocab_size - 1 if eod_id is None else eod_id
        self.fingerprint = f"numbers-1:{vocab_size}:{self.eod_id}"

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        words = text.split()
        for word in words:
            if not (
                word.isascii()
                and word.isdecimal()
                and len(word) < 11
                and int(word) < self.vocab_size
            ):
                raise BadLine(
                    "not_a_token_number",
                    f"{printable(word, 40)!r}, of a vocabulary of {self.vocab_size}",
                )
        return np.array(words, np.int32)

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode(
        self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = False
    ) -> str:
        tokens = known_tokens(ids, self.vocab_size)
        return " ".join(
            str(token) for token in tokens if not (skip_special and token == self.eod_id)
        )
