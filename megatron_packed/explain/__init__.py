"""Description of a run on this machine: its kernels and why they were chosen, and its capabilities.

``report.py`` is ``--explain``, ``run_description.py`` prints the lines at the start of a run, and
``op_requests.py`` finds what the layers ask of their ops.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.explain.kernel_reasons import chosen_kernels as chosen_kernels
    from megatron_packed.explain.report import capabilities as capabilities
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "report": ["capabilities"],
            "kernel_reasons": ["chosen_kernels"],
        },
    )
