"""``megatron-packed doctor``: what is installed, what of it works here, and what is used instead."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.cli.doctor.findings import Finding as Finding
    from megatron_packed.cli.doctor.findings import State as State
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "findings": ["Finding", "State"],
        },
    )
