"""``megatron-packed doctor``: report installed packages, which of them work on this machine, and
their replacements.
"""

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
