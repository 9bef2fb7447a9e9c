"""Weights from and to checkpoints of Megatron (``torch_dist``); nothing in a file is run."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.convert.megatron.export_megatron import to_megatron as to_megatron
    from megatron_packed.models.convert.megatron.import_megatron import (
        from_megatron as from_megatron,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"export_megatron": ["to_megatron"], "import_megatron": ["from_megatron"]}
    )
