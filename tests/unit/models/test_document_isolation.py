"""Isolation of documents, bit for bit, and proof that these tests detect every kind of leak."""

import dataclasses

import pytest
import torch

import megatron_packed.layers.attention as attention
import megatron_packed.ops.ssd.reference as ssd_reference
from support import hybrid_cases as cases
from support.leaks import leaking_convolution, leaking_delta_rule, leaking_scan, one_document
from support.row_products import experts_row_by_row

LENGTHS = [5, cases.CHUNK + 3, 1, 2 * cases.CHUNK, 4]
CHANGED = 1
"""Document whose token changes. It ends inside a chunk that it shares with the next documents."""
TAIL = 6


@pytest.fixture(autouse=True)
def _rows_of_experts_keep_their_bits():
    with experts_row_by_row():
        yield


def observe(model, batch):
    """Return logits, per-token losses and gradients of the embedding's output for all slots."""
    inputs = []
    handle = model.embedding.register_forward_hook(
        lambda _module, _inputs, output: inputs.append(output)
    )
    try:
        with torch.no_grad():
            logits_TV = model.logits(batch.tokens, batch.packed)
        inputs.clear()
        output = model(batch)
        (input_grad_TD,) = torch.autograd.grad(output.loss, inputs)
    finally:
        handle.remove()
    return {"outputs": logits_TV, "loss": output.per_token_loss_T, "input gradients": input_grad_TD}


def perturbed(batch, at):
    """Return the pack with another token at slot ``at``, which also changes the label before it."""
    buffer = batch.buffer.clone()
    other = batch.with_buffer(buffer)
    other.tokens[at] = (other.tokens[at] + 1) % cases.VOCAB
    if batch.packed.position_ids[at] > 0:
        other.labels[at - 1] = other.tokens[at]
    return other


def visible_changes(model, batch, *places, broken=None) -> dict[str, float]:
    """Return the largest difference in other documents and the tail after one token changed.

    The token at each of ``places``, of one document, changes in turn. The model gets the metadata
    of ``broken`` if it is given.
    """
    seen = broken or batch
    before = observe(model, seen)
    others_T = batch.packed.seq_idx[0] != batch.packed.seq_idx[0, places[0]]
    largest = dict.fromkeys(before, torch.zeros(()))
    for at in places:
        other = perturbed(batch, at)
        after = observe(model, dataclasses.replace(seen, tokens=other.tokens, labels=other.labels))
        for name, value in before.items():
            difference = (value - after[name])[others_T].abs().max()
            largest[name] = torch.maximum(largest[name], difference)  # keeps a value that is NaN
        assert not torch.equal(before["outputs"][~others_T], after["outputs"][~others_T]), (
            "the change itself must be visible"
        )
    return {name: value.item() for name, value in largest.items()}


@pytest.mark.shows(
    "isolation",
    of=lambda pattern, variant: (1, {"hybrid_layer_pattern": pattern, **cases.VARIANTS[variant]}),
)
@pytest.mark.parametrize(("pattern", "variant"), cases.PATTERNS_AND_VARIANTS)
def test_other_documents_do_not_change_by_a_bit(pattern, variant):
    model = cases.tiny_model(pattern, **cases.VARIANTS[variant])
    batch = cases.make_pack(cases.make_documents(LENGTHS), tail=TAIL, spare=2)
    start, end = batch.packed.cu_seqlens_cpu[CHANGED : CHANGED + 2].tolist()
    changes = visible_changes(model, batch, start, (start + end) // 2, end - 1)
    assert set(changes.values()) == {0.0}, changes


@pytest.mark.parametrize("per_document", [True, False])
def test_only_losses_per_document_keep_documents_apart(per_document):
    """The load-balance loss of a pack couples its documents; the loss per document does not."""
    balanced = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "seq_aux_loss"}
    changes = {**balanced, "moe_aux_loss_per_document": per_document}
    model = cases.tiny_model("M*E", **changes).train()
    pack = cases.make_pack(cases.make_documents(LENGTHS), tail=TAIL, spare=2, aux_scale=1.0)
    changes = visible_changes(model, pack, int(pack.packed.cu_seqlens_cpu[CHANGED]))
    assert (set(changes.values()) == {0.0}) == per_document, changes


def test_isolation_holds_in_bfloat16():
    model = cases.tiny_model("M*-E", dtype=torch.bfloat16, **cases.VARIANTS["rope"])
    batch = cases.make_pack(cases.make_documents(LENGTHS), tail=TAIL)
    assert set(visible_changes(model, batch, 7).values()) == {0.0}


# Each of these tests breaks isolation and checks that the leak is visible.


def rebuilt(batch, **fields):
    return dataclasses.replace(batch, packed=dataclasses.replace(batch.packed, **fields))


@pytest.fixture
def batch():
    return cases.make_pack(cases.make_documents(LENGTHS), tail=TAIL)


def leaks(pattern, batch, broken=None):
    at = int(batch.packed.cu_seqlens_cpu[CHANGED]) + 2
    return visible_changes(cases.tiny_model(pattern), batch, at, broken=broken)


def test_removing_seq_idx_is_caught(batch):
    broken = rebuilt(batch, seq_idx=torch.zeros_like(batch.packed.seq_idx))
    changes = leaks("M", batch, broken)
    assert min(changes.values()) > 1e-5, changes


@pytest.mark.parametrize("pattern", ["M", "G"])
def test_removing_seq_idx_from_the_convolution_alone_is_caught(batch, monkeypatch, pattern):
    leaking_convolution(monkeypatch)
    # The convolution reaches only three tokens into the next document, so change the last token.
    model = cases.tiny_model(pattern)
    changes = visible_changes(model, batch, int(batch.packed.cu_seqlens_cpu[CHANGED + 1]) - 1)
    assert min(changes["outputs"], changes["loss"]) > 1e-5, changes


def test_removing_seq_idx_from_the_scan_alone_is_caught(batch, monkeypatch):
    leaking_scan(monkeypatch)
    changes = leaks("M", batch)
    assert min(changes.values()) > 1e-5, changes


def test_removing_the_boundaries_of_the_delta_rule_alone_is_caught(batch, monkeypatch):
    leaking_delta_rule(monkeypatch)
    # The state decays within some tokens, so change the last token.
    last = int(batch.packed.cu_seqlens_cpu[CHANGED + 1]) - 1
    changes = visible_changes(cases.tiny_model("G"), batch, last)
    assert min(changes.values()) > 1e-5, changes


def test_removing_the_restart_of_the_chunk_sum_is_caught(batch, monkeypatch):
    """A sum that continues across documents differs only by rounding, but the bits differ."""
    monkeypatch.setattr(ssd_reference, "document_sum", cases.sum_without_restart)
    changes = leaks("M", batch)
    assert 0 < max(changes.values()) < 1e-4, changes


def test_removing_the_attention_mask_is_caught(batch):
    tokens = batch.packed.total_tokens
    joined = one_document(batch.packed.cu_seqlens, tokens)
    broken = rebuilt(batch, cu_seqlens=joined, max_seqlen=tokens)
    changes = leaks("*", batch, broken)
    assert min(changes.values()) > 1e-5, changes


def test_removing_the_position_reset_is_caught(monkeypatch):
    """A document is rotated by the same bits at every offset; positions without a reset change them.

    Attention depends only on differences of positions, so positions without a reset change only the
    rounding of results. A product may change it, too, if the document has other rows there. So the
    bits of rotated ones are compared, which depend on positions only. If the rotary tables are shorter
    than these positions, the results are not finite.
    """
    document = cases.make_documents([6])
    filler = cases.make_documents([4 * cases.CHUNK], seed=1)
    model = cases.tiny_model("*", position_embedding_type="rope", max_positions=5000)
    first, second = cases.make_pack(document + filler), cases.make_pack(filler + document)
    continued = rebuilt(
        second, position_ids=torch.arange(second.layout.total_tokens, dtype=torch.int32)
    )
    rotate, rotations = attention.apply_rope, []

    def recorded(q, k, *tables, **options):
        rotations.append(rotate(torch.ones_like(q), torch.ones_like(k), *tables, **options))
        return rotate(q, k, *tables, **options)

    monkeypatch.setattr(attention, "apply_rope", recorded)
    outputs = [observe(model, pack)["outputs"] for pack in (first, second, continued)]
    at_first, at_second, at_continued = rotations[::2]  # observe() runs the model twice
    for ones, others, moved in zip(at_first, at_second, at_continued, strict=True):
        assert torch.equal(others[-6:], ones[:6])
        assert not torch.equal(moved[-6:], ones[:6])
    torch.testing.assert_close(outputs[1][-6:], outputs[0][:6], rtol=1e-5, atol=1e-5)
    short = cases.tiny_model("*", position_embedding_type="rope", max_positions=4 * cases.CHUNK)
    assert torch.isfinite(observe(short, second)["outputs"]).all()
    assert not torch.isfinite(observe(short, continued)["outputs"]).all()


def test_a_document_longer_than_the_rotary_tables_is_refused():
    model = cases.tiny_model("*", position_embedding_type="rope", max_positions=7)
    long = cases.make_pack(cases.make_documents([3, 8]))
    with pytest.raises(
        ValueError, match=r"a document has 8 tokens, but the rotary tables hold .* 7"
    ):
        model(long)
    longer_tail = model(cases.make_pack(cases.make_documents([3, 7]), tail=20))
    longer_tail.loss.backward()
    assert torch.isfinite(longer_tail.loss)
    assert all(torch.isfinite(gradient).all() for gradient in cases.gradients(model).values())


# Tests of the tail.


@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_tail_tokens_change_nothing(pattern):
    """Loss, auxiliary losses, counts and gradients are the same bits for any tokens in the tail."""
    options = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01} if "E" in pattern else {}
    model = cases.tiny_model(pattern, **options)
    documents = cases.make_documents(LENGTHS)
    results = []
    for token in (0, 17, cases.VOCAB - 1):
        batch = cases.make_pack(documents, tail=TAIL, spare=1, aux_scale=1.0)
        batch.tokens[-TAIL:] = token
        batch.labels[-TAIL:] = token
        model.zero_grad()
        output = model(batch)
        output.loss.backward()
        assert torch.isfinite(output.loss)
        results.append(
            (
                output.loss,
                output.aux_loss,
                output.tokens_per_expert,
                *cases.gradients(model).values(),
            )
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    tokens = sum(LENGTHS)
    if "E" in pattern:
        assert results[0][1] > 0
        assert torch.equal(
            results[0][2].sum(-1), torch.full((len(model.moe_layers),), 2.0 * tokens)
        )


@pytest.mark.parametrize("pattern", ["M*-E", "ME*M-"])
def test_a_pack_without_documents_is_finite_and_teaches_nothing(pattern):
    model = cases.tiny_model(
        pattern, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01, position_embedding_type="rope"
    )
    output = model(cases.make_pack([], tail=2 * cases.CHUNK, spare=3, aux_scale=1.0))
    output.loss.backward()
    assert output.loss == 0 and output.aux_loss == 0 and output.tokens_per_expert.sum() == 0
    assert all(gradient.abs().max() == 0 for gradient in cases.gradients(model).values())
