"""Encoding of a chunk of lines for an indexed data set, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config.data_fields import DataFields
from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.data.index.indexed_file import token_type
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.sources.line_fields import renamed
from megatron_packed.data.sources.strict_json import parse_object
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import TextPiece
from megatron_packed.data.tokenizers.encode import encode_pieces

if TYPE_CHECKING:
    from megatron_packed.data.index.preprocess import PreprocessOptions


class Encoded(NamedTuple):
    """Documents of a chunk of lines."""

    tokens: tuple[NDArray[np.integer], ...]
    """For each key, the concatenated documents of all good lines."""
    lengths: tuple[NDArray[np.int32], ...]
    """For each key, the number of tokens of each document, ``(good lines,)``."""
    blank: int
    bad: list[tuple[int, BadLine]]
    """Place in the chunk of each bad line, and the reason."""


def encode_chunk(
    lines: Sequence[RawLine], tokenizer: Tokenizer, options: PreprocessOptions
) -> Encoded:
    """Encode the documents of a chunk of lines, and list the bad lines.

    Raises:
        DataError: the tokenizer makes tokens outside of its vocabulary.
    """
    texts: list[list[str]] = []
    bad: list[tuple[int, BadLine]] = []
    places, blank = [], 0
    for place, line in enumerate(lines):
        try:
            found = texts_of_line(line, options.keys, options.fields)
        except BadLine as error:
            bad.append((place, error))
            continue
        if found:
            texts.append(found)
            places.append(place)
        else:
            blank += line.count
    good: list[list[NDArray[np.int32]]] = []
    for place, ids in zip(places, _encoded(texts, tokenizer)):
        if isinstance(ids, BadLine):
            bad.append((place, ids))
        else:
            good.append(ids)
    end = np.full(int(options.append_eod), tokenizer.eod_id, np.int32)
    dtype = token_type(tokenizer.vocab_size)
    tokens, lengths = [], []
    for key in range(len(options.keys)):
        joined = np.concatenate([part for ids in good for part in (ids[key], end)] or [end[:0]])
        _check_tokens(joined, tokenizer)
        tokens.append(joined.astype(dtype))
        lengths.append(np.array([len(ids[key]) + len(end) for ids in good], np.int32))
    return Encoded(tuple(tokens), tuple(lengths), blank, sorted(bad, key=lambda item: item[0]))


def texts_of_line(line: RawLine, keys: Sequence[str], fields: DataFields | None) -> list[str]:
    """Return the text of every key of a line; an empty list for a blank line.

    Raises:
        BadLine: the line cannot be used, with the reason.
    """
    if line.reason is not None:
        raise BadLine(line.reason)
    if line.is_blank:
        return []
    value = parse_object(line.data)
    if fields is not None:
        value = renamed(value, fields)
    for key in keys:
        if key not in value:
            raise BadLine("missing_key", printable(key, 40))
        if not isinstance(value[key], str):
            raise BadLine("wrong_type", f"{printable(key, 40)} is not a string")
        if not value[key].strip():
            raise BadLine("empty_text", printable(key, 40))
    return [value[key] for key in keys]


def _encoded(
    texts: list[list[str]], tokenizer: Tokenizer
) -> list[list[NDArray[np.int32]] | BadLine]:
    """Return the tokens of every key of every line.

    All lines are encoded at once. If the tokenizer raises an error, the lines are encoded one by
    one, so that only bad lines are rejected.
    """
    try:
        whole = encode_pieces(
            tokenizer, [[TextPiece(text, True, False)] for of_line in texts for text in of_line]
        )
    except (DataError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if len(texts) == 1:
            return [BadLine("tokenizer_failed", printable(f"{type(error).__name__}: {error}", 80))]
        return [outcome for of_line in texts for outcome in _encoded([of_line], tokenizer)]
    outcomes: list[list[NDArray[np.int32]] | BadLine] = []
    documents = iter(whole)
    for of_line in texts:
        found = [next(documents) for _ in of_line]
        bad = next((document for document in found if isinstance(document, BadLine)), None)
        ids = [document.ids for document in found if not isinstance(document, BadLine)]
        if bad is None and not all(map(len, ids)):
            bad = BadLine("no_trainable_token")
        outcomes.append(bad or ids)
    return outcomes


def _check_tokens(ids: NDArray[np.int32], tokenizer: Tokenizer) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer made token numbers from {ids.min()} to {ids.max()}, but its vocabulary has "
            f"{tokenizer.vocab_size} tokens; use tokenizer files that belong together."
        )
