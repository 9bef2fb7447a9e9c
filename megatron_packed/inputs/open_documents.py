"""Tokenizer and documents of a run: opened, joined, and divided into train, validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megatron_packed.config.data_blend import BlendedPaths
from megatron_packed.config.hub_paths import MODEL
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import SHUFFLED, DataConfig
from megatron_packed.config.sections.data_parts.tokenizer import (
    BYTES,
    GPT2,
    HUGGING_FACE,
    MODEL_FILES,
    NULL,
    SENTENCEPIECE,
)
from megatron_packed.data.documents import (
    DocumentRange,
    Documents,
    JoinedDocuments,
    ShuffledDocuments,
    border_of,
)
from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.source_files import expand_paths, index_path, names_indexed
from megatron_packed.data.sources.tokenize_files import BuildOptions, check_before_building
from megatron_packed.data.sources.tokenized_dataset import cache_directory, open_dataset
from megatron_packed.data.tokenizers.base import ByteTokenizer, NullTokenizer, Tokenizer
from megatron_packed.data.tokenizers.chat_format import ChatFormat, chat_format

if TYPE_CHECKING:
    from megatron_packed.data.tokenizers.bpe_training import TrainingShare

VALIDATION, TEST = "validation", "test"
"""Names of the data in messages."""


class RunDocuments(NamedTuple):
    """Documents that a run trains, validates and tests on."""

    train: Documents
    valid: Documents | None
    test: Documents | None
    sentences: list[str]
    """Sentences about the files that were read and how their documents were divided."""
    valid_sets: Mapping[str, Documents] = MappingProxyType({})
    """Name of a set -> its part of ``valid``, with ``--multiple-validation-sets``."""

    @property
    def evaluated(self) -> dict[str, Documents]:
        """``validation`` and ``test`` -> documents, for the data that the run has.

        With several validation sets, the keys ``validation (NAME)`` replace ``validation``.
        """
        both = {VALIDATION: self.valid, TEST: self.test}
        if self.valid_sets:
            sets = {
                f"{VALIDATION} ({name})": documents for name, documents in self.valid_sets.items()
            }
            both = {**sets, TEST: self.test}
        return {name: documents for name, documents in both.items() if documents is not None}


def build_tokenizer(
    options: DataConfig,
    vocab_size: int | None,
    say: Callable[[str], None] = lambda line: None,
    *,
    build_missing: bool = True,
    check_data: bool = True,
    trained: str | None = None,
    show: bool = True,
) -> Tokenizer:
    """Return the tokenizer that the options name.

    A tokenizer that is trained on the data is cached in the data's directory.

    Args:
        options: options of the data.
        vocab_size: the model's ``--vocab-size``, which limits the vocabulary of some tokenizers.
        say: prints a line of text.
        build_missing: train a tokenizer that is not in the cache; otherwise an error is raised.
        check_data: check the first lines of the data of a run before a tokenizer is trained on it.
        trained: tokenizer.json of a checkpoint (`StoredFiles.trained_tokenizer`); if it is not
            None, no tokenizer is trained.
        show: print counts of these lines, and progress.
    Raises:
        DataError: the tokenizer cannot be used, or is not trained and ``build_missing`` is False.
    """
    if options.tokenizer_type == BYTES:
        return ByteTokenizer()
    if options.tokenizer_type in MODEL_FILES:
        from megatron_packed.data.sources.hub import local_path

        assert options.tokenizer_model is not None  # checked by the configuration
        path = local_path(options.tokenizer_model, MODEL, say, download=build_missing)
        return _tokenizer_of_file(options, path, vocab_size)
    if options.tokenizer_type == GPT2:
        from megatron_packed.data.tokenizers.untrusted_tokenizer import UntrustedTokenizer

        # Checked by the configuration.
        assert options.vocab_file is not None and options.merge_file is not None
        return UntrustedTokenizer("vocab.json", options.vocab_file, options.merge_file)
    if options.tokenizer_type == NULL:
        assert vocab_size is not None  # checked by the configuration
        return NullTokenizer(vocab_size, options.null_tokenizer_eod_id)
    if trained is not None:
        from megatron_packed.data.tokenizers.bpe_training import from_stored

        return from_stored(trained)
    return _trained_tokenizer(options, say, build_missing, check_data, show)


def _tokenizer_of_file(options: DataConfig, path: str, vocab_size: int | None) -> Tokenizer:
    """Return the tokenizer of the file or directory that --tokenizer-model names."""
    from megatron_packed.data.tokenizers.tiktoken_bpe import SPECIAL_TOKENS
    from megatron_packed.data.tokenizers.untrusted_tokenizer import UntrustedTokenizer

    if options.tokenizer_type == HUGGING_FACE:
        return UntrustedTokenizer("tokenizer.json", path)
    if options.tokenizer_type == SENTENCEPIECE:
        return UntrustedTokenizer("sentencepiece", path, options.tokenizer_special_tokens)
    return UntrustedTokenizer(
        "tiktoken",
        path,
        options.tiktoken_pattern,
        options.tokenizer_special_tokens or SPECIAL_TOKENS,
        options.tiktoken_num_special_tokens,
        vocab_size,
    )


def _trained_tokenizer(
    options: DataConfig,
    say: Callable[[str], None],
    build_missing: bool,
    check_data: bool,
    show: bool,
) -> Tokenizer:
    """Return a tokenizer trained on the run's own data."""
    from megatron_packed.data.tokenizers.bpe_training import train_bpe

    if not options.train_paths:
        raise DataError("there is no data to train a tokenizer on.")
    indexed = [path for path in options.train_paths if names_indexed(path)]
    if indexed:
        raise DataError(
            f"{indexed[0]} is tokenised already, so no {options.tokenizer_type} can be trained on it; give the "
            "tokenizer that it was made with."
        )
    checked = BuildOptions.from_config(options, show)

    def before_training(files: Sequence[Path], quarantine: Path) -> None:
        if check_data:
            check_before_building(files, checked, quarantine)

    first = options.train_paths[0]
    with _training_share(options) as share:
        return train_bpe(
            options.train_paths,
            options.tokenizer_vocab_size,
            cache_root=cache_directory(first, [Path(first)], options.data_cache_path),
            share=share,
            fields=options.fields,
            before_training=before_training,
            log=say,
            build_missing=build_missing,
        )


@contextmanager
def _training_share(options: DataConfig) -> Iterator[TrainingShare | None]:
    """Yield the share of the data from which a vocabulary may be learned; None for all of it.

    Documents that --split reserves for validation and test are excluded.
    """
    if options.shares[0] == 1:
        yield None
        return
    from megatron_packed.data.tokenizers.bpe_training import TrainingShare, Untrained

    chat = chat_format_of(options, Untrained())
    try:
        yield TrainingShare(options.shares[0], options.split_order == SHUFFLED, options.sft, chat)
    finally:
        chat.close()


def chat_format_of(options: DataConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format that the options select; see `chat_format.chat_format`."""
    return chat_format(
        tokenizer,
        options.chat_template,
        options.sft_tokenizer_prompt_format,
        options.answer_end,
        multi_turn=options.multi_turn,
        unprinted_policy=options.unprinted_policy,
        date=options.chat_template_date,
        kwargs=options.chat_template_kwargs,
    )


def open_documents(
    options: DataConfig,
    tokenizer: Tokenizer,
    *,
    validates: bool,
    tests: bool = False,
    sets: Sequence[str] = (),
    shorten_to: int | None = None,
    made_from: tuple[int, int, bool] | None = None,
    show: bool = True,
    build_missing: bool = True,
) -> RunDocuments:
    """Open the data that the options name; text that is not in the cache is tokenised first.

    Args:
        options: options of the data.
        tokenizer: tokenizer of the data.
        validates, tests: open validation data and test data, too.
        sets: names of the validation sets (`RunConfig.validation_sets`).
        shorten_to: tokens to which conversations and prompts are shortened
            (`RunConfig.shorten_to`).
        made_from: `RunConfig.made_from`.
        show: print progress and warnings.
        build_missing: if False, text that is not in the cache is an error.
    Raises:
        DataError: the data cannot be used.
    """
    if made_from is not None:
        return _made_documents(made_from, tokenizer, validates=validates, tests=tests, sets=sets)
    opener = _Opener(options, tokenizer, shorten_to, show, build_missing)
    sentences = opener.sentences()
    divides = options.split is not None
    of_evaluation: list[str] = []
    valid, test, valid_sets = None, None, {}
    # Training data comes last: it takes longest, and errors of the other data are reported sooner.
    if validates and not divides:
        blend = options.valid_blend
        of_paths = opener.evaluation(blend, "valid", of_evaluation, apart=bool(sets))
        valid, valid_sets = _whole(of_paths, blend), dict(zip(sets, of_paths))
    if tests and not divides:
        blend = options.test_blend
        test = _whole(opener.evaluation(blend, "test", of_evaluation), blend)
    sources = opener.open(options.train_blend)
    sentences += [*_sentences(sources), *of_evaluation]
    if divides:
        return _divided(options, sources, sentences, validates=validates, tests=tests, sets=sets)
    return RunDocuments(_whole(sources, options.train_blend), valid, test, sentences, valid_sets)


def _made_documents(
    made_from: tuple[int, int, bool],
    tokenizer: Tokenizer,
    *,
    validates: bool,
    tests: bool,
    sets: Sequence[str],
) -> RunDocuments:
    """Return made documents; a validation set is all of the validation data."""
    from megatron_packed.data.made_documents import MadeDocuments, MadeFrom

    source = MadeFrom(*made_from)
    train, valid, test = (
        MadeDocuments(source, name, tokenizer.vocab_size, tokenizer.eod_id) if wanted else None
        for name, wanted in (("training", True), (VALIDATION, validates), (TEST, tests))
    )
    assert train is not None
    sentences = [
        line
        for documents in (train, valid, test)
        if documents is not None
        for line in documents.sentences()
    ]
    return RunDocuments(
        train, valid, test, sentences, {} if valid is None else dict.fromkeys(sets, valid)
    )


def open_run_documents(
    config: RunConfig, tokenizer: Tokenizer, *, show: bool = True
) -> RunDocuments:
    """Open the data of a run by all of its options; see `open_documents`."""
    return open_documents(
        config.data,
        tokenizer,
        validates=config.validates,
        tests=config.tests,
        sets=config.validation_sets,
        shorten_to=config.shorten_to,
        made_from=config.made_from,
        show=show,
    )


def _files(path: str) -> list[Path]:
    """Return the files of a data path, with links resolved."""
    files = [index_path(path)] if names_indexed(path) else expand_paths([path])
    return [file.resolve() for file in files]


@dataclass
class _Opener:
    options: DataConfig
    tokenizer: Tokenizer
    shorten_to: int | None
    show: bool
    build_missing: bool

    @cached_property
    def _chat(self) -> ChatFormat:
        return chat_format_of(self.options, self.tokenizer)

    def sentences(self) -> list[str]:
        """Return sentences about the chat format."""
        return self._chat.sentences() if self.options.sft else []

    def open(self, blend: BlendedPaths, *, apart: bool = False) -> list[Documents]:
        """Open one source for each path. A path that is listed twice gives its source twice.

        Text files are opened together as one source if they have no weights and no --split, and
        none is listed twice. ``apart`` opens each of them as a source.
        """
        each = dict.fromkeys(blend.paths)
        together = not apart and blend.weights is None and self.options.split is None
        if together and len(each) == len(blend.paths) and not any(map(names_indexed, each)):
            return [self._text(blend.paths)]
        sources = {
            path: self._indexed(path) if names_indexed(path) else self._text((path,))
            for path in each
        }
        return [sources[path] for path in blend.paths]

    def evaluation(
        self, blend: BlendedPaths, split: str, sentences: list[str], *, apart: bool = False
    ) -> list[Documents]:
        """Open validation or test data like `open`, and append sentences about it to ``sentences``.

        Raises:
            DataError: a file is training data, too, or the data cannot be used.
        """
        try:
            # Compare resolved paths, because a link, a folder or a pattern may name the same file.
            trained = {file for path in self.options.train_paths for file in _files(path)}
            both = [str(file) for path in blend.paths for file in _files(path) if file in trained]
            if both:
                verb, others_clause = (
                    "validate" if split == "valid" else "test",
                    f" and {len(both) - 1} more" * (len(both) > 1),
                )
                raise DataError(
                    f"{both[0]}{others_clause} is training data too, so it cannot {verb} the model; name other files."
                )
            sources = self.open(blend, apart=apart)
        except DataError as error:
            raise DataError(f"{self.options.flag_of(split)}: {error}") from None
        first, *others = _sentences(sources)
        sentences += [f"{self.options.flag_of(split)}: {first}", *others]
        return sources

    def _text(self, paths: tuple[str, ...]) -> Documents:
        options = self.options
        return open_dataset(
            paths,
            self.tokenizer,
            self._chat,
            sft=options.sft,
            shorten_to=self.shorten_to,
            cache_root=options.data_cache_path,
            max_bad_fraction=options.max_bad_fraction,
            fields=options.fields,
            show=self.show,
            build_missing=self.build_missing,
            special_tokens_in_text=options.special_tokens_in_text,
            rules=options.data_rules,
        )

    def _indexed(self, prefix: str) -> Documents:
        if self.options.sft:
            raise DataError(
                f"{prefix} is an indexed data set, which does not mark the answers in its text; leave --sft out, "
                "or give the conversations as JSONL."
            )
        from megatron_packed.data.index.indexed_documents import IndexedDocuments

        return IndexedDocuments(
            prefix,
            vocab_size=self.tokenizer.vocab_size,
            eod_id=self.tokenizer.eod_id,
            map_tokens=self.options.mmap_bin_files,
        )


def _sentences(sources: list[Documents]) -> list[str]:
    """Return the sentences of every source once."""
    return [line for source in dict.fromkeys(sources) for line in source.sentences()]


def _whole(sources: list[Documents], blend: BlendedPaths) -> Documents:
    return _joined([DocumentRange(source, 0, len(source)) for source in sources], blend)


def _joined(ranges: list[DocumentRange], blend: BlendedPaths) -> Documents:
    """Join ranges of sources; a single whole source is returned without a wrapper."""
    # A wrapper would change the plan hash of a single source, which checkpoints store.
    if len(ranges) == 1 and ranges[0].stop - ranges[0].first == len(ranges[0].documents):
        return ranges[0].documents
    return JoinedDocuments(ranges, blend.weights if len(ranges) > 1 else None)


def _divided(
    options: DataConfig,
    sources: list[Documents],
    sentences: list[str],
    *,
    validates: bool,
    tests: bool,
    sets: Sequence[str] = (),
) -> RunDocuments:
    """Divide every source by the proportions of --split, at the same documents as Megatron.

    Documents are in file order, or drawn at random with --split-order.
    """
    blend, drawn = options.train_blend, options.split_order == SHUFFLED
    if drawn:
        sources = [ShuffledDocuments(source) for source in sources]
    borders = [sum(options.shares[:count], Fraction(0)) for count in range(4)]
    parts: list[list[DocumentRange]] = []
    for number, (verb, wanted) in enumerate(
        (("train", True), ("validate", validates), ("test", False))
    ):
        parts.append([])
        for source, path in zip(sources, blend.paths):
            first, stop = (border_of(share, len(source)) for share in borders[number : number + 2])
            if first == stop and wanted:
                raise DataError(
                    f"--split {options.split} leaves no document of {path} ({len(source)} documents) to {verb} on; "
                    "raise that proportion, or give separate files by --train-data-path and --valid-data-path."
                )
            parts[number].append(DocumentRange(source, first, stop))
    train, valid, test = parts
    # If the test share leaves no document of a source, the run still trains. It does not test,
    # because a test on the other sources only would not represent the data.
    untested = (
        [path for part, path in zip(test, blend.paths) if part.first == part.stop] if tests else []
    )
    tests = tests and not untested
    counts = [sum(part.stop - part.first for part in ranges) for ranges in parts]
    unused = "" if validates or not counts[1] else " (unused without --eval-interval)"
    test_clause = "test" if tests else "are left out"
    if untested:
        test_clause += f": no test is run, because no document of {untested[0]} is left for it"
    how = "drawn at random" if drawn else "in file order"
    sentences.append(
        f"Divided by --split {options.split}, {how}: {counts[0]} documents train, {counts[1]} validate{unused}, "
        f"{counts[2]} {test_clause}."
    )
    return RunDocuments(
        _joined(train, blend),
        _joined(valid, blend) if validates else None,
        _joined(test, blend) if tests else None,
        sentences,
        {name: _joined([part], blend) for name, part in zip(sets, valid)} if validates else {},
    )
