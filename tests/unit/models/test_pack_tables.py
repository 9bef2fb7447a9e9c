"""Tables that all layers of a model share."""

from types import SimpleNamespace

import pytest
import torch

from megatron_packed.layers.kinds.gated_delta_net import MIXER, DocumentChunks
from megatron_packed.models.pack_tables import PackTables
from megatron_packed.ops.gated_delta_rule.tables import build_tables
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases
from support import rank_models
from support.hybrid_cases import CPU_BUILD


def tables_of(pattern):
    config = cases.tiny_config("M")
    object.__setattr__(config, "hybrid_layer_pattern", pattern)
    build = CPU_BUILD
    return PackTables(config, build, rotary=None, max_positions=256)


@pytest.mark.parametrize("capacity", [3, 6])
def test_gated_delta_nets_get_the_chunks_of_all_slots(capacity):
    packed = PackedSeqParams.from_lengths([65, 1, 130], 200, capacity=capacity)
    tables = tables_of("MG").derive(packed)
    chunks = tables.find(DocumentChunks).delta_rule
    for got, want in zip(chunks, build_tables(packed.cu_seqlens, 200)):
        assert torch.equal(got, want)
    # The tail is the last document that has chunks.
    assert chunks.start_Q.tolist()[:7] == [0, 64, 65, 66, 130, 194, 196]
    assert len(tables.tensors()) == len(chunks)


@pytest.mark.parametrize("passing", [False, True])
def test_segments_of_gated_delta_nets_depend_on_the_heads_of_a_rank(passing):
    """Without passed states the context-parallel ranks share the heads, else each has a part of the pack."""
    config = SimpleNamespace(linear_num_value_heads=64)
    cp = SimpleNamespace(size=2, rank=1, state_passing=("G",) if passing else ())
    build = SimpleNamespace(tp=SimpleNamespace(size=2), cp=cp)
    packed = PackedSeqParams.from_lengths([3000, 7000], 10000, alignment=2)
    chunks = MIXER.tables(config, build)(packed).delta_rule
    if passing:
        offsets = (packed.cu_seqlens - 5000).clamp(0, 5000)
        want = build_tables(offsets, 5000, segment=2048, of_part=True)
    else:
        want = build_tables(packed.cu_seqlens, 10000, segment=1024)
    assert all(torch.equal(x, y) for x, y in zip(chunks, want))
    assert chunks.of_part == passing and chunks.counts_2[1] == (3 if passing else 8)


def test_other_models_have_no_chunks():
    packed = PackedSeqParams.from_lengths([65], 65)
    assert tables_of("M*-").derive(packed).find(DocumentChunks) is None


def test_samples_are_cut_at_real_tokens_and_leave_out_the_tail():
    tables = tables_of("M")
    tables.sample_shape = (4, 5)
    samples = tables.derive(PackedSeqParams.from_lengths([3, 7, 2], 20)).samples
    assert samples.sample_T[:12].tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert samples.num_valid_B.tolist() == [5, 5, 2, 1]  # at least 1, since losses are divided
    padded = PackedSeqParams.from_lengths([3, 7, 2], 24, alignment=4)
    aligned = tables.derive(padded).samples
    assert torch.equal(aligned.sample_T[padded.valid], samples.sample_T[:12])
    assert torch.equal(aligned.num_valid_B, samples.num_valid_B)
    full = tables.derive(PackedSeqParams.from_lengths([20], 20)).samples
    assert full.sample_T.bincount().tolist() == full.num_valid_B.tolist() == [5] * 4


def test_documents_are_samples_without_the_tail_and_without_padding():
    tables = tables_of("M")
    tables.balances_documents = True
    samples = tables.derive(PackedSeqParams.from_lengths([3, 7, 2], 20, capacity=4)).samples
    assert samples.sample_T.tolist() == [0] * 3 + [1] * 7 + [2] * 2 + [3] * 8
    assert samples.num_valid_B.tolist() == [3, 7, 2, 1, 1] and samples.number == 3
    padded = PackedSeqParams.from_lengths([3, 7, 2], 24, capacity=4, alignment=4)
    aligned = tables.derive(padded).samples
    assert torch.equal(aligned.sample_T[padded.valid], samples.sample_T[:12])
    assert torch.equal(aligned.num_valid_B, samples.num_valid_B) and aligned.number == 3
    empty = tables.derive(PackedSeqParams.from_lengths([], 4, capacity=2)).samples
    assert empty.num_valid_B.tolist() == [1, 1, 1] and empty.number == 1


PER_DOCUMENT = {
    "moe_aux_loss_coeff": 0.5,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_per_document": True,
}


def test_the_loss_per_document_is_the_mean_of_packs_of_one_document():
    """At a depth of multi-token prediction, documents without a token of the depth do not count."""
    model = rank_models.build("M*E/*E", PER_DOCUMENT, None, dtype=torch.float64)
    documents = cases.make_documents(cases.AWKWARD)
    found = []
    for layer in model.moe_layers:
        layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output.aux_loss))

    def losses_of(pack):
        found.clear()
        model(cases.make_pack(pack, 3, 1))
        return list(found)

    together, alone = losses_of(documents), [losses_of([document]) for document in documents]
    for depth, loss in enumerate(together):
        counted = [losses[depth] for losses, length in zip(alone, cases.AWKWARD) if length > depth]
        assert len(counted) == len(documents) - depth
        expected = sum(counted) / len(counted)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        weight = model.moe_layers[depth].mixer.router.weight
        gradient, wanted = (torch.autograd.grad(x, weight)[0] for x in (loss, expected))
        assert wanted.abs().max() > 0
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    model.pack_tables.balances_documents = False
    assert abs(losses_of(documents)[0] / together[0] - 1) > 1e-3, "a sample of slots is the same"


def test_a_pack_of_two_samples_has_the_mean_loss_and_gradients_of_two_packs():
    changes = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "seq_aux_loss"}
    model = rank_models.build("M*E", changes, None, dtype=torch.float64)
    documents = cases.make_documents([16, 16])

    def run(packs):
        model.zero_grad()
        losses = [model(cases.make_pack(pack, aux_scale=1.0)).aux_loss for pack in packs]
        (sum(losses) / len(packs)).backward()
        return sum(losses) / len(packs), cases.gradients(model)

    model.pack_tables.sample_shape = (2, 16)
    loss, gradients = run([documents])
    model.pack_tables.sample_shape = None
    expected, wanted = run([[document] for document in documents])
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
    assert abs(run([documents])[0] / loss - 1) > 1e-4, "the loss of the pack would be the same"
