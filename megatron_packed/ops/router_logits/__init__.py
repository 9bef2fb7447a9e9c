"""Logits of a router: product of rows with a weight in float32."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.router_logits.api import router_logits as router_logits
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["router_logits"],
        },
    )
