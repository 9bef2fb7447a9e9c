"""What the package needs of a tokenizer, and the built-in byte tokenizer.

Text is encoded in one of two modes. **Plain** is for everything that people wrote: a special token spelt in it
(``<|endoftext|>`` in a web page, ``<|im_end|>`` in a user's message) is ordinary characters. **With specials** is for
what a chat template printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.errors import DataError

TokenIds = NDArray[np.int32]
Offsets = NDArray[np.int64]
"""``(L, 2)``: first and one-past-last character of each token."""

END_OF_DOCUMENT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
PADDING = "<|padding|>"
OWN_SPECIAL_TOKENS = (END_OF_DOCUMENT, TURN_START, TURN_END, PADDING)
"""Special tokens of the tokenizers that we make."""


class Tokenizer(Protocol):
    """Immutable, and usable from several threads."""

    vocab_size: int
    """Largest token number + 1."""
    eod_id: int
    """End of document; appended to every document and always trained."""
    pad_id: int
    """Equal to ``eod_id`` where the tokenizer has none. Nothing is ever masked because of its number."""
    prefix_ids: tuple[int, ...]
    """What the tokenizer puts before a text (beginning of sequence); not used where a chat template decides."""
    special_tokens: Mapping[str, int]
    """Spelling -> number of the tokens that only a template may produce."""
    splits_cleanly: bool
    """Whether encoding pieces one by one gives the same text back as encoding them together, and special tokens split
    the text around them without touching it. False for tokenizers that put a space before what they encode."""
    chat_template: str | None
    """jinja2 source that came with the tokenizer."""
    template_variables: Mapping[str, str]
    """``bos_token``, ``eos_token`` and the like, as the template expects them."""
    fingerprint: str
    """Changes whenever any text could be encoded differently."""

    def encode(self, text: str, *, special: bool = False) -> TokenIds: ...

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]: ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = False) -> str: ...


class OffsetTokenizer(Tokenizer, Protocol):
    """What a tokenizer that does not split cleanly must offer besides."""

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[TokenIds, Offsets]: ...


def vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> int:
    """Entries of a model's vocabulary before padding: ``--vocab-size``, else the tokenizer's.

    Raises:
        DataError: there is no room for all of the tokenizer's.
    """
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size} has no room for the {tokenizer.vocab_size} entries of the tokenizer; leave it "
            "out, or give at least as many."
        )
    return vocab_size or tokenizer.vocab_size


class ByteTokenizer:
    """Every byte of UTF-8 is a token (0 to 255), followed by `OWN_SPECIAL_TOKENS` (256 to 259).

    Nothing to download and nothing to train; a few times more tokens than a learned vocabulary.
    """

    vocab_size = 256 + len(OWN_SPECIAL_TOKENS)
    eod_id = 256
    pad_id = 256 + OWN_SPECIAL_TOKENS.index(PADDING)
    prefix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, int] = {token: 256 + n for n, token in enumerate(OWN_SPECIAL_TOKENS)}
    splits_cleanly = True
    chat_template: str | None = None
    template_variables: Mapping[str, str] = {"eos_token": END_OF_DOCUMENT, "bos_token": "", "pad_token": PADDING}
    fingerprint = "bytes-1:" + ",".join(OWN_SPECIAL_TOKENS)
    _split = re.compile("(" + "|".join(map(re.escape, OWN_SPECIAL_TOKENS)) + ")")

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

    def decode(self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = False) -> str:
        raw = bytearray()
        for token in map(int, ids):
            if 0 <= token < 256:
                raw.append(token)
            elif not 0 <= token < self.vocab_size:
                raise DataError(f"token {token} is outside of the byte tokenizer's vocabulary of {self.vocab_size}.")
            elif not skip_special:
                raw.extend(OWN_SPECIAL_TOKENS[token - 256].encode())
        return raw.decode("utf-8", errors="replace")
