"""RMS normalisation, with or without the residual connection, and layer normalisation."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.rms_norm.api import layer_norm as layer_norm
    from megatron_packed.ops.rms_norm.api import rms_norm as rms_norm
    from megatron_packed.ops.rms_norm.api import rms_norm_with_residual as rms_norm_with_residual
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["layer_norm", "rms_norm", "rms_norm_with_residual"],
        },
    )
