"""The tokenizer and the documents that a run's options name: opened, joined, divided into training and validation."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from megatron_packed.config.blend import Blend
from megatron_packed.config.data import BYTES, GPT2, HUGGING_FACE, DataConfig
from megatron_packed.data.bpe import train_bpe
from megatron_packed.data.chat import chat_format
from megatron_packed.data.dataset import DEFAULT_CACHE_NAME, open_dataset
from megatron_packed.data.documents import Documents, JoinedDocuments, Range
from megatron_packed.data.errors import DataError
from megatron_packed.data.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_packed.data.indexed import is_indexed
from megatron_packed.data.indexed_documents import IndexedDocuments
from megatron_packed.data.tokenizer import ByteTokenizer, Tokenizer


class RunDocuments(NamedTuple):
    """What a run trains and validates on."""

    train: Documents
    valid: Documents | None
    sentences: list[str]
    """What was read for training and how it was divided, for people."""


def names_indexed(path: str) -> bool:
    """Whether a data path is the prefix of an indexed data set, and no file of that very name."""
    return not Path(path).exists() and is_indexed(path)


def build_tokenizer(
    options: DataConfig, say: Callable[[str], None] = lambda line: None, *, build_missing: bool = True
) -> Tokenizer:
    """The tokenizer that the options name; a trained one is trained once and cached beside the tokenised data.

    Raises:
        DataError: it cannot be used, or is not trained yet and ``build_missing`` is False.
    """
    if options.tokenizer_type == BYTES:
        return ByteTokenizer()
    if options.tokenizer_type == HUGGING_FACE:
        assert options.tokenizer_model is not None  # a rule of the configuration
        return HuggingFaceTokenizer(options.tokenizer_model)
    if options.tokenizer_type == GPT2:
        assert options.vocab_file is not None and options.merge_file is not None  # rules of the configuration
        return HuggingFaceTokenizer.gpt2(options.vocab_file, options.merge_file)
    indexed = [path for path in options.train_paths if names_indexed(path)]
    if indexed:
        raise DataError(
            f"{indexed[0]} is tokenised already, so no {options.tokenizer_type} can be trained on it; give the "
            "tokenizer that it was made with."
        )
    return train_bpe(
        options.train_paths,
        options.tokenizer_vocab_size,
        cache_root=options.data_cache_path or Path(options.train_paths[0]).parent / DEFAULT_CACHE_NAME,
        log=say,
        build_missing=build_missing,
    )


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
