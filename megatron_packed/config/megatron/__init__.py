"""Megatron-LM's flags: flags whose effect is always on, refused flags, and different defaults."""

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
