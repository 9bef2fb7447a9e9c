"""Ops on plain tensors: one folder each, with a reference in PyTorch and faster backends.

``backend_dispatch.py`` chooses the backend of an op and reports why other backends were not chosen.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.ops.backend_dispatch import Backend as Backend
    from megatron_packed.ops.backend_dispatch import NoBackendError as NoBackendError
    from megatron_packed.ops.backend_dispatch import Op as Op
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "backend_dispatch": ["Backend", "NoBackendError", "Op"],
        },
    )
