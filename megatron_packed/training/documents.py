"""The documents that a run's options name: opened, joined, and divided into those to train and to validate on."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from megatron_packed.config.blend import Blend
from megatron_packed.config.data import DataConfig
from megatron_packed.data.chat import chat_format
from megatron_packed.data.dataset import open_dataset
from megatron_packed.data.documents import Documents, JoinedDocuments, Range
from megatron_packed.data.errors import DataError
from megatron_packed.data.indexed import is_indexed
from megatron_packed.data.indexed_documents import IndexedDocuments
from megatron_packed.data.tokenizer import Tokenizer


class RunDocuments(NamedTuple):
    """What a run trains and validates on."""

    train: Documents
    valid: Documents | None
    sentences: list[str]
    """What was read for training and how it was divided, for people."""


def names_indexed(path: str) -> bool:
    """Whether a data path is the prefix of an indexed data set, and no file of that very name."""
    return not Path(path).exists() and is_indexed(path)


def open_documents(
    options: DataConfig, tokenizer: Tokenizer, *, validates: bool, show: bool = True, build_missing: bool = True
) -> RunDocuments:
    """Open the data that the options name, tokenising first what is text and not in the cache.

    Args:
        validates: whether validation data is wanted.
        show: print progress and warnings.
        build_missing: False: text that is not tokenised yet is an error.
    Raises:
        DataError: the data cannot be used.
    """
    opener = _Opener(options, tokenizer, show, build_missing)
    sources = opener.open(options.train_blend)
    sentences = [line for source in sources for line in source.sentences()]
    if options.split is not None:
        return _divided(options, sources, validates, sentences)
    train = _joined([Range(source, 0, len(source)) for source in sources], options.train_blend)
    valid = None
    if validates:
        try:
            sources = opener.open(options.valid_blend)
        except DataError as error:
            raise DataError(f"--valid-data-path: {error}") from None
        valid = _joined([Range(source, 0, len(source)) for source in sources], options.valid_blend)
    return RunDocuments(train, valid, sentences)


class _Opener:
    def __init__(self, options: DataConfig, tokenizer: Tokenizer, show: bool, build_missing: bool) -> None:
        self._options, self._tokenizer, self._show, self._build_missing = options, tokenizer, show, build_missing

    def open(self, blend: Blend) -> list[Documents]:
        """One source for each path; text files without weights are one together."""
        if blend.weights is None and not any(map(names_indexed, blend.paths)):
            return [self._text(blend.paths)]
        return [self._indexed(path) if names_indexed(path) else self._text((path,)) for path in blend.paths]

    def _text(self, paths: tuple[str, ...]) -> Documents:
        options = self._options
        return open_dataset(
            paths,
            self._tokenizer,
            chat_format("default", self._tokenizer, options.chat_template),
            sft=options.sft,
            cache_root=options.data_cache_path,
            max_bad_fraction=options.max_bad_fraction,
            show=self._show,
            build_missing=self._build_missing,
        )

    def _indexed(self, prefix: str) -> Documents:
        if self._options.sft:
            raise DataError(
                f"{prefix} is an indexed data set, which does not say what of its text are answers; leave --sft out, "
                "or give the conversations as JSONL."
            )
        return IndexedDocuments(prefix, vocab_size=self._tokenizer.vocab_size, eod_id=self._tokenizer.eod_id)


def _joined(ranges: list[Range], blend: Blend) -> Documents:
    """A single source as it is, so that its plan and its hash are its own."""
    if len(ranges) == 1 and ranges[0].stop - ranges[0].first == len(ranges[0].documents):
        return ranges[0].documents
    return JoinedDocuments(ranges, blend.weights if len(ranges) > 1 else None)


def _divided(
    options: DataConfig, sources: list[Documents], validates: bool, sentences: list[str]
) -> RunDocuments:
    """Every source divided by the proportions of --split, at the documents where Megatron divides it."""
    train_share, valid_share, _ = options.shares
    blend = options.train_blend
    train, valid = [], []
    for source, path in zip(sources, blend.paths):
        places = [_nearest(share * len(source)) for share in (train_share, train_share + valid_share)]
        train.append(Range(source, 0, places[0]))
        valid.append(Range(source, *places))
        for name, (_, first, stop), wanted in (("train", train[-1], True), ("validate", valid[-1], validates)):
            if first == stop and wanted:
                raise DataError(
                    f"--split {options.split} leaves no document of {path} ({len(source)} documents) to {name} on; "
                    "raise that proportion, or name the data of each by --train-data-path and --valid-data-path."
                )
    counts = [sum(part.stop - part.first for part in parts) for parts in (train, valid)]
    rest = sum(map(len, sources)) - sum(counts)
    unused = "" if validates else " (there is no --eval-interval)"
    sentences.append(
        f"Divided by --split {options.split}: {counts[0]} documents train, {counts[1]} validate{unused}, {rest} are "
        "left out."
    )
    return RunDocuments(_joined(train, blend), _joined(valid, blend) if validates else None, sentences)


def _nearest(place: Fraction) -> int:
    return round(place)  # half to even, as Megatron rounds
