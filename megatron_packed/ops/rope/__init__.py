"""Rotary position embedding for packed documents, with a position for each token."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.rope.api import apply_rope as apply_rope
    from megatron_packed.ops.rope.api import rope_tables as rope_tables
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["apply_rope", "rope_tables"],
        },
    )
