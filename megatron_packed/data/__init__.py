"""Training data: source files, tokens, packs, and micro-batches.

``sources`` reads files and caches tokens, ``tokenizers`` encodes text, ``index`` reads and writes
Megatron-LM's indexed data sets, and ``packing`` decides which documents share a pack.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.data.documents import Documents as Documents
    from megatron_packed.data.documents import JoinedDocuments as JoinedDocuments
    from megatron_packed.data.documents import ShuffledDocuments as ShuffledDocuments
    from megatron_packed.data.errors import BadLine as BadLine
    from megatron_packed.data.errors import DataError as DataError
    from megatron_packed.data.loader import Loader as Loader
    from megatron_packed.data.packed_dataset import PackedDataset as PackedDataset
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "documents": ["Documents", "JoinedDocuments", "ShuffledDocuments"],
            "errors": ["BadLine", "DataError"],
            "loader": ["Loader"],
            "packed_dataset": ["PackedDataset"],
        },
    )
