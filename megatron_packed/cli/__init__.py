"""Commands of ``megatron-packed``, one module for each; ``main.py`` lists them. No other package
imports this package.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.cli.errors import UsageError as UsageError
    from megatron_packed.cli.errors import check_ending as check_ending
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "errors": ["UsageError", "check_ending"],
        },
    )
