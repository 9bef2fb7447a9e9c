"""Inputs of a run: documents, packs of documents, and prompts.

``run_data.py`` brings them together: ``open_documents.py`` opens tokenizer and documents,
``plan_packs.py`` plans the packs, and ``sample_and_metric_prompts.py`` reads what the model answers
during training.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.inputs.open_documents import build_tokenizer as build_tokenizer
    from megatron_packed.inputs.run_data import RunData as RunData
    from megatron_packed.inputs.run_data import build_data as build_data
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "open_documents": ["build_tokenizer"],
            "run_data": ["RunData", "build_data"],
        },
    )
