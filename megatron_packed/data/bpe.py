"""A byte-level BPE vocabulary trained on the data itself, for runs that start from nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_packed.data.cache import get_or_build
from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_packed.data.report import place_and_reason
from megatron_packed.data.rows import reader_of
from megatron_packed.data.schema import FIELDS, Conversation, PromptCompletion, parse_line
from megatron_packed.data.sources import MAX_LINE_BYTES, expand_paths, file_identity
from megatron_packed.data.tokenizer import END_OF_DOCUMENT, OWN_SPECIAL_TOKENS, PADDING

MIN_VOCAB_SIZE = 256 + len(OWN_SPECIAL_TOKENS)
TRAINING_BYTES = 64 * 2**20
"""Text that the vocabulary is learned from; more does not change it much."""
_FORMAT = "bpe-1"


def train_bpe(
    paths: Sequence[str | Path],
    vocab_size: int,
    cache_root: str | Path,
    *,
    training_bytes: int = TRAINING_BYTES,
    log: Callable[[str], None] = lambda line: None,
    build_missing: bool = True,
) -> HuggingFaceTokenizer:
    """A byte-level BPE tokenizer learned from ``paths``, kept in ``cache_root`` under a hash of data and options.

    The same data gives the same tokenizer: lines are chosen by their place in the files, each file has an equal share
    of ``training_bytes``, and ties are broken by the trainer's own order. Every special token of
    `tokenizer.OWN_SPECIAL_TOKENS` has a number. Any number of processes may call this at once.

    Args:
        paths: see `sources.expand_paths`; any schema. Unusable lines are passed over (the data set counts them).
        vocab_size: numbers to use, at most; fewer if the data has fewer pairs.
        build_missing: False: a tokenizer that is not trained yet is an error.
    Raises:
        DataError: no usable text, or ``vocab_size`` leaves no room for the bytes.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"--tokenizer-vocab-size {vocab_size} is below {MIN_VOCAB_SIZE} (256 bytes and {len(OWN_SPECIAL_TOKENS)} "
            "special tokens); choose a larger one."
        )
    files = expand_paths(paths)
    identity = [_FORMAT, [file_identity(file) for file in files], vocab_size, training_bytes]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    directory = Path(cache_root) / f"tokenizer-{key}"

    if not build_missing and not _is_valid(directory):
        raise DataError(f"the tokenizer of {', '.join(map(str, files))} is not trained yet, in {cache_root}.")

    def build(temporary: Path) -> None:
        unusable: list[str] = []
        _train(_texts(files, training_bytes, unusable), vocab_size, unusable).save(str(temporary / "tokenizer.json"))
        config = {"eos_token": END_OF_DOCUMENT, "pad_token": PADDING}
        (temporary / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    get_or_build(directory, is_valid=_is_valid, build=build, log=log)
    return HuggingFaceTokenizer(directory)


def _train(texts: Iterator[str], vocab_size: int, unusable: list[str]) -> tokenizers.Tokenizer:
    first = next(texts, None)
    if first is None:
        why = f"the first line cannot be used: {unusable[0]}." if unusable else "check the data paths."
        raise DataError(f"the data holds no text to learn a vocabulary from; {why}")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
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

    engine.train_from_iterator(all_texts(), trainer)
    return engine


def _texts(files: Sequence[Path], training_bytes: int, unusable: list[str]) -> Iterator[str]:
    """Texts to learn from: all of them, or evenly spread lines of files that are larger than their share.

    Before the first text, ``unusable`` gets where the first line lies that cannot be used, and why.
    """
    share = training_bytes / len(files)
    for file in files:
        # a compressed line is about a quarter of its size
        size = file.stat().st_size * (4 if file.name.endswith((".gz", ".parquet")) else 1)
        every = max(1, int(size / max(share, 1)))
        taken = 0
        for line in reader_of(file, MAX_LINE_BYTES, FIELDS):
            if line.reason is not None or line.is_blank or (line.number - 1) % every:
                continue
            try:
                texts = _texts_of_line(line.data)
            except BadLine as error:
                if not unusable:
                    unusable.append(place_and_reason(file, line, error))
                continue
            for text in texts:
                taken += len(text)
                yield text
            if taken > 2 * share:
                break


def _texts_of_line(data: bytes) -> list[str]:
    texts = []
    for sample in parse_line(data):
        if isinstance(sample, Conversation):
            texts += [message["content"] for message in sample.messages]
        elif isinstance(sample, PromptCompletion):
            texts += [sample.prompt, sample.completion]
        else:
            texts.append(sample.text)
    return texts


def _is_valid(directory: Path) -> bool:
    try:
        HuggingFaceTokenizer(directory)
    except DataError:
        return False
    return True
