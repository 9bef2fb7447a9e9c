"""State space duality: the scan of Mamba-2, which restarts at each document."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.ssd.api import ssd as ssd
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["ssd"],
        },
    )
