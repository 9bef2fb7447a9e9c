"""Options of data: files of documents and their tokenizer."""

from __future__ import annotations

from megatron_packed.config.sections.data_parts.files import FileOptions
from megatron_packed.config.sections.data_parts.tokenizer import TokenizerOptions


class DataConfig(  # dataclass fields follow the bases from right to left
    TokenizerOptions, FileOptions, title="data"
):
    """Options of training, validation and test documents, and of the tokenizer."""
