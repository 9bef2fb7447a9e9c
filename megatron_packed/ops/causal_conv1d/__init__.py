"""Causal depthwise convolution that restarts at each document."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.causal_conv1d.api import causal_conv1d as causal_conv1d
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["causal_conv1d"],
        },
    )
