"""Output projection and cross-entropy in one op, without the logits of all tokens in memory."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.cross_entropy.api import linear_cross_entropy as linear_cross_entropy
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["linear_cross_entropy"],
        },
    )
