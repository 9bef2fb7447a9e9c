"""Data files: JSONL, Parquet and Arrow tables, their schemas, and the cache of their tokens."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.data.sources.data_report import DataReport as DataReport
    from megatron_packed.data.sources.line_schema import Conversation as Conversation
    from megatron_packed.data.sources.line_schema import PromptCompletion as PromptCompletion
    from megatron_packed.data.sources.source_files import expand_paths as expand_paths
    from megatron_packed.data.sources.tokenized_dataset import TokenizedDataset as TokenizedDataset
    from megatron_packed.data.sources.tokenized_dataset import open_dataset as open_dataset
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "data_report": ["DataReport"],
            "line_schema": ["Conversation", "PromptCompletion"],
            "source_files": ["expand_paths"],
            "tokenized_dataset": ["TokenizedDataset", "open_dataset"],
        },
    )
