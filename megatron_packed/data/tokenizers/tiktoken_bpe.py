"""Tokenizer that encodes with the `tiktoken` library and numbers tokens as Megatron does.

With S special tokens, token n < S is the n-th special token. Token S + r is the byte sequence of
rank r in the vocabulary file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.data.tokenizers.base import (
    Ids,
    InProcess,
    TokenIds,
    fingerprint_of,
    known_tokens,
    optional_package,
    read_bytes,
)

UNKNOWN, BEGIN, END, PADDING = "<unk>", "<s>", "</s>", "<pad>"
SPECIAL_TOKENS = (UNKNOWN, BEGIN, END, "<mask>", PADDING, "<cls>", "<sep>")
"""Default names of the first special tokens. Special tokens without a name are called
``<SPECIAL_n>``.
"""
MAX_VOCAB_SIZE = 2**17
"""Largest vocabulary, including special tokens, if no size is given; the same as in Megatron."""

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS = {
    "v1": "|".join(
        (
            # letters, with at most one character before them that is not a line end
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            r"\p{N}",  # every digit is a separate piece
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",  # punctuation, with the line ends after it
            r"\s*[\r\n]",
            r"\s+(?!\S)",  # spaces except the last one, which belongs to the next word
            r"\s+",
        )
    ),
    "v2": "|".join(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",  # a word ends before a capital letter
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
"""Values of ``--tiktoken-pattern``: patterns that cut text into pieces before bytes are merged."""


class TikTokenizer(InProcess):
    """Tokenizer of a tiktoken vocabulary; see `base.Tokenizer` for the attributes.

    Args:
        path: a JSON list of ``{"rank", "token_bytes" (base64), "token_str"}``, or lines of base64
            and rank as in tiktoken's own files; ranks count from 0.
        pattern: a key of `PATTERNS`.
        special_tokens: names of the first special tokens, including ``<unk>``, ``<s>`` and
            ``</s>``.
        num_special_tokens: S, the number of special tokens; at least the number of names.
        vocab_size: number of all tokens. The first ``vocab_size - S`` entries of the file are used.
            By default all entries are used, up to `MAX_VOCAB_SIZE` tokens.
    Raises:
        DataError: the package is missing, or the file is damaged or too short.
    """

    def __init__(
        self,
        path: str | Path,
        pattern: str = "v2",
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        num_special_tokens: int = 1000,
        vocab_size: int | None = None,
    ) -> None:
        tiktoken = optional_package("tiktoken", "0.9", "Encoding.encode_to_numpy")
        file = Path(path)
        data = read_bytes(file)
        wanted = max((vocab_size or MAX_VOCAB_SIZE) - num_special_tokens, 0)
        sequences = _read_vocabulary(file, data)[:wanted]
        if vocab_size is not None and len(sequences) < wanted:
            raise DataError(
                f"{file} has {len(sequences)} entries, but {flags.VOCAB_SIZE} {vocab_size} minus "
                f"{num_special_tokens} special tokens needs {wanted}; leave the option out, or give "
                f"{len(sequences) + num_special_tokens}."
            )
        _check_bytes(file, sequences)
        named = (
            *special_tokens,
            *(f"<SPECIAL_{n}>" for n in range(len(special_tokens), num_special_tokens)),
        )
        self.path = file
        self.special_tokens: Mapping[str, int] = {content: n for n, content in enumerate(named)}
        self.vocab_size = num_special_tokens + len(sequences)
        self.eod_id = self.special_tokens[END]
        self.pad_id = self.special_tokens.get(PADDING, self.eod_id)
        names = {"unk_token": UNKNOWN, "bos_token": BEGIN, "eos_token": END, "pad_token": PADDING}
        self.template_variables: Mapping[str, str] = {
            name: content for name, content in names.items() if content in self.special_tokens
        }
        self._num_special = num_special_tokens
        self._encoding = tiktoken.Encoding(
            name=file.name,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={
                content: num_special_tokens + rank for rank, content in enumerate(sequences)
            },
            special_tokens=dict(self.special_tokens),
        )
        self.fingerprint = fingerprint_of(
            "tiktoken-1",
            hashlib.sha256(data).hexdigest(),
            PATTERNS[pattern],
            named,
            self.vocab_size,
        )

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        allowed: Any = "all" if special else set()
        try:
            ids: TokenIds = self._encoding.encode_to_numpy(
                text, allowed_special=allowed, disallowed_special=()
            )
        except BaseException as error:
            # For a million spaces in a row the library raises an error. In some versions the error
            # is a Rust panic, which is not an Exception.
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            raise BadLine("tokenizer_failed", printable(str(error), 80)) from None
        return ids.astype(np.int32)

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str:
        tokens = known_tokens(ids, self.vocab_size)
        shown = [token for token in tokens if not (skip_special and token < self._num_special)]
        data: bytes = self._encoding.decode_bytes(shown)
        return data.decode("utf-8", errors="replace")


def _read_vocabulary(file: Path, data: bytes) -> list[bytes]:
    """Return the byte sequences of a vocabulary file in the order of their ranks.

    Raises:
        DataError: the file is neither a JSON list nor lines of base64 and rank, its ranks are not
            0, 1, 2, ..., or two ranks have the same bytes.
    """
    is_json = data.lstrip()[:1] == b"["
    try:
        entries: Iterable[tuple[Any, Any]] = _lines(data)
        if is_json:
            entries = ((entry["rank"], entry["token_bytes"]) for entry in json.loads(data))
        pairs = [(int(rank), base64.b64decode(content, validate=True)) for rank, content in entries]
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise DataError(
            f"{file} is not a tiktoken vocabulary, which is a JSON list of rank, token_bytes and token_str, or lines "
            f"of base64 and rank ({printable(f'{type(error).__name__}: {error}', 80)}); give another file."
        ) from None
    ranked = dict(pairs)
    if sorted(rank for rank, _ in pairs) != list(range(len(pairs))):
        raise DataError(
            f"{file} is not a tiktoken vocabulary: its ranks are not 0, 1, 2 and so on; give another file."
        )
    sequences = [ranked[rank] for rank in range(len(ranked))]
    if len(set(sequences)) < len(sequences):
        raise DataError(
            f"{file} is not a tiktoken vocabulary: two ranks have the same bytes; give another file."
        )
    return sequences


def _lines(data: bytes) -> Iterable[tuple[Any, Any]]:
    for line in data.splitlines():
        if line.strip():
            content, rank = line.split()
            yield rank, content


def _check_bytes(file: Path, sequences: Sequence[bytes]) -> None:
    """Check that every byte is a token, because the library crashes on text without tokens.

    Raises:
        DataError: the vocabulary lacks a single byte.
    """
    missing = {bytes([value]) for value in range(256)} - set(sequences)
    if missing:
        raise DataError(
            f"{file} has no entry for {len(missing)} of the 256 single bytes among the {len(sequences)} entries used. "
            f"Some text could not be encoded; give another file, or a larger {flags.VOCAB_SIZE}."
        )
