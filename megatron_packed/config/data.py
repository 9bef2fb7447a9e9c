"""Where documents come from and how they become tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from megatron_packed.config.blend import Blend, blend_fault, split_shares
from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Section, Sound, option

HUGGING_FACE, BYTES, TRAINED_BPE = "HuggingFaceTokenizer", "ByteTokenizer", "TrainedBPETokenizer"
GPT2 = "GPT2BPETokenizer"
CHAT_TEMPLATES = ("chatml",)
"""Names of built-in chat templates."""
CACHE_NAME = ".megatron_packed_cache"
"""Directory beside the first file that holds tokenised data when --data-cache-path names none."""
_CONVERT = f"convert it to a tokenizer.json and give {HUGGING_FACE}"
_NOT_BUILT = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer",
                     "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"), _CONVERT),
    "NullTokenizer": f"give {BYTES}",
    "MultimodalTokenizer": f"models read text only: give {HUGGING_FACE}",
    "NullMultimodalTokenizer": f"models read text only: give {BYTES}",
}


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, title="data"):
    """Training and validation documents, and the tokenizer."""

    data_path: tuple[str, ...] = option(
        (), "Documents to train on: files (.jsonl, .jsonl.gz with messages, conversations, prompt/completion, "
        "instruction/output or text; .parquet with such columns), directories of them, patterns with *, Hugging Face "
        "data sets on disk (save_to_disk), or prefixes of indexed data sets (.bin and .idx); with a weight before "
        "each, a blend.",
        group="files", path="input_data",
    )
    train_data_path: tuple[str, ...] = option(
        (), "The same as --data-path, beside --valid-data-path.", group="files", path="input_data"
    )
    valid_data_path: tuple[str, ...] = option(
        (), "Documents to validate on, named likewise.", group="files", path="input_data"
    )
    split: str | None = option(
        None, "Divide the documents of every --data-path by these proportions into training, validation and test, for "
        "example 969,30,1; test documents are left out. Without it all of them train.", group="files",
    )
    sft: bool = option(
        False, "Fine-tuning: documents are conversations or prompts with answers, and only the answers are learned.",
        group="files",
    )
    max_bad_fraction: float = option(
        0.01, "Share of unusable lines above which a file is refused; below it they are set aside and counted.",
        group="files", minimum=0, maximum=1,
    )
    data_cache_path: str | None = option(
        None, "Directory for tokenised data; by default beside the first file.", group="files", path="output_directory"
    )
    num_workers: int = option(
        2, "Micro-batches that a background thread prepares ahead of the step; 0 prepares each when it is needed.",
        unit="micro-batches", group="files", minimum=0, maximum=1024,
    )

    tokenizer_type: str = option(
        BYTES, "Tokenizer: a tokenizer.json of Hugging Face, GPT-2's two files, bytes as tokens, or a BPE trained on "
        "the training data.", group="tokenizer", choices=(HUGGING_FACE, GPT2, BYTES, TRAINED_BPE),
        value_aliases={"SFTTokenizer": HUGGING_FACE},
        not_built=_NOT_BUILT,
        megatron=("none: required", "bytes need no file"),
    )
    tokenizer_model: str | None = option(
        None, "tokenizer.json, or the directory that holds it.", group="tokenizer", path="input_file"
    )
    vocab_file: str | None = option(
        None, f"vocab.json of a {GPT2}.", group="tokenizer", path="input_file"
    )
    merge_file: str | None = option(
        None, f"merges.txt of a {GPT2}.", group="tokenizer", path="input_file"
    )
    tokenizer_vocab_size: int = option(
        4096, "Entries of a TrainedBPETokenizer.", unit="tokens", group="tokenizer", minimum=260, maximum=1 << 20
    )
    chat_template: str | None = option(
        None, f"Chat template: a jinja2 file, or {' or '.join(CHAT_TEMPLATES)}; by default the tokenizer's own.",
        group="tokenizer",
    )

    @property
    def train_blend(self) -> Blend:
        """What to train on, whichever option named it."""
        return Blend.of(self.train_data_path or self.data_path)

    @property
    def train_paths(self) -> tuple[str, ...]:
        """The same without weights."""
        return self.train_blend.paths

    @property
    def valid_blend(self) -> Blend:
        """What --valid-data-path names to validate on."""
        return Blend.of(self.valid_data_path)

    @property
    def shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Shares of documents that train, validate and are left out."""
        given = None if self.split is None else split_shares(self.split)
        return given or (Fraction(1), Fraction(0), Fraction(0))

    @property
    def has_validation(self) -> bool:
        """Whether there are documents to validate on."""
        return bool(self.valid_data_path) or bool(self.shares[1])

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if sound("data_path", "train_data_path"):
            if self.data_path and self.train_data_path:
                yield Problem("--data-path", " ".join(self.data_path), "contradicts --train-data-path: both name the "
                              "training data", "put all training files behind one of them")
            if not (self.data_path or self.train_data_path):
                yield Problem("--data-path", "", "is required: there is nothing to train on",
                              "give --data-path FILE [FILE ...]")
        for name in ("data_path", "train_data_path", "valid_data_path"):
            if sound(name):
                yield from self._path_rules(self.flag(name), getattr(self, name))
        if sound("split") and self.split is not None:
            yield from self._split_rules(self.split)
        if sound("tokenizer_type", "tokenizer_model"):
            if self.tokenizer_type == HUGGING_FACE and self.tokenizer_model is None:
                yield Problem("--tokenizer-model", "", f"is required with --tokenizer-type {HUGGING_FACE}",
                              "give the path of a tokenizer.json or of its directory")
            elif self.tokenizer_type != HUGGING_FACE and self.tokenizer_model is not None:
                yield Problem("--tokenizer-model", self.tokenizer_model, f"a {self.tokenizer_type} reads no model file",
                              f"leave it out, or give --tokenizer-type {HUGGING_FACE}")
        if sound("tokenizer_type", "vocab_file", "merge_file"):
            for name in ("vocab_file", "merge_file"):
                given = getattr(self, name)
                if self.tokenizer_type == GPT2 and given is None:
                    yield Problem(self.flag(name), "", f"is required with --tokenizer-type {GPT2}", "give its path")
                elif self.tokenizer_type != GPT2 and given is not None:
                    yield Problem(self.flag(name), given, f"a {self.tokenizer_type} reads no such file",
                                  f"leave it out, or give --tokenizer-type {GPT2}")
        if self.chat_template is not None and not self.sft:
            yield Problem("--chat-template", self.chat_template, "templates are applied to conversations only",
                          "add --sft, or leave it out")

    def _path_rules(self, flag: str, words: tuple[str, ...]) -> Iterator[Problem]:
        fault, paths = blend_fault(words), Blend.of(words).paths
        if fault:
            yield Problem(flag, " ".join(words), fault, "give WEIGHT PATH [WEIGHT PATH ...], or paths alone")
        if len(set(paths)) < len(paths):
            twice = sorted({path for path in paths if paths.count(path) > 1})
            yield Problem(flag, " ".join(twice), "is listed twice", "list every file once")

    def _split_rules(self, split: str) -> Iterator[Problem]:
        if split_shares(split) is None:
            yield Problem("--split", split, "must be one to three proportions, for training, validation and test; the "
                          "first above 0", "give for example 969,30,1")
        for name in ("train_data_path", "valid_data_path"):
            if getattr(self, name):
                yield Problem("--split", split, f"divides --data-path, and {self.flag(name)} is not to be divided",
                              "give one or the other")
