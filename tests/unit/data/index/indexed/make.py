"""Script that writes the prepared files of this directory with megatron-core.

With these files the tests need no megatron-core.
"""

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).parent
DOCUMENTS = {
    "uint16": [[[1, 2, 65499]], [[7]], [[9, 8, 7, 6], [5]], [[]], [[3, 3, 3]]],
    "int32": [[[1, 2, 65499, 2**31 - 1]], [[0, 0], [1], [2, 2]], [[4] * 40]],
}
"""For each type, the documents as lists of sequences of tokens."""

if __name__ == "__main__":
    for name, documents in DOCUMENTS.items():
        builder = IndexedDatasetBuilder(str(HERE / f"{name}.bin"), dtype=getattr(np, name))
        for sequences in documents:
            for tokens in sequences:
                builder.add_item(torch.tensor(tokens, dtype=torch.int64))
            builder.end_document()
        builder.finalize(str(HERE / f"{name}.idx"))
