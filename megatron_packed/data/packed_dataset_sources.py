"""Tokenised documents of the paths or records that a `PackedDataset` gets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.sections.data_parts.tokenizer import (
    ANSWER_ENDS,
    DATA_RULES,
    EARLIER_RULES,
    MULTI_TURN,
    SPECIAL_IN_TEXT,
    UNPRINTED_POLICIES,
    is_date,
    template_kwargs_fault,
)
from megatron_packed.data.documents import DocumentRange, Documents, JoinedDocuments
from megatron_packed.data.errors import DataError
from megatron_packed.data.index.indexed_documents import IndexedDocuments
from megatron_packed.data.packed_dataset_checks import Data, paths_or_records
from megatron_packed.data.progress_bar import say
from megatron_packed.data.records import (
    is_huggingface_dataset,
    rows_of_table,
    selected_columns,
    write_records,
)
from megatron_packed.data.sources.source_files import names_indexed
from megatron_packed.data.sources.tokenized_dataset import (
    DEFAULT_CACHE_NAME,
    TokenizedDataset,
    open_dataset,
)
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import ChatFormat, chat_format
from megatron_packed.data.tokenizers.untrusted_tokenizer import open_tokenizer
from megatron_packed.files.regular_files import StrPath


@dataclass(frozen=True, kw_only=True)
class ConversationOptions:
    """Options of a `PackedDataset` that shape the documents of conversations.

    Raises:
        ValueError: an option has a wrong value, or needs ``sft``.
    """

    sft: bool
    chat_template: StrPath | None
    answer_end: str
    multi_turn: str
    unprinted_policy: str
    special_tokens_in_text: str | None
    chat_template_date: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    data_rules: int

    def __post_init__(self) -> None:
        for name in ("chat_template", "chat_template_date", "chat_template_kwargs"):
            if getattr(self, name) is not None and not self.sft:
                raise ValueError(
                    f"{name} is for conversations only; add sft=True, or leave it out."
                )
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                names = " or ".join(map(str, allowed))
                raise ValueError(f"{name} is {value!r}; give {names}.")
        if self.chat_template_date is not None and not is_date(self.chat_template_date):
            raise ValueError(
                f"chat_template_date is {self.chat_template_date!r}; give a date like '2026-11-28'."
            )
        if self._kwargs is not None and (fault := template_kwargs_fault(self._kwargs)):
            raise ValueError(
                f"chat_template_kwargs {self.chat_template_kwargs!r} {fault}; give, for example, "
                "{'enable_thinking': False}."
            )

    @property
    def _kwargs(self) -> str | None:
        """Variables of the chat template as JSON."""
        variables = self.chat_template_kwargs
        return None if variables is None else json.dumps(variables, sort_keys=True)

    def chat_format(self, tokenizer: Tokenizer) -> ChatFormat:
        template = None if self.chat_template is None else os.fspath(self.chat_template)
        return chat_format(
            tokenizer,
            template,
            answer_end=self.answer_end,
            multi_turn=self.multi_turn,
            unprinted_policy=self.unprinted_policy,
            date=self.chat_template_date,
            kwargs=self._kwargs,
        )


_CHOICES: dict[str, tuple[Any, ...]] = {
    "answer_end": ANSWER_ENDS,
    "multi_turn": MULTI_TURN,
    "unprinted_policy": UNPRINTED_POLICIES,
    "special_tokens_in_text": (None, *SPECIAL_IN_TEXT),
    "data_rules": (EARLIER_RULES, DATA_RULES),
}
"""Values that the options may have."""


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options of a `PackedDataset` for the reading of its data."""

    texts: bool
    shorten_to: int | None
    """Most tokens of a conversation or prompt; None shortens nothing."""
    max_bad_fraction: float
    fields: DataFields | None
    cache_dir: StrPath | None
    show: bool


def open_sources(
    data: Data,
    tokenizer: Tokenizer | StrPath,
    conversations: ConversationOptions,
    reading: ReadingOptions,
) -> list[Callable[[], Documents]]:
    """Tokenise data that is not in the cache; return functions that open the documents.

    The functions can be pickled. They refer to files, never to records in memory.
    """
    used = open_tokenizer(tokenizer)
    try:
        paths, cache = _paths(data, reading)
        text, prefixes = _divided(paths, conversations.sft)
        sources: list[Callable[[], Documents]] = [
            partial(IndexedDocuments, prefix, vocab_size=used.vocab_size, eod_id=used.eod_id)
            for prefix in prefixes
        ]
        if text:
            chat = conversations.chat_format(used)
            for sentence in chat.sentences() if conversations.sft and reading.show else ():
                say(sentence)
            dataset = open_dataset(
                text,
                used,
                chat,
                sft=conversations.sft,
                shorten_to=reading.shorten_to,
                cache_root=cache,
                max_bad_fraction=reading.max_bad_fraction,
                fields=reading.fields,
                show=reading.show,
                special_tokens_in_text=conversations.special_tokens_in_text,
                rules=conversations.data_rules,
            )
            sources.insert(0, partial(TokenizedDataset, dataset.directory))
    finally:
        if used is not tokenizer:
            used.close()  # end its child processes, which each hold the vocabulary in memory
    return sources


def _paths(data: Data, reading: ReadingOptions) -> tuple[list[StrPath], Path | None]:
    """Return the paths to read, and the directory for caches; None for the one next to the files.

    Records are written as a file first.
    """
    cache = None if reading.cache_dir is None else Path(reading.cache_dir)
    unread: list[str] = []
    if is_huggingface_dataset(data):
        data, unread = selected_columns(data, reading.fields)
    values = paths_or_records(data, reading.texts)
    if isinstance(values, list):
        return values, cache
    cache = cache or Path(DEFAULT_CACHE_NAME)
    records = rows_of_table(values, unread) if is_huggingface_dataset(data) else values
    count = len(data) if isinstance(data, Sized) else None
    file = write_records(records, cache, texts=reading.texts, count=count, show=reading.show)
    return [file], cache


def _divided(paths: Sequence[StrPath], sft: bool) -> tuple[list[str], list[str]]:
    """Return the paths of text files, and the prefixes of indexed data sets."""
    names = [os.fspath(path) for path in paths]
    prefixes = [name for name in names if names_indexed(name)]
    if prefixes and sft:
        raise DataError(
            f"{prefixes[0]} is an indexed data set, which does not mark answers; leave sft out, or give the "
            "conversations as JSONL."
        )
    return [name for name in names if name not in prefixes], prefixes


def joined(sources: Sequence[Callable[[], Documents]]) -> Documents:
    """Open the documents of all sources as one."""
    opened = [source() for source in sources]
    if len(opened) == 1:
        return opened[0]
    return JoinedDocuments([DocumentRange(documents, 0, len(documents)) for documents in opened])
