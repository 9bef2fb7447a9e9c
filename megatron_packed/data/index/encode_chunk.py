"""Encoding of a chunk of lines for an indexed data set, in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.sections.data_parts.tokenizer import TOKENS
from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.data.index.indexed_file import token_type
from megatron_packed.data.notes import Notes
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.sources.line_fields import renamed
from megatron_packed.data.sources.strict_json import parse_object
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import TextPiece
from megatron_packed.data.tokenizers.encode import (
    TextNotes,
    encode_pieces,
    with_special_tokens,
)
from megatron_packed.packed.array_types import Int32Array, IntegerArray

if TYPE_CHECKING:
    from megatron_packed.data.index.preprocess import PreprocessOptions


class Encoded(NamedTuple):
    """Documents of a chunk of lines."""

    tokens: tuple[IntegerArray, ...]
    """For each key, the concatenated documents of all good lines."""
    lengths: tuple[Int32Array, ...]
    """For each key, the number of tokens of each document, ``(documents,)``. A line makes one
    document, or one for each element that a path with ``[*]`` takes.
    """
    good: int
    """Lines that became documents."""
    blank: int
    bad_lines: list[tuple[int, BadLine]]
    """Place in the chunk of each bad line, and the reason."""
    notes: list[Notes]
    """Notes of the good lines that have notes."""


def encode_chunk(
    lines: Sequence[RawLine], tokenizer: Tokenizer, options: PreprocessOptions
) -> Encoded:
    """Encode the documents of a chunk of lines, and list the bad lines.

    Raises:
        DataError: the tokenizer makes tokens outside of its vocabulary.
    """
    texts: list[list[str]] = []
    bad_lines: list[tuple[int, BadLine]] = []
    places, blank = [], 0
    for place, line in enumerate(lines):
        try:
            line_texts = texts_of_line(line, options.keys, options.fields)
        except BadLine as error:
            bad_lines.append((place, error))
            continue
        if line_texts:
            texts.append(line_texts)
            places.append(place)
        else:
            blank += line.num_lines
    good: list[list[Int32Array]] = []
    notes: list[Notes] = []
    special = options.special_tokens_in_text == TOKENS
    for place, of_line, ids in zip(places, texts, _encoded(texts, tokenizer, special)):
        if isinstance(ids, BadLine):
            bad_lines.append((place, ids))
        else:
            good.append(ids)
            notes.append(_notes(of_line, None if special else options.text_notes))
    notes = [of_line for of_line in notes if of_line]
    end = np.full(int(options.append_eod), tokenizer.eod_id, np.int32)
    dtype = token_type(tokenizer.vocab_size)
    tokens, lengths = [], []
    for key in range(len(options.keys)):
        documents = [ids for of_line in good for ids in of_line[key :: len(options.keys)]]
        joined = np.concatenate([part for ids in documents for part in (ids, end)] or [end[:0]])
        _check_tokens(joined, tokenizer)
        tokens.append(joined.astype(dtype))
        lengths.append(np.array([len(ids) + len(end) for ids in documents], np.int32))
    bad_lines.sort(key=lambda item: item[0])
    return Encoded(tuple(tokens), tuple(lengths), len(good), blank, bad_lines, notes)


def _notes(texts: Sequence[str], search: TextNotes | None) -> Notes:
    """Return the special tokens that the texts of a line spell as letters."""
    if search is None:
        return Counter()
    return sum((search.find(text) for text in texts), Counter())


def texts_of_line(line: RawLine, keys: Sequence[str], fields: DataFields | None) -> list[str]:
    """Return the text of every key of each document of a line; an empty list for a blank line.

    Raises:
        BadLine: the line cannot be used, with the reason.
    """
    if line.reason is not None:
        raise BadLine(line.reason)
    if line.is_blank:
        return []
    value = parse_object(line.data)
    values = [value] if fields is None else renamed(value, fields)
    return [_text(value, key) for value in values for key in keys]


def _text(value: dict[str, Any], key: str) -> str:
    if key not in value:
        raise BadLine("missing_key", printable(key, 40))
    text = value[key]
    if not isinstance(text, str):
        raise BadLine("wrong_type", f"{printable(key, 40)} is not a string")
    if not text.strip():
        raise BadLine("empty_text", printable(key, 40))
    return text


def _encoded(
    texts: list[list[str]], tokenizer: Tokenizer, special: bool
) -> list[list[Int32Array] | BadLine]:
    """Return the tokens of every key of every line.

    All lines are encoded at once. If the tokenizer raises an error, the lines are encoded one by
    one, so that only bad lines are rejected.

    Args:
        special: encode special tokens that a text spells as such.
    """
    pieces = [[TextPiece(text, True, special)] for of_line in texts for text in of_line]
    if special:
        pieces = [with_special_tokens(tokenizer, of_text) for of_text in pieces]
    try:
        encoded = encode_pieces(tokenizer, pieces)
    except (DataError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if len(texts) == 1:
            return [BadLine("tokenizer_failed", printable(f"{type(error).__name__}: {error}", 80))]
        return [outcome for of_line in texts for outcome in _encoded([of_line], tokenizer, special)]
    outcomes: list[list[Int32Array] | BadLine] = []
    documents = iter(encoded)
    for of_line in texts:
        line_documents = [next(documents) for _ in of_line]
        bad_line = next(
            (document for document in line_documents if isinstance(document, BadLine)), None
        )
        ids = [document.ids for document in line_documents if not isinstance(document, BadLine)]
        if bad_line is None and not all(map(len, ids)):
            bad_line = BadLine("no_trainable_token")
        outcomes.append(bad_line or ids)
    return outcomes


def _check_tokens(ids: Int32Array, tokenizer: Tokenizer) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer made token numbers from {ids.min()} to {ids.max()}, but its vocabulary has "
            f"{tokenizer.vocab_size} tokens; use tokenizer files that belong together."
        )
