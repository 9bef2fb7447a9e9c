"""Projection whose result is added to the residual stream, ``residual + x W^T``."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.residual_projection.api import AddedProduct as AddedProduct
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["AddedProduct"],
        },
    )
