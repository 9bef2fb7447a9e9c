"""Write the prepared files of `test_indexed_file.py` with megatron-core, which the tests do not need."""

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from common import TESTS

FOLDER = TESTS / "unit" / "data" / "index" / "indexed"
DOCUMENTS = {
    "uint16": [[[1, 2, 65499]], [[7]], [[9, 8, 7, 6], [5]], [[]], [[3, 3, 3]]],
    "int32": [[[1, 2, 65499, 2**31 - 1]], [[0, 0], [1], [2, 2]], [[4] * 40]],
}
"""For each type, the documents as lists of sequences of tokens."""

if __name__ == "__main__":
    for name, documents in DOCUMENTS.items():
        builder = IndexedDatasetBuilder(str(FOLDER / f"{name}.bin"), dtype=getattr(np, name))
        for sequences in documents:
            for tokens in sequences:
                builder.add_item(torch.tensor(tokens, dtype=torch.int64))
            builder.end_document()
        builder.finalize(str(FOLDER / f"{name}.idx"))
