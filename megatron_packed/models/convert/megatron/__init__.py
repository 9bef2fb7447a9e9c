"""Weights from checkpoints of Megatron (``torch_dist``), read without running anything in them."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.convert.megatron.import_megatron import (
        from_megatron as from_megatron,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, {"import_megatron": ["from_megatron"]})
