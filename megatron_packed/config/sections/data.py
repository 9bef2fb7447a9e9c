"""Options of data: files of documents and their tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from megatron_packed.config.data_blend import BlendedPaths, blend_fault, split_shares
from megatron_packed.config.data_fields import DataFields, pairs_fault, pairs_of
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
"""Value of --split-order that draws documents at random."""
MODEL_FILES = {
    HUGGING_FACE: "a tokenizer.json or its directory",
    TIKTOKEN: "a vocabulary of tiktoken",
    SENTENCEPIECE: "a SentencePiece .model",
}
"""Kind of file that --tokenizer-model names, by tokenizer type."""
ANSWER_ENDS = AT_TURN, AT_DOCUMENT = "turn", "document"
"""Values of --answer-end."""
CHAT_TEMPLATES = ("chatml",)
"""Names of built-in chat templates."""
PROMPT_FORMATS = ("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default")
"""Prompt formats of Megatron's SFTTokenizer."""
_TIKTOKEN_NEEDS = ("<unk>", "<s>", "</s>")
CACHE_NAME = ".megatron_packed_cache"
"""Directory, next to the first data file, for tokenised data when --data-cache-path is not given.
"""
_NAMES_TRAINING = (
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
)
TRAINING_DATA = tuple(f"data.{name}" for name in _NAMES_TRAINING)
"""Options that name training data; a run gives exactly one of them."""
_CONVERT = f"convert it to a tokenizer.json and give {HUGGING_FACE}"
_NOT_BUILT = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), _CONVERT),
    "MultimodalTokenizer": f"models read text only: give {HUGGING_FACE}",
    "NullMultimodalTokenizer": f"models read text only: give {NULL}",
}


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, title="data"):
    """Options of training, validation and test documents, and of the tokenizer."""

    data_path: tuple[str, ...] = option(
        (),
        "Training data. A path is a file of JSON lines, a JSON array, a .parquet file, a directory "
        "or pattern of such files, or a Hugging Face data set on disk (save_to_disk). It may also "
        "be the prefix of an indexed data set (.bin and .idx). Lines and rows have messages, "
        "conversations, prompt/completion, instruction/output or text. With a weight before each "
        "path, the data is a blend.",
        group="files",
        path="input_data",
    )
    train_data_path: tuple[str, ...] = option(
        (),
        "Training data, given like --data-path, for use with --valid-data-path.",
        group="files",
        path="input_data",
    )
    valid_data_path: tuple[str, ...] = option(
        (), "Validation data, given like --data-path.", group="files", path="input_data"
    )
    test_data_path: tuple[str, ...] = option(
        (),
        "Test data, given like --data-path. Its loss is reported at the end of training.",
        group="files",
        path="input_data",
    )
    data_args_path: str | None = option(
        None,
        "File with the paths and weights of --data-path, used instead of that option.",
        group="files",
        path="data_args",
    )
    per_split_data_args_path: str | None = option(
        None,
        'JSON file that names training, validation and test data: {"train": [...], "valid": '
        '[...], "test": [...]}. Replaces --train-data-path, --valid-data-path and '
        "--test-data-path.",
        group="files",
        path="data_args",
    )
    mock_data: bool = option(
        False,
        "Train, validate and test on made documents of counting tokens, which depend on --seed. "
        "No file is read; with --sft, a third of each document is a prompt.",
        group="files",
    )
    split: str | None = option(
        None,
        "Proportions of training, validation and test documents in every --data-path, for "
        "example 969,30,1. All documents train when not given.",
        group="files",
    )
    split_order: str = derived_option(
        "Choice of documents by --split. With file, consecutive documents of a file form a "
        "split. With shuffled, documents are drawn with a fixed key; data sets with the same "
        "number of documents are divided the same way.",
        derived="shuffled with --sft and --split, else file",
        group="files",
        choices=("file", SHUFFLED),
    )
    sft: bool = option(
        False,
        "Fine-tune on conversations or prompts with answers; only answers are targets.",
        group="files",
    )
    data_fields: tuple[str, ...] = option(
        (),
        "Names of the fields in all data, for example prompt=question,completion=answers.text. "
        "Targets: prompt and completion; instruction and output (with input, system, history); "
        "messages or conversations (with system, tools); text. A dot enters an object, and a "
        "number selects an element of a list.",
        group="files",
    )
    max_bad_fraction: float = option(
        0.01,
        "Maximum fraction of unusable lines in the data. Above it the data is refused; below it "
        "the lines are skipped and counted. Lines with an empty answer do not count.",
        group="files",
        minimum=0,
        maximum=1,
    )
    data_cache_path: str | None = option(
        None,
        "Directory for tokenised data; a directory next to the first data file when not given.",
        group="files",
        path="output_directory",
    )
    mmap_bin_files: bool = option(
        True,
        "Read tokens of indexed data sets from the file when they are needed, instead of "
        "through a memory map.",
        group="files",
        flag="no-mmap-bin-files",
        negated=True,
    )
    num_workers: int = option(
        2,
        "Number of micro-batches that a background thread prepares ahead of the step; 0 "
        "prepares each one when it is needed.",
        unit="micro-batches",
        group="files",
        minimum=0,
        maximum=1024,
    )

    tokenizer_type: str = derived_option(
        "Tokenizer type. ByteTokenizer uses bytes as tokens, NullTokenizer reads text of token "
        "numbers, and TrainedBPETokenizer trains a BPE on the training data. The other types "
        "read --tokenizer-model, and GPT2BPETokenizer reads --vocab-file and --merge-file.",
        group="tokenizer",
        choices=(HUGGING_FACE, GPT2, TIKTOKEN, SENTENCEPIECE, BYTES, NULL, TRAINED_BPE),
        value_aliases={
            "SFTTokenizer": HUGGING_FACE,
            "GPTSentencePieceTokenizer": SENTENCEPIECE,
            "Llama2Tokenizer": SENTENCEPIECE,
        },
        not_built=_NOT_BUILT,
        derived=f"{GPT2} with --vocab-file or --merge-file, else {BYTES}",
        megatron=(
            f"{GPT2} in its training scripts, else none: required",
            "a byte tokenizer needs no file",
        ),
    )
    tokenizer_model: str | None = option(
        None,
        "Path of a tokenizer.json or of its directory, of the vocabulary of a TikTokenizer "
        "(JSON or .tiktoken), or of the .model file of a SentencePieceTokenizer.",
        group="tokenizer",
        path="input_file",
    )
    vocab_file: str | None = option(
        None, f"Path of the vocab.json of a {GPT2}.", group="tokenizer", path="input_file"
    )
    merge_file: str | None = option(
        None, f"Path of the merges.txt of a {GPT2}.", group="tokenizer", path="input_file"
    )
    tokenizer_vocab_size: int = option(
        4096,
        "Vocabulary size of a TrainedBPETokenizer.",
        unit="tokens",
        group="tokenizer",
        minimum=260,
        maximum=1 << 20,
    )
    padded_vocab_size: int | None = option(
        None,
        "Size that the vocabulary must have after padding; the run ends before its first step if "
        "it has another one.",
        unit="tokens",
        group="tokenizer",
        minimum=2,
        megatron=("pads the vocabulary to it", "--make-vocab-size-divisible-by sets the padding"),
    )
    tokenizer_special_tokens: tuple[str, ...] = option(
        (),
        "Names of special tokens: the first ones of a TikTokenizer (<unk> <s> </s> <mask> <pad> "
        "<cls> <sep> when not given), or additional ones of a SentencePieceTokenizer.",
        group="tokenizer",
        aliases=("tiktoken-special-tokens",),
    )
    tiktoken_num_special_tokens: int = option(
        1000,
        "Number of special tokens of a TikTokenizer. They come before its vocabulary; tokens "
        "without a name are called <SPECIAL_n>.",
        unit="tokens",
        group="tokenizer",
        minimum=3,
        maximum=1 << 20,
    )
    tiktoken_pattern: str = option(
        "v2",
        "Version of the pattern by which a TikTokenizer splits text before it merges bytes.",
        group="tokenizer",
        choices=("v1", "v2"),
    )
    null_tokenizer_eod_id: int | None = option(
        None,
        "Number of the end-of-document token of a NullTokenizer; the last token of --vocab-size "
        "when not given.",
        group="tokenizer",
        minimum=0,
    )
    sft_tokenizer_prompt_format: str | None = option(
        None,
        "Megatron prompt format for the tokens and targets of a conversation. When not given, "
        "the chat template is used and the assistant's answers are the targets.",
        group="tokenizer",
        choices=PROMPT_FORMATS,
        megatron=(
            "nemotron-h-aligned",
            "a model is trained for the chat template of its tokenizer",
        ),
    )
    chat_template: str | None = option(
        None,
        f"Chat template: a jinja2 file, or {' or '.join(CHAT_TEMPLATES)}; the template of the "
        "tokenizer when not given.",
        group="tokenizer",
    )
    answer_end: str = option(
        AT_TURN,
        "End of a conversation with a chat template. With turn, the end of the last learned turn "
        "is the last token. With document, an end-of-document token is learned after this turn, "
        "as in checkpoints without this option.",
        group="tokenizer",
        choices=ANSWER_ENDS,
    )

    @cached_property
    def named(self) -> NamedData:
        """Words of all data paths, given by options or by files; the files are read once."""
        if self.per_split_data_args_path is not None:
            return read_per_split_data_args(self.per_split_data_args_path)
        train, fault = self.train_data_path or self.data_path, ""
        if self.data_args_path is not None:
            train, _, _, fault = read_data_args(self.data_args_path)
        return NamedData(train, self.valid_data_path, self.test_data_path, fault)

    @property
    def fields(self) -> DataFields | None:
        """Fields that --data-fields names; None if the lines have the usual fields."""
        return DataFields.of(pairs_of(self.data_fields))

    @property
    def train_blend(self) -> BlendedPaths:
        """Return the training data from whichever option names it."""
        return BlendedPaths.of(self.named.train)

    @property
    def train_paths(self) -> tuple[str, ...]:
        """Paths of the training data, without weights."""
        return self.train_blend.paths

    @property
    def valid_blend(self) -> BlendedPaths:
        """Return the data given for validation."""
        return BlendedPaths.of(self.named.valid)

    @property
    def test_blend(self) -> BlendedPaths:
        """Return the data given for the test."""
        return BlendedPaths.of(self.named.test)

    @property
    def paths_in_files(self) -> list[tuple[str, str]]:
        """Data paths that a file names, each with the option that names the file."""
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
        """Given options that name training data; a correct configuration has exactly one."""
        return [name for name in _NAMES_TRAINING if getattr(self, name)]

    def flag_of(self, split: str) -> str:
        """Return the flag of the option that names the ``valid`` or ``test`` data."""
        return self.flag(
            f"{split}_data_path"
            if self.per_split_data_args_path is None
            else "per_split_data_args_path"
        )

    @property
    def shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Fractions of documents for training, validation and test."""
        given = None if self.split is None else split_shares(self.split)
        return given or (Fraction(1), Fraction(0), Fraction(0))

    @property
    def has_validation(self) -> bool:
        """Return whether there are documents to validate on."""
        made = self.mock_data and self.split is None
        return made or bool(self.named.valid) or bool(self.shares[1])

    @property
    def validation_paths(self) -> tuple[str, ...]:
        """Paths that contribute validation documents."""
        if self.mock_data:
            return ("mock",)
        return self.valid_blend.paths if self.split is None else self.train_paths

    @property
    def has_test(self) -> bool:
        """Return whether test documents are requested; --split may still select none in a small
        data set.
        """
        return bool(self.named.test) or bool(self.shares[2])

    def derive(self, sound: Sound) -> dict[str, Any]:
        derived = {"split_order": SHUFFLED if self.sft and self.split is not None else "file"}
        if sound("vocab_file", "merge_file"):
            of_gpt2 = self.vocab_file is not None or self.merge_file is not None
            derived["tokenizer_type"] = GPT2 if of_gpt2 else BYTES
        return derived

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if sound(*_NAMES_TRAINING):
            yield from self._source_rules()
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if sound(name):
                yield from self._path_rules(self.flag(name), getattr(self, name))
        if sound("data_fields") and self.data_fields:
            yield from self._field_rules(sound)
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
                    f"{self.tokenizer_type} does not use a model file",
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
                        f"{self.tokenizer_type} does not use this file",
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
                f"{self.tokenizer_type} does not accept additional special tokens",
                f"leave it out, or give --tokenizer-type {TIKTOKEN} or {SENTENCEPIECE}",
            )
        elif "" in named or len(set(named)) < len(named):
            yield Problem(
                flag, given, "contains a duplicate or an empty name", "give each name once"
            )
        elif named and self.tokenizer_type == TIKTOKEN:
            if missing := [token for token in _TIKTOKEN_NEEDS if token not in named]:
                yield Problem(
                    flag,
                    given,
                    f"must include {' '.join(missing)}",
                    f"include all of {' '.join(_TIKTOKEN_NEEDS)}",
                )
            if len(named) > self.tiktoken_num_special_tokens:
                yield Problem(
                    flag,
                    given,
                    f"names {len(named)} tokens, but --tiktoken-num-special-tokens is "
                    f"{self.tiktoken_num_special_tokens}",
                    "raise --tiktoken-num-special-tokens, or give fewer names",
                )
        elif self.tokenizer_type == TIKTOKEN and self.tiktoken_num_special_tokens < 7:
            yield Problem(
                "--tiktoken-num-special-tokens",
                str(self.tiktoken_num_special_tokens),
                "is less than the 7 special tokens with default names",
                f"raise it, or give fewer names with {flag}",
            )

    def _chat_rules(self, sound: Sound) -> Iterator[Problem]:
        template, form = self.chat_template, self.sft_tokenizer_prompt_format
        for name in ("chat_template", "sft_tokenizer_prompt_format"):
            if getattr(self, name) is not None and not self.sft and sound(name):
                yield Problem(
                    self.flag(name),
                    getattr(self, name),
                    "only applies to conversations",
                    "add --sft, or leave it out",
                )
        if self.answer_end == AT_DOCUMENT and sound("answer_end"):
            if not self.sft:
                yield Problem(
                    "--answer-end",
                    AT_DOCUMENT,
                    "only applies to conversations",
                    "add --sft, or leave it out",
                )
            elif form is not None and sound("sft_tokenizer_prompt_format"):
                yield Problem(
                    "--answer-end",
                    AT_DOCUMENT,
                    f"contradicts --sft-tokenizer-prompt-format {form}, which adds no end of a document",
                    "leave one of the two flags out",
                )
        if (
            template is not None
            and form not in (None, "default")
            and sound("sft_tokenizer_prompt_format")
        ):
            yield Problem(
                "--chat-template",
                template,
                f"contradicts --sft-tokenizer-prompt-format {form}, which defines its own format",
                "leave one of the two flags out",
            )

    def _source_rules(self) -> Iterator[Problem]:
        """Yield problems unless exactly one option names the training data and its file is valid."""
        given = self._naming_training
        if not given:
            yield Problem(
                "--data-path",
                "",
                "is required: no training data is given",
                "give --data-path FILE [FILE ...]",
            )
        if len(given) > 1:
            yield Problem(
                self.flag(given[0]),
                self._shown(given[0]),
                f"contradicts {self.flag(given[1])}: both name the training data",
                "give all training files with one of them",
            )
        for name in ("valid_data_path", "test_data_path"):
            if self.mock_data and getattr(self, name):
                yield Problem(
                    self.flag(name),
                    self._shown(name),
                    "contradicts --mock-data, which also makes this data",
                    "leave one of the two flags out",
                )
        for file in ("data_args_path", "per_split_data_args_path"):
            if given == [file]:
                yield from self._file_rules(file)

    def _file_rules(self, file: str) -> Iterator[Problem]:
        """Yield problems of the file that names the data."""
        if self.named.fault:
            cure = "give a file with WEIGHT PATH [WEIGHT PATH ...], or with paths only"
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
                    "name the data in that file, or leave the file out",
                )

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        if isinstance(value, tuple):
            return " ".join(value)
        return value if isinstance(value, str) else ""

    def _path_rules(self, flag: str, words: tuple[str, ...]) -> Iterator[Problem]:
        fault = blend_fault(words)
        if fault:
            yield Problem(
                flag, " ".join(words), fault, "give WEIGHT PATH [WEIGHT PATH ...], or paths only"
            )

    def _field_rules(self, sound: Sound) -> Iterator[Problem]:
        flag, given = self.flag("data_fields"), " ".join(self.data_fields)
        fault = pairs_fault(pairs_of(self.data_fields))
        if fault is not None:
            yield Problem(flag, given, *fault)
            return
        assert self.fields is not None
        if self.fields.trains_text and self.sft:
            cure = "remove --sft, or name the fields of prompts and answers"
            yield Problem(flag, given, "text has no answers, which --sft trains", cure)
        elif not self.fields.trains_text and not self.sft and sound("sft"):
            yield Problem(
                flag, given, "names prompts and answers, whose training needs --sft", "add --sft"
            )

    def _split_rules(self, split: str) -> Iterator[Problem]:
        if split_shares(split) is None:
            yield Problem(
                "--split",
                split,
                "must be one to three proportions for training, validation and test, and the "
                "first must be above 0",
                "give, for example, 969,30,1",
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
                    f"divides the data of --data-path, and cannot be used with {self.flag(name)}",
                    "give one or the other",
                )


def vocabulary_rules(data: DataConfig, vocab_size: int | None, sound: Sound) -> Iterator[Problem]:
    """Yield problems between the tokenizer and the model's --vocab-size."""
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
            "give the number of tokens, including the end of document",
        )
    if kind == NULL and vocab_size is not None and end is not None and end >= vocab_size:
        yield Problem(
            "--null-tokenizer-eod-id",
            str(end),
            f"is not below --vocab-size ({vocab_size})",
            f"give at most {vocab_size - 1}, or leave it out",
        )
    if kind != NULL and end is not None:
        yield Problem(
            "--null-tokenizer-eod-id",
            str(end),
            f"{kind} already has an end-of-document token",
            f"leave it out, or give --tokenizer-type {NULL}",
        )
    if kind == TIKTOKEN and vocab_size is not None and vocab_size <= special:
        yield Problem(
            "--vocab-size",
            str(vocab_size),
            f"leaves no entries after --tiktoken-num-special-tokens ({special})",
            "raise it, or leave it out",
        )
