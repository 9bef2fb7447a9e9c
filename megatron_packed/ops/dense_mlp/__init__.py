"""Backward pass of a dense MLP, whose activation's gradient may be a part of a product."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.dense_mlp.api import JoinedGradient as JoinedGradient
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["JoinedGradient"],
        },
    )
