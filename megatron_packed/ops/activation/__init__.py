"""Activation functions of MLPs, including the gated SwiGLU."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.activation.api import activation as activation
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["activation"],
        },
    )
