"""Code that te_patches inserts into TransformerEngine, on a GPU: captured once and replayed for
other packs.

TransformerEngine itself is not used.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def patch(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "te_patches"))
    yield importlib.import_module("te_thd_patch")
    sys.modules.pop("te_thd_patch")


def test_stand_ins_are_captured_and_replayed_over_other_packs(patch):
    packs = [
        torch.tensor(ends, dtype=torch.int32)
        for ends in ([0, 8, 32, 64], [0, 64, 64, 64], [0, 16, 40, 48])
    ]

    def work(x, gradient, cu_seqlens):
        assert patch.equal(cu_seqlens[:-1], cu_seqlens[:-1], True)
        assert not patch.equal(cu_seqlens[:-1], cu_seqlens[:-1].clone(), True)
        patch.zero_tail(gradient, cu_seqlens[-1], 1)
        by_rank = patch.to_rank_order(x, cu_seqlens, 4)
        return by_rank, patch.to_sequence_order(by_rank, cu_seqlens, None, 4)

    x, gradients = torch.randn(64, 2, 8), torch.randn(2, 64, 2, 8)
    x_gpu, gradient, cu_seqlens = x.cuda(), gradients.cuda(), packs[0].cuda()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            work(x_gpu, gradient, cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        by_rank, back = work(x_gpu, gradient, cu_seqlens)
    for pack in packs:
        cu_seqlens.copy_(pack)
        gradient.copy_(gradients)
        graph.replay()
        expected = gradients.clone()
        expected_by_rank, expected_back = work(x, expected, pack)
        assert torch.equal(by_rank.cpu(), expected_by_rank)
        assert torch.equal(back.cpu(), expected_back) and torch.equal(expected_back, x)
        assert torch.equal(gradient.cpu(), expected)
