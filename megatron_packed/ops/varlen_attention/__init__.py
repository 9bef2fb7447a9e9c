"""Causal attention inside each document of a pack."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.varlen_attention.api import varlen_attention as varlen_attention
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["varlen_attention"],
        },
    )
