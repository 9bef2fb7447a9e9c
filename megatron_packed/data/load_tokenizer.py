"""The tokenizer and chat format that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from megatron_packed.config.data import BYTES, HUGGING_FACE, DataConfig
from megatron_packed.data.bpe import train_bpe
from megatron_packed.data.chat import ChatFormat, IdentityFormat, chat_format
from megatron_packed.data.dataset import cache_directory
from megatron_packed.data.errors import DataError
from megatron_packed.data.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_packed.data.sources import expand_paths
from megatron_packed.data.tokenizer import ByteTokenizer, Tokenizer


def load_tokenizer(config: DataConfig, log: Callable[[str], None] = lambda line: None) -> Tokenizer:
    """The tokenizer of a run; a vocabulary that is to be trained is trained on the training data, once.

    Raises:
        DataError: a file is missing or damaged.
    """
    if config.tokenizer_type == HUGGING_FACE:
        if config.tokenizer_model is None:
            raise DataError(f"--tokenizer-type {HUGGING_FACE} needs --tokenizer-model, a tokenizer.json.")
        return HuggingFaceTokenizer(config.tokenizer_model)
    if config.tokenizer_type == BYTES:
        return ByteTokenizer()
    files = expand_paths(config.train_paths)
    root = cache_directory(files, config.data_cache_path)
    return train_bpe(files, config.tokenizer_vocab_size, root, log=log)


def load_chat_format(config: DataConfig, tokenizer: Tokenizer) -> ChatFormat:
    """How conversations become text; without --sft there are none, and no template is compiled.

    Raises:
        DataError: the template cannot be read or does not compile.
    """
    return chat_format("default", tokenizer, config.chat_template) if config.sft else IdentityFormat()
