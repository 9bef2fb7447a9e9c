"""Interface of tokenizers, and the built-in byte tokenizer.

Text is encoded in one of two modes. The **plain** mode is for text that people wrote. The spelling
of a special token in such text (``<|endoftext|>`` in a web page, ``<|im_end|>`` in a user's
message) is encoded as ordinary characters. The mode **with special tokens** (``special=True``) is
for text that a chat template printed.

A tokenizer raises `BadLine` for a text that it cannot encode; other texts are not affected.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.files.regular_files import open_regular
from megatron_packed.packed.array_types import Int32Array, Int64Array, IntegerArray

TokenIds = Int32Array
Ids = Sequence[int] | IntegerArray
Offsets = Int64Array
"""``(L, 2)``: position of the first character of each token, and of the character after the
token."""

END_OF_DOCUMENT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
PADDING = "<|padding|>"
OWN_SPECIAL_TOKENS = (END_OF_DOCUMENT, TURN_START, TURN_END, PADDING)
"""Special tokens of the tokenizers that this project builds itself."""
MOST_TOKENIZER_BYTES = 256 << 20
"""Maximum bytes of a file of a tokenizer; tokenizer.json of 260,000 tokens has 35 MB."""
_COMPARED_TOKENS = 4096
"""Number of tokens whose texts decide `meaning_hash`."""
_PROBE = ("The first part.", " A second\npart", "third", "\n\nfourth ")


class Tokenizer(Protocol):
    """Interface of a tokenizer. It is immutable, and several threads may use it."""

    vocab_size: int
    """Largest token number + 1."""
    eod_id: int
    """Number of the end-of-document token. This token is appended to every document that has no other
    end, and is then always a target."""
    pad_id: int
    """Number of the padding token; ``eod_id`` if the tokenizer has none. This number plays no part
    in masking: a token that has it may be a target.
    """
    prefix_ids: tuple[int, ...]
    """Tokens that the tokenizer puts before a text, for example beginning of sequence. Text of a
    chat template gets no prefix.
    """
    special_tokens: Mapping[str, int]
    """Spelling and number of each special token. Only a template may produce these tokens."""
    splits_cleanly: bool
    """True if a text may be encoded piece by piece.

    Pieces that are encoded one by one must decode to the same text as the pieces encoded together.
    Special tokens must not change the text next to them. Tokenizers that put a space before each
    text have False.
    """
    chat_template: str | None
    """jinja2 source of the tokenizer's own chat template; None if it has no template.

    If all of its templates are for special purposes, such as tools, this template raises an error
    with their names.
    """
    tool_chat_template: str | None
    """jinja2 source of the tokenizer's template for conversations with tools (``tool_use``); None if
    ``chat_template`` serves them too."""
    template_variables: Mapping[str, str]
    """Variables that chat templates expect, by name (``bos_token``, ``eos_token``, ...)."""
    fingerprint: str
    """Hash that changes if any text could be encoded differently."""

    def encode(self, text: str, *, special: bool = False) -> TokenIds: ...

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]: ...

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str: ...

    def close(self) -> None:
        """Release processes; the tokenizer stays usable."""
        ...


class InProcess:
    """Base class of tokenizers that run in this process, with the usual attributes.

    A class has `encode` or `encode_batch` of its own, and the other one calls it.
    """

    prefix_ids: tuple[int, ...] = ()
    splits_cleanly = True
    chat_template: str | None = None
    tool_chat_template: str | None = None

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        return [self.encode(text, special=special) for text in texts]

    def close(self) -> None:
        """Do nothing, because there is no child process to end."""


class OffsetTokenizer(Tokenizer, Protocol):
    """Additional interface of tokenizers whose `Tokenizer.splits_cleanly` is False."""

    def encode_with_offsets(
        self, text: str, *, special: bool = False
    ) -> tuple[TokenIds, Offsets]: ...


def vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> int:
    """Return the size of a model's vocabulary before padding.

    The size is ``--vocab-size`` if given, else the size of the tokenizer's vocabulary.

    Raises:
        DataError: ``--vocab-size`` is smaller than the tokenizer's vocabulary.
    """
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        entries = tokenizer.vocab_size
        raise DataError(
            f"{flags.VOCAB_SIZE} {vocab_size} is less than the {entries} entries of the tokenizer. "
            f"Weights that were converted or trained have {vocab_size} rows: take the tokenizer of "
            f"these weights, or enlarge their tables with resize_token_embeddings({entries}) of "
            "transformers and convert them again. For a model that begins with random weights, "
            f"leave the option out, or give at least {entries}."
        )
    return vocab_size or tokenizer.vocab_size


def meaning_hash(tokenizer: Tokenizer) -> str:
    """Return a hash of the text of the first tokens.

    Unlike `Tokenizer.fingerprint`, it is the same for all kinds of files of one vocabulary. With
    another hash, equal token numbers mean other text.
    """
    text = tokenizer.decode(range(min(tokenizer.vocab_size, _COMPARED_TOKENS)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def probe_splits(tokenizer: Tokenizer) -> bool:
    """Find `Tokenizer.splits_cleanly` by encoding sample texts, because no file contains it."""
    pieces = np.concatenate([tokenizer.encode(text) for text in _PROBE])
    if tokenizer.decode(tokenizer.encode("".join(_PROBE))) != tokenizer.decode(pieces):
        return False
    left, right = tokenizer.encode("a ").tolist(), tokenizer.encode(" b\n").tolist()
    return all(
        tokenizer.encode(f"a {content} b\n", special=True).tolist() == [*left, number, *right]
        for content, number in tokenizer.special_tokens.items()
    )


def optional_package(name: str, version: str, needed: str) -> ModuleType:
    """Import the library of a tokenizer.

    Args:
        version: first version that has the method ``needed``.
        needed: a method of the library, as ``Class.method``.
    Raises:
        DataError: the library is not installed, or too old.
    """
    try:
        module = importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"the tokenizer needs {name}, which is not installed; run `pip install 'megatron-packed[data]'`."
        ) from None
    owner, _, method = needed.partition(".")
    if not hasattr(getattr(module, owner, None), method):
        raise DataError(
            f"the tokenizer needs {name} {version} or newer; run `pip install -U '{name}>={version}'`."
        )
    return module


def read_bytes(file: Path, most_bytes: int = MOST_TOKENIZER_BYTES) -> bytes:
    """Read a file of a tokenizer as bytes.

    Raises:
        DataError: the file cannot be read, is not a regular file, or has more than ``most_bytes``.
    """
    try:
        with open_regular(file) as stream:
            data = stream.read(most_bytes + 1)
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}; check the path and its permissions."
        ) from None
    if len(data) > most_bytes:
        raise DataError(
            f"{file} has more than {most_bytes >> 20} MiB, too many for a file of a tokenizer; check the file."
        )
    return data


def read_text(file: Path, most_bytes: int = MOST_TOKENIZER_BYTES) -> str:
    """Read a text file of a tokenizer.

    Raises:
        DataError: as `read_bytes`, or the file is not UTF-8.
    """
    try:
        return read_bytes(file, most_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"{file} is not UTF-8 text; the file is damaged or is not a tokenizer file."
        ) from None


def fingerprint_of(kind: str, *identity: Any) -> str:
    """Return a `Tokenizer.fingerprint`: ``kind``, and a hash of all that affects the encoding."""
    return f"{kind}:{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}"


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of generated tokens, without special tokens and outer white space.

    Tokens outside of the tokenizer's vocabulary have no text. A model can generate them if its
    ``--vocab-size`` is larger.
    """
    ids = [token for token in tokens if token < tokenizer.vocab_size]
    return tokenizer.decode(ids, skip_special=True).strip()


def known_tokens(ids: Ids, vocab_size: int) -> list[int]:
    """Return ``ids`` as a list of Python integers.

    Raises:
        DataError: a token is outside of the vocabulary.
    """
    tokens = [int(token) for token in ids]
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} is not in the tokenizer's vocabulary of {vocab_size} tokens."
            )
    return tokens


class ByteTokenizer(InProcess):
    """Tokenizer with one token for each byte of UTF-8 text.

    Bytes have the numbers 0 to 255, `OWN_SPECIAL_TOKENS` the numbers 256 to 259. The tokenizer
    needs no download and no training, but makes several times as many tokens as a learned
    vocabulary.
    """

    vocab_size = 256 + len(OWN_SPECIAL_TOKENS)
    eod_id = 256
    pad_id = 256 + OWN_SPECIAL_TOKENS.index(PADDING)
    special_tokens: Mapping[str, int] = {
        token: 256 + n for n, token in enumerate(OWN_SPECIAL_TOKENS)
    }
    template_variables: Mapping[str, str] = {
        "eos_token": END_OF_DOCUMENT,
        "bos_token": "",
        "pad_token": PADDING,
    }
    fingerprint = "bytes-1:" + ",".join(OWN_SPECIAL_TOKENS)

    @cached_property
    def _split(self) -> re.Pattern[str]:
        from megatron_packed.data.tokenizers.turn_markers import special_pattern

        return special_pattern(OWN_SPECIAL_TOKENS)

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        pieces = self._split.split(text) if special else [text]
        encoded = [self._piece(piece, at % 2 == 1) for at, piece in enumerate(pieces)]
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded)

    def _piece(self, piece: str, is_special: bool) -> TokenIds:
        if is_special:
            return np.array([self.special_tokens[piece]], np.int32)
        return np.frombuffer(piece.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str:
        raw = bytearray()
        for token in known_tokens(ids, self.vocab_size):
            if token < 256:
                raw.append(token)
            elif not skip_special:
                raw.extend(OWN_SPECIAL_TOKENS[token - 256].encode())
        return raw.decode("utf-8", errors="replace")


class NullTokenizer(InProcess):
    """Tokenizer for text that consists of token numbers separated by spaces.

    Use it for measurements, for debugging, and for indexed data sets whose tokenizer is missing.

    Args:
        vocab_size: size of the vocabulary; all numbers are smaller.
        eod_id: number of the end-of-document token; by default the last number.
    """

    special_tokens: Mapping[str, int] = {}
    template_variables: Mapping[str, str] = {}

    def __init__(self, vocab_size: int, eod_id: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod_id = self.pad_id = vocab_size - 1 if eod_id is None else eod_id
        self.fingerprint = f"numbers-1:{vocab_size}:{self.eod_id}"

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        numbers = text.split()
        for word in numbers:
            if not (
                word.isascii()
                and word.isdecimal()
                and len(word) < 11
                and int(word) < self.vocab_size
            ):
                raise BadLine(
                    "not_a_token_number",
                    f"{printable(word, 40)!r} is not a number below {self.vocab_size}",
                )
        return np.array(numbers, np.int32)

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str:
        tokens = known_tokens(ids, self.vocab_size)
        return " ".join(
            str(token) for token in tokens if not (skip_special and token == self.eod_id)
        )
