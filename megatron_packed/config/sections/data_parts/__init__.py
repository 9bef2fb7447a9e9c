"""Options of `DataConfig`, one module for each subject."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.sections.data_parts.files import FileOptions as FileOptions
    from megatron_packed.config.sections.data_parts.tokenizer import (
        TokenizerOptions as TokenizerOptions,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "files": ["FileOptions"],
            "tokenizer": ["TokenizerOptions"],
        },
    )
