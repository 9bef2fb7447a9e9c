"""Megatron-LM's flags: those that are always on, those that are refused, and other defaults."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.megatron.flags import ALWAYS as ALWAYS
    from megatron_packed.config.megatron.flags import REFUSAL_OF as REFUSAL_OF
    from megatron_packed.config.megatron.flags import REFUSED as REFUSED
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "flags": ["ALWAYS", "REFUSAL_OF", "REFUSED"],
        },
    )
