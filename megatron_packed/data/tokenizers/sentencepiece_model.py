"""Tokenizer that reads a SentencePiece ``.model`` with the `sentencepiece` library.

Plain text is encoded exactly as the library does, except for pieces that are marks (see
`SentencePieceTokenizer`), which are encoded as ordinary characters. The library never encodes text
as control symbols (``<s>``, ``</s>``).

Many models put a space before a text. In the text of a template, this space is put only before the
beginning, not after each special token. Decoding therefore returns the encoded text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import (
    Ids,
    InProcess,
    Offsets,
    TokenIds,
    fingerprint_of,
    known_tokens,
    optional_package,
    probe_splits,
    read_bytes,
)
from megatron_packed.data.tokenizers.turn_markers import special_pattern

_MARK = re.compile(r"<\|\S+\|>|<(start|end)_of_\w+>")
_CONTROL, _USER_DEFINED = 3, 4
"""Types of pieces in a model file."""
_NO_SPACE_BEFORE = b"\x1a\x02\x18\x00"
"""Protobuf bytes of ``normalizer_spec { add_dummy_prefix: false }``.

Appended to a model file, they override that setting of the file.
"""


class SentencePieceTokenizer(InProcess):
    """Tokenizer of a SentencePiece model; see `base.Tokenizer` for the attributes.

    The special tokens are:

    - the control symbols of the model;
    - user-defined symbols of the model that look like marks (``<|...|>``, ``<start_of_turn>``) or
      are in ``special_tokens``;
    - other names in ``special_tokens``, with numbers after the pieces of the model.

    Args:
        path: the ``.model`` file.
        special_tokens: spellings of further special tokens.
    Raises:
        DataError: the package is missing or too old, or the file is damaged or has no end of
            sentence.
    """

    def __init__(self, path: str | Path, special_tokens: Sequence[str] = ()) -> None:
        file = Path(path)
        model = read_bytes(file)
        processor = _load(file, model)
        pieces = list(_pieces(model))
        self.path = file
        self._num_pieces = len(pieces)
        numbers = {piece.content: number for number, piece in enumerate(pieces)}
        marks = {
            p.content
            for p in pieces
            if p.kind == _USER_DEFINED
            and (p.content in special_tokens or _MARK.fullmatch(p.content))
        }
        new = dict.fromkeys(content for content in special_tokens if content not in numbers)
        self.special_tokens: Mapping[str, int] = {
            **{
                p.content: n
                for n, p in enumerate(pieces)
                if p.kind == _CONTROL or p.content in marks
            },
            **{content: numbers[content] for content in special_tokens if content in numbers},
            **{content: self._num_pieces + n for n, content in enumerate(new)},
        }
        self.vocab_size = self._num_pieces + len(new)
        if processor.eos_id() < 0:
            raise DataError(
                f"{file} has no end-of-sentence token (eos_id), which is needed to end documents; train the model with "
                "an eos_id."
            )
        self.eod_id: int = processor.eos_id()
        self.pad_id: int = processor.pad_id() if processor.pad_id() >= 0 else self.eod_id
        named = {
            "bos_token": processor.bos_id(),
            "eos_token": self.eod_id,
            "pad_token": self.pad_id,
        }
        self.template_variables: Mapping[str, str] = {
            name: pieces[number].content if number >= 0 else "" for name, number in named.items()
        }
        self._content = {number: content for content, number in self.special_tokens.items()}
        self._split = special_pattern(self.special_tokens)
        without_marks = _as_control(model, pieces, marks)
        self._processor = _load(file, without_marks)
        self._going_on = _load(file, without_marks + _NO_SPACE_BEFORE)
        self.splits_cleanly = probe_splits(self)
        self.fingerprint = fingerprint_of(
            "sentencepiece-1",
            hashlib.sha256(model).hexdigest(),
            sorted(self.special_tokens.items()),
        )

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        if special:
            return [self.encode_with_offsets(text, special=True)[0] for text in texts]
        ids: list[TokenIds] = self._processor.encode(
            list(texts), return_type="numpy", num_threads=1
        )
        return ids

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[TokenIds, Offsets]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for place, part in enumerate(self._split.split(text) if special else [text]):
            if place % 2:
                ids.append(self.special_tokens[part])
                offsets.append((at, at + len(part)))
            elif part:
                processor = self._going_on if at else self._processor
                encoded = processor.encode(part, return_type="offset_mapping")
                ids += encoded["ids"]
                offsets += [(at + start, at + end) for start, end in encoded["offsets"]]
            at += len(part)
        return np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str:
        tokens = known_tokens(ids, self.vocab_size)
        text, run = "", []
        for number, token in enumerate([*tokens, None]):
            if token is not None and token not in self._content:
                run.append(token)
                continue
            if run:
                processor = self._processor if number == len(run) else self._going_on
                text += processor.decode(run)
                run = []
            if token is not None and not skip_special:
                text += self._content[token]
        return text


def _load(file: Path, model: bytes) -> Any:
    sentencepiece = optional_package(
        "sentencepiece", "0.2.3", "SentencePieceProcessor.EncodeAsOffsetMapping"
    )
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError:
        raise DataError(
            f"{file} is not a SentencePiece model; check that the file is the right one and not damaged."
        ) from None
    return processor


# --------------------------------------------------------------------------------------------------
# parsing of the model file


class _Piece(NamedTuple):
    content: str
    kind: int
    """Type of the piece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    kind_at: int
    """Index of the kind in the model's bytes; 0 if the model does not store the kind."""


def _pieces(model: bytes) -> Iterator[_Piece]:
    """Yield the pieces of a model.

    A piece is a field 1 of the protobuf message. Within a piece, field 1 is the content and field 3
    the kind. The library has read the model before, so the bytes are valid protobuf.
    """
    for field, start, end in _fields(model, 0, len(model)):
        if field != 1:
            continue
        content, kind, kind_at = "", 1, 0
        for inner, first, last in _fields(model, start, end):
            if inner == 1:
                content = model[first:last].decode("utf-8", "surrogateescape")
            elif inner == 3:
                kind, kind_at = model[first], first
        yield _Piece(content, kind, kind_at)


def _as_control(model: bytes, pieces: Sequence[_Piece], marks: set[str]) -> bytes:
    """Return the model with ``marks`` as control symbols, which the library never finds in text."""
    changed = bytearray(model)
    for piece in pieces:
        if piece.content in marks:
            changed[piece.kind_at] = _CONTROL
    return bytes(changed)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(number, start, stop)`` of each field of a protobuf message.

    The value of a field is ``data[start:stop]``.
    """
    while at < end:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            _, stop = _varint(data, at)
        elif wire == 2:
            length, at = _varint(data, at)
            stop = at + length
        else:
            stop = at + (8 if wire == 1 else 4)
        yield tag >> 3, at, stop
        at = stop


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
