"""Tokenizers, chat formats, and the encoding of documents with a loss mask."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.data.tokenizers.base import ByteTokenizer as ByteTokenizer
    from megatron_packed.data.tokenizers.base import NullTokenizer as NullTokenizer
    from megatron_packed.data.tokenizers.base import Tokenizer as Tokenizer
    from megatron_packed.data.tokenizers.bpe_training import train_bpe as train_bpe
    from megatron_packed.data.tokenizers.encode import SampleEncoder as SampleEncoder
    from megatron_packed.data.tokenizers.huggingface import (
        HuggingFaceTokenizer as HuggingFaceTokenizer,
    )
    from megatron_packed.data.tokenizers.sentencepiece_model import (
        SentencePieceTokenizer as SentencePieceTokenizer,
    )
    from megatron_packed.data.tokenizers.tiktoken_bpe import TikTokenizer as TikTokenizer
    from megatron_packed.data.tokenizers.untrusted_tokenizer import (
        UntrustedTokenizer as UntrustedTokenizer,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "base": ["ByteTokenizer", "NullTokenizer", "Tokenizer"],
            "bpe_training": ["train_bpe"],
            "encode": ["SampleEncoder"],
            "untrusted_tokenizer": ["UntrustedTokenizer"],
            "huggingface": ["HuggingFaceTokenizer"],
            "sentencepiece_model": ["SentencePieceTokenizer"],
            "tiktoken_bpe": ["TikTokenizer"],
        },
    )
