"""Rows of all ranks of a zigzag layout, in one process, against attention over the complete pack."""

from itertools import count

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.context_parallel_attention.api import Peers, context_parallel_attention
from megatron_packed.ops.varlen_attention.api import varlen_attention
from megatron_packed.packed.cp_partition import Partition
from megatron_packed.packed.params import PackedSeqParams

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def peers_in_one_process(rank, pieces, comm_type):
    """Build peers that return the keys and values of all ranks without communication."""
    step = count(1)
    return Peers(
        rank=rank,
        size=len(pieces),
        comm_type=comm_type,
        gather_rows=lambda _: torch.cat([kv_2RKH.transpose(0, 1) for kv_2RKH in pieces]),
        pass_on=lambda _: pieces[rank - next(step)],
    )


def by_rows(q_TNH, k_TKH, v_TKH, packed, size, comm_type, **options):
    partitions = [Partition(size=size, rank=rank, zigzag=True) for rank in range(size)]
    order = partitions[0].order(packed)
    q, k, v = ([p.own(x, order) for p in partitions] for x in (q_TNH, k_TKH, v_TKH))
    pieces = [torch.stack(kv) for kv in zip(k, v)]
    outputs = [
        context_parallel_attention(
            q[rank],
            k[rank],
            v[rank],
            packed.cu_seqlens,
            packed.max_seqlen,
            seq_idx_1T=packed.seq_idx,
            slots_T=order.slots_T,
            peers=peers_in_one_process(rank, pieces, comm_type),
            **options,
        )
        for rank in range(size)
    ]
    return torch.cat(outputs)[order.places_T]


@pytest.mark.parametrize("options", [{}, {"window_size": 5, "softmax_scale": 0.7}], ids=str)
@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
@pytest.mark.parametrize(
    ("lengths", "total", "size", "kv_heads", "dtype"),
    [
        ([8, 24, 8, 40], 96, 4, 1, torch.float64),
        ([4, 8, 4, 12], 32, 2, 4, torch.float32),
        ([6, 30, 12], 60, 3, 2, torch.float64),
        ([1200], 1200, 2, 2, torch.float32),
        ([400, 4, 700], 1200, 2, 1, torch.bfloat16),
        ([], 16, 2, 2, torch.float32),
    ],
)
def test_rows_of_all_ranks_are_those_of_the_whole_pack(
    lengths, total, size, kv_heads, dtype, comm_type, options
):
    torch.manual_seed(0)
    packed = PackedSeqParams.from_lengths(lengths, total, capacity=len(lengths) + 2)
    shapes = ((total, 4, 16), (total, kv_heads, 16), (total, kv_heads, 16))
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], dtype=dtype)
    results = []
    for backend in ("whole", comm_type):
        if backend == "whole":
            o_TNH = varlen_attention(
                *inputs, packed.cu_seqlens, packed.max_seqlen, backend="reference", **options
            )
        else:
            o_TNH = by_rows(*inputs, packed, size, comm_type, **options)
        assert o_TNH.dtype == dtype
        results.append((o_TNH, *torch.autograd.grad((o_TNH * weights).sum(), inputs)))
    for expected, found in zip(*results, strict=True):
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert error <= TOLERANCES[dtype]


def test_scores_far_apart_between_ranks_neither_overflow_nor_vanish():
    """Check pieces with scores far apart: the first piece has the smallest or the largest scores."""
    packed = PackedSeqParams.from_lengths([32], 32)
    for scale in (1.0, -1.0):
        q_TNH = torch.full((32, 1, 16), 30.0, dtype=torch.float64)
        k_TKH = scale * torch.linspace(-30, 30, 32, dtype=torch.float64).view(32, 1, 1).expand(
            32, 1, 16
        )
        v_TKH = torch.randn(32, 1, 16, dtype=torch.float64)
        expected = varlen_attention(q_TNH, k_TKH, v_TKH, packed.cu_seqlens, 32, backend="reference")
        torch.testing.assert_close(by_rows(q_TNH, k_TKH, v_TKH, packed, 4, "p2p"), expected)


def test_a_forced_backend_that_cannot_serve_says_why_and_what_can():
    x = torch.randn(4, 2, 8)
    packed = PackedSeqParams.from_lengths([8], 8)
    peers = Peers(rank=0, size=2, comm_type="p2p", gather_rows=lambda t: t, pass_on=lambda t: t)
    options = {"seq_idx_1T": packed.seq_idx, "slots_T": torch.arange(8), "peers": peers}
    with pytest.raises(
        NoBackendError,
        match=r"transformer_engine.*Use --cp-comm-type a2a, which works with every attention backend",
    ):
        context_parallel_attention(
            x, x, x, packed.cu_seqlens, 8, **options, backend="transformer_engine"
        )
