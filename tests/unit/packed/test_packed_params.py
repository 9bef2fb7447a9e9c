"""Fields, immutability and conversion of `PackedSeqParams`."""

import sys
import types
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch

from megatron_packed.layers.attention import WindowTables
from megatron_packed.layers.kinds.gated_delta_net import DocumentChunks
from megatron_packed.ops.gated_delta_rule.tables import DeltaRuleTables
from megatron_packed.ops.varlen_attention.tables import MaskTable
from megatron_packed.packed.params import (
    NO_TABLES,
    DepthTables,
    PackedSeqParams,
    RankOrder,
    Samples,
    SharedTables,
)


def test_fields():
    packed = PackedSeqParams.from_lengths([3, 5], 10, capacity=4)
    assert packed.cu_seqlens.tolist() == [0, 3, 8, 10, 10, 10]
    assert (
        packed.cu_seqlens.dtype == packed.seq_idx.dtype == packed.position_ids.dtype == torch.int32
    )
    assert packed.seq_idx.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 2]]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert packed.valid.dtype == torch.bool
    assert packed.valid.tolist() == [True] * 8 + [False] * 2
    assert (packed.num_seqs, packed.capacity, packed.total_tokens, packed.max_seqlen) == (
        2,
        4,
        10,
        5,
    )
    assert packed.document_lengths.tolist() == [3, 5]


def test_exact_capacity_without_a_tail():
    packed = PackedSeqParams.from_lengths([3, 5], 8)
    assert packed.cu_seqlens.tolist() == [0, 3, 8, 8]
    assert packed.capacity == packed.num_seqs == 2
    assert packed.valid.all()


@pytest.mark.parametrize("capacity", [None, 0, 3])
def test_all_tail(capacity):
    packed = PackedSeqParams.from_lengths([], 6, capacity=capacity)
    assert packed.cu_seqlens.tolist() == [0, 6] + [6] * (capacity or 0)
    assert packed.seq_idx.tolist() == [[0] * 6]
    assert packed.position_ids.tolist() == list(range(6))
    assert not packed.valid.any()
    assert (packed.num_seqs, packed.max_seqlen) == (0, 6)
    assert packed.document_lengths.size == 0


def test_max_seqlen_covers_the_tail_and_may_be_raised_but_not_lowered():
    assert PackedSeqParams.from_lengths([3], 20).max_seqlen == 17
    assert PackedSeqParams.from_lengths([3], 20, max_seqlen=20).max_seqlen == 20
    with pytest.raises(
        ValueError, match=r"max_seqlen \(16\) is below the longest row of the pack \(17 tokens"
    ):
        PackedSeqParams.from_lengths([3], 20, max_seqlen=16)


def test_device_tensors_share_one_buffer_and_the_host_twin_does_not():
    packed = PackedSeqParams.from_lengths([3, 5], 10)
    tensors = [packed.cu_seqlens, packed.seq_idx, packed.position_ids, packed.valid]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert (
        packed.cu_seqlens_cpu.untyped_storage().data_ptr()
        != packed.cu_seqlens.untyped_storage().data_ptr()
    )
    packed.cu_seqlens.zero_()  # like a slot that reuses its buffer
    assert packed.cu_seqlens_cpu.tolist() == [0, 3, 8, 10]


def test_immutable_and_tables_make_a_new_value():
    packed = PackedSeqParams.from_lengths([3], 4)
    with pytest.raises(FrozenInstanceError):
        packed.max_seqlen = 9
    with pytest.raises(FrozenInstanceError):
        packed.tables.num_valid = torch.tensor(3.0)
    order = RankOrder(torch.arange(4), torch.arange(4))
    tables = SharedTables(num_valid=torch.tensor(3.0), rank_order=order)
    other = packed.with_tables(tables)
    assert packed.tables is NO_TABLES and other.tables is tables
    assert other.seq_idx is packed.seq_idx


def test_all_tensors_of_tables_are_listed():
    order = RankOrder(torch.arange(4), torch.arange(4))
    mask = MaskTable(mask_TT=torch.ones(4, 4, dtype=torch.bool), window_size=None)
    alone = {name: torch.zeros(1) for name in ("rope_position_ids", "rank_valid", "num_valid")}
    samples = Samples(*torch.zeros(3, 1))
    windows = WindowTables({None: mask})
    chunks = DocumentChunks(DeltaRuleTables(*torch.zeros(8, 1)))
    several = Samples(*torch.zeros(3, 1))
    depths = (DepthTables(*torch.zeros(3, 1), several), DepthTables(*torch.zeros(2, 1), None, None))
    tables = SharedTables(
        rank_order=order,
        of_kinds={WindowTables: windows, DocumentChunks: chunks},
        samples=samples,
        depths=depths,
        **alone,
    )
    of_depths = (*depths[0][:3], *several, *depths[1][:2])
    expected = {
        id(x)
        for x in (*order, mask.mask_TT, *chunks.tensors(), *samples, *of_depths, *alone.values())
    }
    assert {id(x) for x in tables.tensors()} == expected
    assert vars(tables).keys() == {
        "rank_order",
        "of_kinds",
        "samples",
        "depths",
        *alone,
    }
    assert tables.find(DocumentChunks) is chunks and NO_TABLES.find(DocumentChunks) is None
    assert NO_TABLES.tensors() == ()


def test_to_megatron_core(monkeypatch):
    """Conversion sets all fields of a fake of megatron.core's class, without a synchronization.

    The constructor of megatron.core's class would synchronize if it got ``total_tokens``.
    """

    @dataclass
    class MegatronPackedSeqParams:
        qkv_format: str | None = None
        cu_seqlens_q: object = None
        cu_seqlens_kv: object = None
        cu_seqlens_q_padded: object = None
        cu_seqlens_kv_padded: object = None
        max_seqlen_q: int | None = None
        max_seqlen_kv: int | None = None
        total_tokens: int | None = None
        seq_idx: object = None
        pad_between_seqs: bool | None = None

        def __post_init__(self):
            assert self.total_tokens is None, (
                "the constructor would compute seq_idx with a synchronisation"
            )

    module = types.ModuleType("megatron.core.packed_seq_params")
    module.PackedSeqParams = MegatronPackedSeqParams
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", module)
    packed = PackedSeqParams.from_lengths([3, 5], 10, capacity=4)
    theirs = packed.to_megatron_core()
    assert theirs.qkv_format == "thd"
    assert theirs.cu_seqlens_q is theirs.cu_seqlens_kv is packed.cu_seqlens
    assert theirs.max_seqlen_q == theirs.max_seqlen_kv == 5
    assert theirs.seq_idx is packed.seq_idx
    assert theirs.total_tokens == 10
    assert theirs.pad_between_seqs is False
    assert theirs.cu_seqlens_q_padded is None


@pytest.mark.gpu
def test_from_lengths_on_a_gpu_is_one_copy():
    from torch.profiler import ProfilerActivity, profile

    PackedSeqParams.from_lengths([3, 5], 10, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        packed = PackedSeqParams.from_lengths([3, 5], 10, capacity=4, device="cuda")
        torch.cuda.synchronize()
    copies = [event for event in profiler.events() if "Memcpy HtoD" in event.name]
    assert len(copies) == 1
    assert packed.seq_idx.cpu().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 2]]
    assert packed.cu_seqlens_cpu.device.type == "cpu"
