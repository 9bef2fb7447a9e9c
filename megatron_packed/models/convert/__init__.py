"""Weights of Hugging Face's models as checkpoints, and back.

``huggingface_names.py`` says which families there are and how their tensors are named.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.convert.convert_checkpoint import (
        from_huggingface as from_huggingface,
    )
    from megatron_packed.models.convert.convert_checkpoint import to_huggingface as to_huggingface
    from megatron_packed.models.convert.huggingface_names import Family as Family
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "convert_checkpoint": ["from_huggingface", "to_huggingface"],
            "huggingface_names": ["Family"],
        },
    )
