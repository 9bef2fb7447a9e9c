"""MLPs of several experts, computed by grouped matrix products."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.grouped_mlp.api import grouped_mlp as grouped_mlp
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["grouped_mlp"],
        },
    )
