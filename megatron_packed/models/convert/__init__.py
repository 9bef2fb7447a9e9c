"""Weights of Hugging Face's models as checkpoints, and back.

``huggingface_names.py`` says which families there are and how their tensors are named.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.convert.export_huggingface import to_huggingface as to_huggingface
    from megatron_packed.models.convert.huggingface_names import Family as Family
    from megatron_packed.models.convert.import_huggingface import (
        from_huggingface as from_huggingface,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "export_huggingface": ["to_huggingface"],
            "import_huggingface": ["from_huggingface"],
            "huggingface_names": ["Family"],
        },
    )
