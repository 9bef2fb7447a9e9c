"""Where documents come from and how they become tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Section, Sound, option

HUGGING_FACE, BYTES, TRAINED_BPE = "HuggingFaceTokenizer", "ByteTokenizer", "TrainedBPETokenizer"
CHAT_TEMPLATES = ("chatml",)
"""Names of built-in chat templates."""
CACHE_NAME = ".megatron_packed_cache"
"""Directory beside the first file that holds tokenised data when --data-cache-path names none."""
_CONVERT = f"convert it to a tokenizer.json and give {HUGGING_FACE}"
_NOT_BUILT = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
                     "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"), _CONVERT),
    "NullTokenizer": f"give {BYTES}",
    "MultimodalTokenizer": f"models read text only: give {HUGGING_FACE}",
    "NullMultimodalTokenizer": f"models read text only: give {BYTES}",
}


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, title="data"):
    """Training and validation documents, and the tokenizer."""

    data_path: tuple[str, ...] = option(
        (), "Documents to train on: files (.jsonl, .jsonl.gz with messages, prompt/completion or text), directories of "
        "them, or patterns with *.", group="files", path="input_data",
    )
    train_data_path: tuple[str, ...] = option(
        (), "The same as --data-path, beside --valid-data-path.", group="files", path="input_data"
    )
    valid_data_path: tuple[str, ...] = option(
        (), "Documents to validate on, named likewise.", group="files", path="input_data"
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
        BYTES, "Tokenizer: a tokenizer.json of Hugging Face, bytes as tokens, or a BPE trained on the training data.",
        group="tokenizer", choices=(HUGGING_FACE, BYTES, TRAINED_BPE), value_aliases={"SFTTokenizer": HUGGING_FACE},
        not_built=_NOT_BUILT,
        megatron=("none: required", "bytes need no file"),
    )
    tokenizer_model: str | None = option(
        None, "tokenizer.json, or the directory that holds it.", group="tokenizer", path="input_file"
    )
    tokenizer_vocab_size: int = option(
        4096, "Entries of a TrainedBPETokenizer.", unit="tokens", group="tokenizer", minimum=260, maximum=1 << 20
    )
    chat_template: str | None = option(
        None, f"Chat template: a jinja2 file, or {' or '.join(CHAT_TEMPLATES)}; by default the tokenizer's own.",
        group="tokenizer",
    )

    @property
    def train_paths(self) -> tuple[str, ...]:
        """The files to train on, whichever option named them."""
        return self.train_data_path or self.data_path

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if sound("data_path", "train_data_path"):
            if self.data_path and self.train_data_path:
                yield Problem("--data-path", " ".join(self.data_path), "contradicts --train-data-path: both name the "
                              "training data", "put all training files behind one of them")
            if not self.train_paths:
                yield Problem("--data-path", "", "is required: there is nothing to train on",
                              "give --data-path FILE [FILE ...]")
        for name in ("data_path", "train_data_path", "valid_data_path"):
            paths = getattr(self, name)
            if sound(name) and len(set(paths)) < len(paths):
                twice = sorted({path for path in paths if paths.count(path) > 1})
                yield Problem(self.flag(name), " ".join(twice), "is listed twice", "list every file once")
        if sound("tokenizer_type", "tokenizer_model"):
            if self.tokenizer_type == HUGGING_FACE and self.tokenizer_model is None:
                yield Problem("--tokenizer-model", "", f"is required with --tokenizer-type {HUGGING_FACE}",
                              "give the path of a tokenizer.json or of its directory")
            elif self.tokenizer_type != HUGGING_FACE and self.tokenizer_model is not None:
                yield Problem("--tokenizer-model", self.tokenizer_model, f"a {self.tokenizer_type} reads no model file",
                              f"leave it out, or give --tokenizer-type {HUGGING_FACE}")
        if self.chat_template is not None and not self.sft:
            yield Problem("--chat-template", self.chat_template, "templates are applied to conversations only",
                          "add --sft, or leave it out")
