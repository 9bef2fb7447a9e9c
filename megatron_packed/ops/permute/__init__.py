"""Copies of tokens sorted by expert, and the weighted sum of each token's rows."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.permute.api import permute as permute
    from megatron_packed.ops.permute.api import unpermute as unpermute
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["permute", "unpermute"],
        },
    )
