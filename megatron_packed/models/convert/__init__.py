"""Conversion of Hugging Face weights to a checkpoint, and back.

``families`` lists the supported model families and the names of their tensors.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.convert.export_huggingface import to_huggingface as to_huggingface
    from megatron_packed.models.convert.export_huggingface import (
        trained_to_huggingface as trained_to_huggingface,
    )
    from megatron_packed.models.convert.families.family import Family as Family
    from megatron_packed.models.convert.import_huggingface import (
        from_huggingface as from_huggingface,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "export_huggingface": ["to_huggingface", "trained_to_huggingface"],
            "import_huggingface": ["from_huggingface"],
            "families.family": ["Family"],
        },
    )
