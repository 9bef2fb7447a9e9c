"""Tables that all layers of a model share."""

import pytest
import torch

from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.tensor_parallel import SINGLE as WHOLE
from megatron_packed.models.pack_tables import PackTables
from megatron_packed.ops.gated_delta_rule.tables import DeltaRuleTables, build_tables
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases


def tables_of(pattern):
    config = cases.tiny_config("M")
    object.__setattr__(config, "hybrid_layer_pattern", pattern)
    return PackTables(
        config,
        tp=WHOLE,
        cp=ALL_ROWS,
        backends=Backends(),
        rotary=None,
        max_positions=256,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("capacity", [3, 6])
def test_gated_delta_nets_get_the_chunks_of_all_slots(capacity):
    packed = PackedSeqParams.from_lengths([65, 1, 130], 200, capacity=capacity)
    tables = tables_of("MG").derive(packed)
    chunks = DeltaRuleTables._make(tables.delta_rule)
    for got, want in zip(chunks, build_tables(packed.cu_seqlens, 200)):
        assert torch.equal(got, want)
    # The tail is the last document that has chunks.
    assert chunks.start_Q.tolist()[:7] == [0, 64, 65, 66, 130, 194, 196]
    assert len(tables.tensors()) == len(chunks)


def test_other_models_have_no_chunks():
    packed = PackedSeqParams.from_lengths([65], 65)
    assert tables_of("M*-").derive(packed).delta_rule is None
