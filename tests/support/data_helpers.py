"""Small tokenizers and data sets for the data tests."""

import dataclasses
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_packed.data.errors import BadLine
from megatron_packed.data.index.indexed_file import IndexedFile
from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.step_plan import PieceTable
from megatron_packed.data.sources.line_schema import parse_line
from megatron_packed.data.sources.tokenized_dataset import TokenizedDataset, open_dataset
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.chat_format import TemplateFormat
from megatron_packed.data.tokenizers.encode import EncodedDocument, SampleEncoder
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.packed.array_types import Int32Array

CORPUS = [
    "Hello there, how are you today? I am fine.\n\nThe user asks, the assistant answers. "
] * 20

AWKWARD = [
    "",
    " ",
    "a",
    "  Hello  there, \t how\n\n\nare you?  ",
    "don't STOPNow 12345 x_y/z\r\n!?\n/",
    "é e\u0301 ﬁ",
    "日本語のテキスト",
    "😀👩‍👩‍👧‍👦 \u200b\u00a0\u3000\ufeff",
    "\x01\x7f\x80",
    "a<s>b</s> <unk><pad><SPECIAL_10>",
    "hello<|im_end|>\n<|im_start|>the",
    "<b>bold</b>▁under▁",
    "x" * 3000,
    " \n" * 500,
    "\U0010ffff\ue000",
]
"""Texts that are difficult for tokenizers."""


def evaluation_of(plan: PackPlan, max_steps: int | None = None) -> EvaluationPlan:
    """Return a plan of one evaluation over the pieces of a plan, by its rules."""
    shared = {field.name: getattr(plan, field.name) for field in dataclasses.fields(PieceTable)}
    return EvaluationPlan(**shared, max_steps=max_steps)


def sequence_of(file: IndexedFile, number: int) -> Int32Array:
    """Return the tokens of one sequence of an indexed data set."""
    ends = np.cumsum([0, *file.lengths])
    return file.tokens(int(ends[number]), int(ends[number + 1]))


def save_tokenizer(directory: Path, engine: tokenizers.Tokenizer, **config) -> HuggingFaceTokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    engine.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(directory)


def byte_level(
    special_tokens=("</s>", "<|im_start|>", "<|im_end|>"), corpus=CORPUS
) -> tokenizers.Tokenizer:
    """Return a tokenizer like GPT-2, Llama 3 and Qwen, which can encode pieces separately."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=alphabet,
            special_tokens=list(special_tokens),
            show_progress=False,
        ),
    )
    return engine


def metaspace(special_tokens=("<s>", "</s>")) -> tokenizers.Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral.

    It puts a space before the text that it encodes, so pieces cannot be encoded separately.
    """
    engine = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    engine.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = [*sorted(set("".join(CORPUS) + "[]/INST|<>=:_bcxyz")), "▁"]
    engine.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=alphabet,
            special_tokens=["<unk>", *special_tokens],
            show_progress=False,
        ),
    )
    return engine


def conversation(*turns: str, **fields) -> str:
    """Return a JSONL line with alternating user and assistant messages."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": content} for n, content in enumerate(turns)]
    return json.dumps({"messages": messages, **fields})


def open_files(paths, tokenizer=None, chat=None, **options) -> TokenizedDataset:
    """Return the documents of files, tokenised with ``chat`` or with the built-in template."""
    tokenizer = tokenizer or ByteTokenizer()
    chat = chat or TemplateFormat(None, tokenizer)
    return open_dataset(paths, tokenizer, chat, **{"sft": True, "show": False, **options})


def open_lines(tmp_path: Path, lines: list[str], **options) -> TokenizedDataset:
    """Return the documents of lines, as `open_files` does."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    cache = {"max_bad_fraction": 1.0, "num_threads": 1, "cache_root": tmp_path / "cache"}
    return open_files([path], **{**cache, **options})


def with_peak(function, *arguments, **options):
    """Return the result of a function, and the most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        return function(*arguments, **options), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@contextmanager
def refused(reason: str, detail: str = "") -> Iterator[None]:
    """Expect a line to be refused for a reason, with a text in the place of the fault."""
    with pytest.raises(BadLine) as caught:
        yield
    assert caught.value.reason == reason and detail in caught.value.detail


def encode(tokenizer, chat, *samples) -> list[list[EncodedDocument] | BadLine]:
    """Return the documents of each sample, encoded as a separate line."""
    outcomes = SampleEncoder(tokenizer=tokenizer, chat=chat).encode([[s] for s in samples])
    return [out if isinstance(out, BadLine) else out.documents for out in outcomes]


def one(tokenizer, chat, sample) -> EncodedDocument:
    [documents] = encode(tokenizer, chat, sample)
    assert not isinstance(documents, BadLine), documents
    [document] = documents
    return document


def marked(tokenizer, document) -> str:
    """Return the text of a document with its targets in brackets."""
    text = ""
    for token, target in zip(document.ids, document.targets):
        piece = tokenizer.decode([token])
        text += f"[{piece}]" if target else piece
    return text.replace("][", "")


def samples_of(line: object, *options: Any) -> list[Any]:
    """Return the samples of a line with this value; options are those of `parse_line`."""
    return parse_line(json.dumps(line).encode(), *options)
