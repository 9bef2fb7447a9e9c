"""Dense MLP whose activation and its gradient may be parts of products."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.dense_mlp.api import JoinedProducts as JoinedProducts
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["JoinedProducts"],
        },
    )
