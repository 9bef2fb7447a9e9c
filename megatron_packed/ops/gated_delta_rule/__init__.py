"""Gated delta rule: the recurrence of gated delta nets, which restarts at each document."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule as gated_delta_rule
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": ["gated_delta_rule"],
        },
    )
