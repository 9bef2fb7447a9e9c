"""`benchmarks/metadata_sync.py` on the CPU: both paths give equal results, only one waits."""

import pytest
import torch

from metadata_sync import CASES, ONCE, PER_LAYER, PER_LAYER_ONE_MASK_KERNEL, Case, Run
from support.recorder import Recorder

ASKING = ("_local_scalar_dense", "repeat_interleave")
"""Operations whose result Python needs, or whose output size depends on the data."""


def questions(run, path):
    run.rebuild.path = path
    batch = run.batches[0].to("cpu")
    with Recorder() as recorder, torch.no_grad():
        run.model(batch)
    return sum(name.split(".")[1] in ASKING for name, _ in recorder.calls)


@pytest.mark.parametrize("name", ["thin16", "hybrid"])
def test_layers_ask_only_where_they_rebuild(name):
    run = Run(CASES[name], torch.device("cpu"))
    assert questions(run, ONCE) == 0
    assert questions(run, PER_LAYER) == run.shape.pattern.count("*") + run.shape.pattern.count("M")
    assert run.loss(ONCE) == run.loss(PER_LAYER)


def test_masks_that_layers_build_equal_the_shared_one():
    run = Run(Case("wide", "sdpa"), torch.device("cpu"))
    losses = {path: run.loss(path, 1) for path in (ONCE, PER_LAYER, PER_LAYER_ONE_MASK_KERNEL)}
    assert len(set(losses.values())) == 1, losses
    # A mask that ignores document boundaries changes the loss.
    run.rebuild._mask = lambda hidden_TD, packed: (
        torch.ones(len(hidden_TD), len(hidden_TD)).tril().bool()
    )
    assert run.loss(PER_LAYER, 1) != losses[ONCE]
