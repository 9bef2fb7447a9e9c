"""Options of data: the files of documents, and their tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from megatron_packed.config.data_blend import BlendedPaths, blend_fault, split_shares
from megatron_packed.config.errors import Problem
from megatron_packed.config.options import derived_option, option
from megatron_packed.config.parser.data_path_files import (
    NamedData,
    read_data_args,
    read_per_split_data_args,
)
from megatron_packed.config.section import Section, Sound

HUGGING_FACE, BYTES, TRAINED_BPE = "HuggingFaceTokenizer", "ByteTokenizer", "TrainedBPETokenizer"
GPT2, TIKTOKEN, SENTENCEPIECE = "GPT2BPETokenizer", "TikTokenizer", "SentencePieceTokenizer"
NULL = "NullTokenizer"
SHUFFLED = "shuffled"
"""Values of --split-order."""
MODEL_FILES = {
    HUGGING_FACE: "a tokenizer.json or its directory",
    TIKTOKEN: "a vocabulary of tiktoken",
    SENTENCEPIECE: "a SentencePiece .model",
}
"""What --tokenizer-model names."""
CHAT_TEMPLATES = ("chatml",)
"""Names of built-in chat templates."""
PROMPT_FORMATS = ("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default")
"""Of Megatron's SFTTokenizer."""
_TIKTOKEN_NEEDS = ("<unk>", "<s>", "</s>")
CACHE_NAME = ".megatron_packed_cache"
"""Directory beside the first file that holds tokenised data when --data-cache-path names none."""
_NAMES_TRAINING = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
TRAINING_DATA = tuple(f"data.{name}" for name in _NAMES_TRAINING)
"""The options of which one names the training data."""
_CONVERT = f"convert it to a tokenizer.json and give {HUGGING_FACE}"
_NOT_BUILT = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), _CONVERT),
    "MultimodalTokenizer": f"models read text only: give {HUGGING_FACE}",
    "NullMultimodalTokenizer": f"models read text only: give {NULL}",
}


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, title="data"):
    """Training and validation documents, and the tokenizer."""

    data_path: tuple[str, ...] = option(
        (),
        "Documents to train on: files (.jsonl, .jsonl.gz with messages, conversations, prompt/completion, "
        "instruction/output or text; .parquet with such columns), directories of them, patterns with *, Hugging Face "
        "data sets on disk (save_to_disk), or prefixes of indexed data sets (.bin and .idx); with a weight before "
        "each, a blend.",
        group="files",
        path="input_data",
    )
    train_data_path: tuple[str, ...] = option(
        (), "The same as --data-path, beside --valid-data-path.", group="files", path="input_data"
    )
    valid_data_path: tuple[str, ...] = option(
        (), "Documents to validate on, named likewise.", group="files", path="input_data"
    )
    test_data_path: tuple[str, ...] = option(
        (),
        "Documents whose loss is told at the end of training, named likewise.",
        group="files",
        path="input_data",
    )
    data_args_path: str | None = option(
        None,
        "File that holds the words of --data-path, in its place.",
        group="files",
        path="data_args",
    )
    per_split_data_args_path: str | None = option(
        None,
        'JSON file that names training, validation and test data, {"train": [...], "valid": [...], "test": '
        "[...]}, in place of --train-data-path, --valid-data-path and --test-data-path.",
        group="files",
        path="data_args",
    )
    split: str | None = option(
        None,
        "Divide the documents of every --data-path by these proportions into training, validation and test, for "
        "example 969,30,1. Without it all of them train.",
        group="files",
    )
    split_order: str = derived_option(
        "How --split divides documents: file takes neighbours in the file; shuffled draws them by a fixed key, "
        "so that it draws the same ones of equally many documents.",
        derived="shuffled with --sft and --split, else file",
        group="files",
        choices=("file", SHUFFLED),
    )
    sft: bool = option(
        False,
        "Fine-tuning: documents are conversations or prompts with answers, and only the answers are learned.",
        group="files",
    )
    max_bad_fraction: float = option(
        0.01,
        "Share of unusable lines above which a file is refused; below it they are set aside and counted.",
        group="files",
        minimum=0,
        maximum=1,
    )
    data_cache_path: str | None = option(
        None,
        "Directory for tokenised data; by default beside the first file.",
        group="files",
        path="output_directory",
    )
    mmap_bin_files: bool = option(
        True,
        "Tokens of indexed data sets are read from the file when they are needed, and not through a memory map.",
        group="files",
        flag="no-mmap-bin-files",
        negated=True,
    )
    num_workers: int = option(
        2,
        "Micro-batches that a background thread prepares ahead of the step; 0 prepares each when it is needed.",
        unit="micro-batches",
        group="files",
        minimum=0,
        maximum=1024,
    )

    tokenizer_type: str = option(
        BYTES,
        "Tokenizer: a tokenizer.json of Hugging Face, GPT-2's two files, a vocabulary of tiktoken, a "
        "SentencePiece model, bytes as tokens, text that is numbers of tokens, or a BPE trained on the training data.",
        group="tokenizer",
        choices=(HUGGING_FACE, GPT2, TIKTOKEN, SENTENCEPIECE, BYTES, NULL, TRAINED_BPE),
        value_aliases={
            "SFTTokenizer": HUGGING_FACE,
            "GPTSentencePieceTokenizer": SENTENCEPIECE,
            "Llama2Tokenizer": SENTENCEPIECE,
        },
        not_built=_NOT_BUILT,
        megatron=("none: required", "bytes need no file"),
    )
    tokenizer_model: str | None = option(
        None,
        "tokenizer.json, or the directory that holds it; the vocabulary of a TikTokenizer (JSON, or .tiktoken); "
        "the .model of a SentencePieceTokenizer.",
        group="tokenizer",
        path="input_file",
    )
    vocab_file: str | None = option(
        None, f"vocab.json of a {GPT2}.", group="tokenizer", path="input_file"
    )
    merge_file: str | None = option(
        None, f"merges.txt of a {GPT2}.", group="tokenizer", path="input_file"
    )
    tokenizer_vocab_size: int = option(
        4096,
        "Entries of a TrainedBPETokenizer.",
        unit="tokens",
        group="tokenizer",
        minimum=260,
        maximum=1 << 20,
    )
    tokenizer_special_tokens: tuple[str, ...] = option(
        (),
        "Special tokens: the first ones of a TikTokenizer (<unk> <s> </s> <mask> <pad> <cls> <sep> when not "
        "given), further ones of a SentencePieceTokenizer.",
        group="tokenizer",
        aliases=("tiktoken-special-tokens",),
    )
    tiktoken_num_special_tokens: int = option(
        1000,
        "Special tokens of a TikTokenizer, numbered before its vocabulary; those without a name are <SPECIAL_n>.",
        unit="tokens",
        group="tokenizer",
        minimum=3,
        maximum=1 << 20,
    )
    tiktoken_pattern: str = option(
        "v2",
        "Where a TikTokenizer cuts text before it merges bytes.",
        group="tokenizer",
        choices=("v1", "v2"),
    )
    null_tokenizer_eod_id: int | None = option(
        None,
        "End of document of a NullTokenizer; the last of --vocab-size when not given.",
        group="tokenizer",
        minimum=0,
    )
    sft_tokenizer_prompt_format: str | None = option(
        None,
        "Megatron's way to make tokens and targets of a conversation, in place of a chat template of which the "
        "assistant's answers are learned.",
        group="tokenizer",
        choices=PROMPT_FORMATS,
        megatron=("nemotron-h-aligned", "a tokenizer's own template is what its model knows"),
    )
    chat_template: str | None = option(
        None,
        f"Chat template: a jinja2 file, or {' or '.join(CHAT_TEMPLATES)}; by default the tokenizer's own.",
        group="tokenizer",
    )

    @cached_property
    def named(self) -> NamedData:
        """The words of all data paths, whichever options or files name them; the files are read
        once.
        """
        if self.per_split_data_args_path is not None:
            return read_per_split_data_args(self.per_split_data_args_path)
        train, fault = self.train_data_path or self.data_path, ""
        if self.data_args_path is not None:
            train, _, _, fault = read_data_args(self.data_args_path)
        return NamedData(train, self.valid_data_path, self.test_data_path, fault)

    @property
    def train_blend(self) -> BlendedPaths:
        """Return the training data, whichever option named it."""
        return BlendedPaths.of(self.named.train)

    @property
    def train_paths(self) -> tuple[str, ...]:
        """The same without weights."""
        return self.train_blend.paths

    @property
    def valid_blend(self) -> BlendedPaths:
        """Return the data that is named to validate on."""
        return BlendedPaths.of(self.named.valid)

    @property
    def test_blend(self) -> BlendedPaths:
        """Return the data that is named to test on."""
        return BlendedPaths.of(self.named.test)

    @property
    def paths_in_files(self) -> list[tuple[str, str]]:
        """Paths that a file names, each with the option that names the file."""
        named_by = self._naming_training
        if named_by == ["data_args_path"]:
            return [(self.flag("data_args_path"), path) for path in self.train_paths]
        if named_by == ["per_split_data_args_path"]:
            blends = (self.train_blend, self.valid_blend, self.test_blend)
            return [
                (self.flag("per_split_data_args_path"), path)
                for blend in blends
                for path in blend.paths
            ]
        return []

    @property
    def _naming_training(self) -> list[str]:
        """The options that name training data: one, where they are right."""
        return [name for name in _NAMES_TRAINING if getattr(self, name)]

    def flag_of(self, split: str) -> str:
        """The option that names the data of ``valid`` or ``test``."""
        return self.flag(
            f"{split}_data_path"
            if self.per_split_data_args_path is None
            else "per_split_data_args_path"
        )

    @property
    def shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Shares of documents that train, validate and test."""
        given = None if self.split is None else split_shares(self.split)
        return given or (Fraction(1), Fraction(0), Fraction(0))

    @property
    def has_validation(self) -> bool:
        """Return whether there are documents to validate on."""
        return bool(self.named.valid) or bool(self.shares[1])

    @property
    def has_test(self) -> bool:
        """Return whether there are documents to test on; of --split there may be none in the end."""
        return bool(self.named.test) or bool(self.shares[2])

    def derive(self, sound: Sound) -> dict[str, Any]:
        return {"split_order": SHUFFLED if self.sft and self.split is not None else "file"}

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if sound(*_NAMES_TRAINING):
            yield from self._source_rules()
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if sound(name):
                yield from self._path_rules(self.flag(name), getattr(self, name))
        if sound("split") and self.split is not None:
            yield from self._split_rules(self.split)
        if sound("tokenizer_type", "tokenizer_model"):
            wanted = MODEL_FILES.get(self.tokenizer_type)
            if wanted is not None and self.tokenizer_model is None:
                yield Problem(
                    "--tokenizer-model",
                    "",
                    f"is required with --tokenizer-type {self.tokenizer_type}",
                    f"give the path of {wanted}",
                )
            elif wanted is None and self.tokenizer_model is not None:
                yield Problem(
                    "--tokenizer-model",
                    self.tokenizer_model,
                    f"a {self.tokenizer_type} reads no model file",
                    f"leave it out, or give --tokenizer-type {', '.join(MODEL_FILES)}",
                )
        if sound("tokenizer_type", "vocab_file", "merge_file"):
            for name in ("vocab_file", "merge_file"):
                given = getattr(self, name)
                if self.tokenizer_type == GPT2 and given is None:
                    yield Problem(
                        self.flag(name),
                        "",
                        f"is required with --tokenizer-type {GPT2}",
                        "give its path",
                    )
                elif self.tokenizer_type != GPT2 and given is not None:
                    yield Problem(
                        self.flag(name),
                        given,
                        f"a {self.tokenizer_type} reads no such file",
                        f"leave it out, or give --tokenizer-type {GPT2}",
                    )
        if sound("tokenizer_type", "tokenizer_special_tokens", "tiktoken_num_special_tokens"):
            yield from self._special_token_rules()
        yield from self._chat_rules(sound)

    def _special_token_rules(self) -> Iterator[Problem]:
        flag, named = self.flag("tokenizer_special_tokens"), self.tokenizer_special_tokens
        given = " ".join(named)
        if named and self.tokenizer_type not in (TIKTOKEN, SENTENCEPIECE):
            yield Problem(
                flag,
                given,
                f"a {self.tokenizer_type} takes none beside its own",
                f"leave it out, or give --tokenizer-type {TIKTOKEN} or {SENTENCEPIECE}",
            )
        elif "" in named or len(set(named)) < len(named):
            yield Problem(flag, given, "names one twice, or none", "name each once")
        elif named and self.tokenizer_type == TIKTOKEN:
            if missing := [token for token in _TIKTOKEN_NEEDS if token not in named]:
                yield Problem(
                    flag,
                    given,
                    f"lacks {' '.join(missing)}",
                    f"name {' '.join(_TIKTOKEN_NEEDS)} among them",
                )
            if len(named) > self.tiktoken_num_special_tokens:
                yield Problem(
                    flag,
                    given,
                    f"are {len(named)}, and --tiktoken-num-special-tokens is "
                    f"{self.tiktoken_num_special_tokens}",
                    "raise it, or name fewer",
                )
        elif self.tokenizer_type == TIKTOKEN and self.tiktoken_num_special_tokens < 7:
            yield Problem(
                "--tiktoken-num-special-tokens",
                str(self.tiktoken_num_special_tokens),
                "is less than the 7 that have names",
                f"raise it, or name fewer by {flag}",
            )

    def _chat_rules(self, sound: Sound) -> Iterator[Problem]:
        template, form = self.chat_template, self.sft_tokenizer_prompt_format
        for name in ("chat_template", "sft_tokenizer_prompt_format"):
            if getattr(self, name) is not None and not self.sft and sound(name):
                yield Problem(
                    self.flag(name),
                    getattr(self, name),
                    "is for conversations only",
                    "add --sft, or leave it out",
                )
        if (
            template is not None
            and form not in (None, "default")
            and sound("sft_tokenizer_prompt_format")
        ):
            yield Problem(
                "--chat-template",
                template,
                f"contradicts --sft-tokenizer-prompt-format {form}, which is a format of its own",
                "leave one of the two out",
            )

    def _source_rules(self) -> Iterator[Problem]:
        """One option names the training data, and what a file says is sound."""
        given = self._naming_training
        if not given:
            yield Problem(
                "--data-path",
                "",
                "is required: there is nothing to train on",
                "give --data-path FILE [FILE ...]",
            )
        if len(given) > 1:
            yield Problem(
                self.flag(given[0]),
                self._shown(given[0]),
                f"contradicts {self.flag(given[1])}: both name the training data",
                "put all training files behind one of them",
            )
        for file in ("data_args_path", "per_split_data_args_path"):
            if given == [file]:
                yield from self._file_rules(file)

    def _file_rules(self, file: str) -> Iterator[Problem]:
        """Of the file that names data."""
        if self.named.fault:
            cure = "give a file with WEIGHT PATH [WEIGHT PATH ...] or with paths alone"
            if file == "per_split_data_args_path":
                cure = 'give a file like {"train": ["3", "a", "1", "b"], "valid": ["c"], "test": ["d"]}'
            yield Problem(
                self.flag(file), self._shown(file), self.named.fault, cure, node_dependent=True
            )
        for words in self.named[:3]:
            yield from self._path_rules(self.flag(file), words)
        for name in ("valid_data_path", "test_data_path"):
            if file == "per_split_data_args_path" and getattr(self, name):
                yield Problem(
                    self.flag(name),
                    self._shown(name),
                    f"contradicts {self.flag(file)}, which names all data",
                    "name it there, or leave the file out",
                )

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        return value if isinstance(value, str) else " ".join(value)

    def _path_rules(self, flag: str, words: tuple[str, ...]) -> Iterator[Problem]:
        fault, paths = blend_fault(words), BlendedPaths.of(words).paths
        if fault:
            yield Problem(
                flag, " ".join(words), fault, "give WEIGHT PATH [WEIGHT PATH ...], or paths alone"
            )
        if len(set(paths)) < len(paths):
            twice = sorted(path for path, times in Counter(paths).items() if times > 1)
            yield Problem(flag, " ".join(twice), "is listed twice", "list every file once")

    def _split_rules(self, split: str) -> Iterator[Problem]:
        if split_shares(split) is None:
            yield Problem(
                "--split",
                split,
                "must be one to three proportions, for training, validation and test; the "
                "first above 0",
                "give for example 969,30,1",
            )
        for name in (
            "train_data_path",
            "valid_data_path",
            "test_data_path",
            "per_split_data_args_path",
        ):
            if getattr(self, name):
                yield Problem(
                    "--split",
                    split,
                    f"divides --data-path, and {self.flag(name)} is not to be divided",
                    "give one or the other",
                )


def vocabulary_rules(data: DataConfig, vocab_size: int | None, sound: Sound) -> Iterator[Problem]:
    """What tokenizers want of the model's --vocab-size."""
    if not sound(
        "data.tokenizer_type",
        "data.null_tokenizer_eod_id",
        "data.tiktoken_num_special_tokens",
        "model.vocab_size",
    ):
        return
    kind, end, special = (
        data.tokenizer_type,
        data.null_tokenizer_eod_id,
        data.tiktoken_num_special_tokens,
    )
    if kind == NULL and vocab_size is None:
        yield Problem(
            "--vocab-size",
            "",
            f"is required with --tokenizer-type {NULL}",
            "give the number of tokens, the end of document among them",
        )
    if kind == NULL and vocab_size is not None and end is not None and end >= vocab_size:
        yield Problem(
            "--null-tokenizer-eod-id",
            str(end),
            f"is none of --vocab-size ({vocab_size}) tokens",
            f"give at most {vocab_size - 1}, or leave it out",
        )
    if kind != NULL and end is not None:
        yield Problem(
            "--null-tokenizer-eod-id",
            str(end),
            f"a {kind} has an end of document of its own",
            f"leave it out, or give --tokenizer-type {NULL}",
        )
    if kind == TIKTOKEN and vocab_size is not None and vocab_size <= special:
        yield Problem(
            "--vocab-size",
            str(vocab_size),
            f"leaves nothing beside --tiktoken-num-special-tokens ({special})",
            "raise it, or leave it out",
        )
