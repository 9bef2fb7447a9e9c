"""Attention over sequences that are split over context-parallel ranks in zigzag layout."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.context_parallel_attention.api import (
        context_parallel_attention as context_parallel_attention,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["context_parallel_attention"],
        },
    )
