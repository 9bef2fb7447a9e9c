"""Training of a byte-level BPE vocabulary on the training data, for runs without a tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.data_files import COMPRESSED_SUFFIXES
from megatron_packed.data.documents import border_of, drawing_order
from megatron_packed.data.errors import BadLine, DataError, NotTokenizedError
from megatron_packed.data.sources.cache_directory import open_or_build, opened
from megatron_packed.data.sources.data_report import place_and_reason
from megatron_packed.data.sources.jsonl_lines import MAX_LINE_BYTES
from megatron_packed.data.sources.line_schema import (
    FIELDS,
    Conversation,
    PromptCompletion,
    TokenSequence,
    parse_line,
)
from megatron_packed.data.sources.source_files import (
    expand_paths,
    file_identity,
    quarantine_of,
    reader_of,
)
from megatron_packed.data.sources.tokenize_files import BuildOptions, documents_of_lines
from megatron_packed.data.tokenizers.base import (
    END_OF_DOCUMENT,
    OWN_SPECIAL_TOKENS,
    PADDING,
    ByteTokenizer,
)
from megatron_packed.data.tokenizers.chat_format import ChatFormat
from megatron_packed.data.tokenizers.encode import SampleEncoder
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.huggingface_settings import CONFIG, TOKENIZER_JSON
from megatron_packed.packed.array_types import BoolArray

MIN_VOCAB_SIZE = 256 + len(OWN_SPECIAL_TOKENS)
TRAINING_BYTES = 64 * 2**20
"""Bytes of text that the vocabulary is learned from. More text changes the vocabulary little."""
_FORMAT = "bpe-1"
_NAMED = {"eos_token": END_OF_DOCUMENT, "pad_token": PADDING}


class Untrained(ByteTokenizer):
    """Stand-in for the trained tokenizer, used to count documents before the training.

    Each line gives the same number of documents as with the trained tokenizer: chat templates see
    the same special tokens, and every text that is not empty has tokens.
    """

    template_variables: Mapping[str, str] = _NAMED


class TrainingShare(NamedTuple):
    """Documents to learn from, if validation and test documents are in the same files."""

    of_documents: Fraction
    """Share of the documents of each path that are training data."""
    shuffled: bool
    """True if the share is drawn in `drawing_order`, False if it is the first documents."""
    sft: bool
    chat: ChatFormat
    """Chat format built with an `Untrained` tokenizer."""


def train_bpe(
    paths: Sequence[str | Path],
    vocab_size: int,
    cache_root: str | Path,
    *,
    share: TrainingShare | None = None,
    fields: DataFields | None = None,
    training_bytes: int = TRAINING_BYTES,
    before_training: Callable[[Sequence[Path], Path], None] = lambda files, quarantine: None,
    log: Callable[[str], None] = lambda line: None,
    build_missing: bool = True,
) -> HuggingFaceTokenizer:
    """Return a byte-level BPE tokenizer learned from ``paths``; train it first if it is missing.

    The tokenizer is stored in ``cache_root`` under a hash of data and options. The same data gives
    the same tokenizer: lines are chosen by their place in the files, and each file contributes an
    equal share of ``training_bytes``. Every special token of `base.OWN_SPECIAL_TOKENS` has a
    number. Any number of processes may call this function at once.

    Args:
        paths: see `source_files.expand_paths`; lines of any schema. Unusable lines are skipped (the
            data set counts them).
        vocab_size: largest size of the vocabulary. The vocabulary is smaller if the data has too
            few different pairs.
        share: the documents to learn from. None learns from all documents. Otherwise the data is
            read once more, to find the lines of the share.
        fields: names of the fields of the lines; None for the names of `line_schema`.
        before_training: check of the files; its second argument is a path for a list of bad lines.
        build_missing: False raises an error if the tokenizer is not trained yet.
    Raises:
        DataError: there is no usable text, or ``vocab_size`` is smaller than 256 bytes and the
            special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"{flags.TOKENIZER_VOCAB_SIZE} {vocab_size} is below {MIN_VOCAB_SIZE} (256 bytes and "
            f"{len(OWN_SPECIAL_TOKENS)} special tokens); choose a larger size."
        )
    # Paths of a blend may name a file more than once.
    each = [expand_paths([path], download=build_missing) for path in paths]
    files = list(dict.fromkeys(file for path_files in each for file in path_files))
    key = _key(files, paths, vocab_size, training_bytes, share, fields)
    directory = Path(cache_root) / f"tokenizer-{key}"
    if not build_missing and opened(directory, HuggingFaceTokenizer) is None:
        raise NotTokenizedError(
            f"the tokenizer of {', '.join(map(str, files))} is not trained yet: {cache_root} does not "
            "contain it; `megatron-packed packing` with the flags of the run trains it."
        )

    def build(temporary: Path) -> None:
        unusable: list[str] = []
        before_training(files, quarantine_of(directory))
        if share is not None:
            log("reading all data, to learn the vocabulary only from the training documents")
        chosen = None if share is None else _lines_of(share, paths, fields)
        texts = _texts(files, training_bytes, unusable, chosen, fields)
        (temporary / TOKENIZER_JSON).write_text(_train(texts, vocab_size, unusable), "utf-8")
        (temporary / CONFIG).write_text(json.dumps(_NAMED), encoding="utf-8")

    return open_or_build(directory, HuggingFaceTokenizer, build=build, log=log)


def files_of_trained(tokenizer: HuggingFaceTokenizer) -> dict[str, str]:
    """Return the texts of the files of a trained tokenizer, by file name."""
    return {TOKENIZER_JSON: tokenizer.text, CONFIG: json.dumps(_NAMED)}


def from_stored(text: str) -> HuggingFaceTokenizer:
    """Return the trained tokenizer with this tokenizer.json.

    Args:
        text: content of the tokenizer.json, from `files_of_trained`.
    Raises:
        DataError: the text is no tokenizer.json of such a tokenizer.
    """
    return HuggingFaceTokenizer.from_text(text, _NAMED, Path(TOKENIZER_JSON))


def _key(
    files: Sequence[Path],
    paths: Sequence[str | Path],
    vocab_size: int,
    training_bytes: int,
    share: TrainingShare | None,
    fields: DataFields | None,
) -> str:
    """Return a hash of everything that decides the vocabulary."""
    identity: list[object] = [
        _FORMAT,
        [file_identity(file) for file in files],
        vocab_size,
        training_bytes,
    ]
    if share is not None:
        each = [len(expand_paths([path])) for path in paths]
        identity += [each, str(share.of_documents), share.sft, share.chat.fingerprint]
        identity += ["shuffled"] * share.shuffled
    if fields is not None:
        identity.append(["fields", *fields.paths])
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _lines_of(
    share: TrainingShare, paths: Sequence[str | Path], fields: DataFields | None
) -> dict[Path, BoolArray]:
    """Mark the lines of each file, ``(lines,)``, of which all documents are in the share."""
    encoder = SampleEncoder(tokenizer=Untrained(), chat=share.chat)
    options = BuildOptions(sft=share.sft, max_bad_fraction=1.0, fields=fields)
    chosen: dict[Path, BoolArray] = {}
    for path in paths:
        counts = documents_of_lines(expand_paths([path]), encoder, options)
        documents = sum(int(count.sum()) for count in counts.values())
        trained = np.zeros(documents, np.int64)
        order = drawing_order(documents) if share.shuffled else np.arange(documents)
        trained[order[: border_of(share.of_documents, documents)]] = 1
        num_before, trained_before = 0, np.concatenate([[0], np.cumsum(trained)])
        for file, count in counts.items():
            ends = num_before + np.cumsum(count)
            trains = (count > 0) & (trained_before[ends] - trained_before[ends - count] == count)
            # A line of several paths must be in the training share of all of them.
            chosen[file] = trains & chosen.get(file, True)
            num_before += int(count.sum())
    return chosen


def _train(texts: Iterator[str], vocab_size: int, unusable: list[str]) -> str:
    """Return the text of a tokenizer.json."""
    first = next(texts, None)
    if first is None:
        why = (
            f"the first line cannot be used: {unusable[0]}."
            if unusable
            else f"check the data paths and {flags.SPLIT}."
        )
        raise DataError(f"the training data has no text to learn a vocabulary from; {why}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(OWN_SPECIAL_TOKENS),
        show_progress=False,
    )

    def all_texts() -> Iterator[str]:
        yield first
        yield from texts

    backend.train_from_iterator(all_texts(), trainer)
    # Not `save`: it raises no OSError if the disk is full.
    text: str = backend.to_str(pretty=True)
    return text


def _texts(
    files: Sequence[Path],
    training_bytes: int,
    unusable: list[str],
    chosen: Mapping[Path, BoolArray] | None,
    fields: DataFields | None,
) -> Iterator[str]:
    """Yield the texts to learn from.

    All lines of a file are used, or evenly spread lines of a file that is larger than its share of
    ``training_bytes``.

    Args:
        unusable: receives the place of the first line that cannot be used, and the reason.
        chosen: for each file ``(lines,)``, True for lines to learn from; None uses all lines.
    """
    share = training_bytes / len(files)
    for file in files:
        # compressed text takes about a quarter of its size
        is_packed = file.name.endswith((*COMPRESSED_SUFFIXES, ".parquet"))
        size = file.stat().st_size * (4 if is_packed else 1)
        these = None if chosen is None else chosen[file]
        part = 1.0 if these is None or not these.size else float(these.mean())
        every = max(1, int(size * part / max(share, 1)))
        num_characters = 0
        for line in reader_of(file, MAX_LINE_BYTES, FIELDS, fields):
            if line.reason is not None or line.is_blank or (line.number - 1) % every:
                continue
            try:
                texts = _texts_of_line(line.data, fields)
            except BadLine as error:
                if not unusable:
                    unusable.append(place_and_reason(file, line, error))
                continue
            if these is not None and not these[line.number - 1]:
                continue
            for text in texts:
                num_characters += len(text)
                yield text
            if num_characters > 2 * share:
                break


def _texts_of_line(data: bytes, fields: DataFields | None) -> list[str]:
    texts = []
    for sample in parse_line(data, fields):
        if isinstance(sample, Conversation):
            texts += [message["content"] for message in sample.messages]
        elif isinstance(sample, PromptCompletion):
            texts += [sample.prompt, sample.completion]
        elif isinstance(sample, TokenSequence):
            raise DataError(
                "the data has token numbers (`input_ids`), from which no vocabulary can be learned; give the "
                f"tokenizer that made them with {flags.TOKENIZER_MODEL}."
            )
        else:
            texts.append(sample.text)
    return texts
