"""Shifts of tokens, labels and masks inside documents, against loops over the documents."""

import numpy as np
import pytest
import torch

from megatron_packed.packed.later_tokens import later, reaches
from megatron_packed.packed.micro_batch import MOST_DEPTHS, MicroBatch


def make(lengths, total, alignment=1, seed=0):
    rng = np.random.default_rng(seed)
    documents = [(rng.integers(1, 90, n), rng.random(n) < 0.7) for n in lengths]
    batch = MicroBatch.build(documents, total, capacity=len(lengths) + 2, alignment=alignment)
    return documents, batch


@pytest.mark.parametrize("depth", [1, 2, 3, 40])
@pytest.mark.parametrize(
    ("lengths", "total", "alignment"),
    [([1, 2, 3, 9, 1, 4], 24, 1), ([1, 5, 3], 28, 4), ([13], 13, 1), ([], 6, 1), ([1], 1, 1)],
)
def test_every_slot_gets_the_value_of_its_own_document(lengths, total, alignment, depth):
    documents, batch = make(lengths, total, alignment)
    want = {name: torch.zeros(total) for name in ("reaches", "tokens", "labels", "mask")}
    for start, (tokens, mask) in zip(batch.packed.cu_seqlens_cpu.tolist(), documents):
        for i in range(len(tokens) - depth):
            want["reaches"][start + i] = 1
            want["tokens"][start + i] = int(tokens[i + depth])
            if i + depth + 1 < len(tokens) and mask[i + depth + 1]:
                want["labels"][start + i] = int(tokens[i + depth + 1])
                want["mask"][start + i] = 1
    reaches_T = reaches(batch.packed, depth)
    found = {"reaches": reaches_T}
    for name, x_T in zip(
        ("tokens", "labels", "mask"), (batch.tokens, batch.labels, batch.loss_mask)
    ):
        found[name] = later(x_T, depth, reaches_T)
        assert found[name].dtype == x_T.dtype
    for name, value in want.items():
        assert torch.equal(found[name].float(), value), name
    # The scale of the depth, if a micro-batch has one, is that of its own targets.
    if depth <= MOST_DEPTHS:
        assert batch.depth_scales[depth - 1] == 1 / max(float(want["mask"].sum()), 1)
