"""RMS normalisation with a gate before it, as in Mamba-2, or after it, as in gated delta nets."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm as gated_rms_norm
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["gated_rms_norm"],
        },
    )
