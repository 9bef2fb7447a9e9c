"""Multi-token prediction on packs, against a loop over single documents in float64."""

import pytest
import torch

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.later_tokens import later, reaches
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases
from support import plain_model

LENGTHS = [1, 2, 3, cases.CHUNK, 1, cases.CHUNK + 1, 5, 4]
CASES = {
    "one depth": ("M*E/*E", {}),
    "two depths": ("M*-/*E/*E", {"mtp_loss_scaling_factor": 0.3}),
    "two repeated depths": (
        "*E/*E/*E",
        {"mtp_use_repeated_layer": True, **cases.VARIANTS["sigmoid router"]},
    ),
    "two Mamba depths, tied, multipliers": (
        "M/MG-/MG-",
        {
            "untie_embeddings_and_output_weights": False,
            "position_embedding_type": "rope",
            **cases.VARIANTS["multipliers, one norm group"],
        },
    ),
}


def documents_of(masks="random"):
    documents = cases.make_documents(LENGTHS)
    if masks == "last":
        for _, mask in documents:
            mask[:-1] = False
            mask[-1] = True
    return documents


def pack_of(documents, tail=7):
    total = sum(len(tokens) for tokens, _ in documents) + tail
    return MicroBatch.build(documents, total, len(documents) + 2)


def run(model, batch):
    """Return ([main loss, loss of each depth], gradients) of one pack."""
    model.zero_grad()
    output = model(batch)
    output.loss.backward()
    sums = [output.loss_sum, *output.depth_loss_sums]
    scales = [batch.scales[0], *batch.depth_scales]
    losses = [float(total.detach() * scale) for total, scale in zip(sums, scales)]
    return losses, cases.gradients(model)


@pytest.mark.shows(
    "eager", of=lambda case: (1, {"hybrid_layer_pattern": CASES[case][0], **CASES[case][1]})
)
@pytest.mark.parametrize("masks", ["random", "last"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_a_loop_over_documents(case, masks):
    pattern, changes = CASES[case]
    model = cases.tiny_model(pattern, **changes)
    documents = documents_of(masks)
    losses, gradients = run(model, pack_of(documents))
    want_losses, want = plain_model.run_plain_depths(model, documents, cases.VOCAB)
    assert len(losses) == 1 + model.config.mtp_depths
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert all(losses[1:])
    assert gradients.keys() == want.keys()
    for name, gradient in want.items():
        error = cases.relative_error(gradients[name], gradient)
        # Two repeated depths err by 5.2e-6 to 1.4e-5, depending on the kernels of the CPU.
        assert error <= 4e-5, f"{name}: {error:.1e}"
        if not name.endswith("bias"):
            assert gradient.abs().max() > 0 or "experts" in name, name


def test_forward_backward_adds_the_same_gradients_to_flat_buffers():
    pattern, changes = CASES["two repeated depths"]
    model = cases.tiny_model(pattern, **changes)
    batch = pack_of(documents_of())
    losses, gradients = run(model, batch)
    buffers = FlatBuffers(model)
    buffers.zero_grad()
    output = model.forward_backward(batch)
    for k, total in enumerate(output.depth_loss_sums, start=1):
        assert float(total * batch.depth_scales[k - 1]) == losses[k]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.main_grad, gradients[name], rtol=1e-5, atol=1e-6)


def test_experts_of_a_depth_see_only_slots_that_reach_their_token():
    changes = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1, "init_method_std": 0.3}
    model = cases.tiny_model("E/*E/*E", **changes)
    batch = pack_of(documents_of())
    logits = []
    for layer in model.moe_layers:
        layer.mixer.router.register_forward_hook(lambda *call: logits.append(call[2].logits_TE))
    output = model(batch)
    topk, experts = model.config.moe_router_topk, model.config.num_experts
    for depth, counts in enumerate(output.tokens_per_expert):
        assert counts.sum() == topk * sum(max(n - depth, 0) for n in LENGTHS)
    want = 0.0
    for depth, logits_TE in enumerate(logits):
        kept = logits_TE[reaches(batch.packed, depth) if depth else batch.packed.valid].detach()
        shares, counts = torch.softmax(kept, -1).sum(0), output.tokens_per_expert[depth]
        want += 0.5 * experts / (topk * len(kept) ** 2) * float(shares @ counts)
        want += 0.1 * float(kept.logsumexp(-1).square().mean())
    assert float(output.aux_loss.detach()) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("pattern", ["M*-/*-/*-", "MG/M/M"])
@pytest.mark.shows("isolation", of=lambda pattern: (1, {"hybrid_layer_pattern": pattern}))
def test_another_document_changes_no_bit_of_the_losses_of_a_depth(pattern):
    model = cases.tiny_model(pattern)
    batch = pack_of(documents_of())
    per_token = []
    cross_entropy = model._cross_entropy

    def record(*args, **options):
        result = cross_entropy(*args, **options)
        per_token.append(result[1])
        return result

    model._cross_entropy = record

    def observe(pack):
        per_token.clear()
        embedded = []
        handle = model.embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
        output = model(pack)
        handle.remove()
        return [*per_token, *torch.autograd.grad(output.loss, embedded)]

    before = observe(batch)
    for document in (3, 5):
        changed = batch.with_buffer(batch.buffer.clone())
        own_T = batch.packed.seq_idx[0] == document
        changed.tokens[own_T] = (changed.tokens[own_T] + 1) % cases.VOCAB
        changed.labels[own_T] = (changed.labels[own_T] + 1) % cases.VOCAB
        after = observe(changed)
        assert len(before) == len(after) == 6
        for old, new in zip(before, after):
            assert not torch.equal(old[own_T], new[own_T])
            assert torch.equal(old[~own_T], new[~own_T])


def test_evaluation_computes_the_main_loss_only():
    model = cases.tiny_model("M*/*-/*-")
    batch = pack_of(documents_of())
    training = model(batch)
    model.eval()
    output = model(batch)
    assert output.depth_loss_sums.shape == (0,)
    assert output.loss_sum == training.loss_sum
    assert output.loss == output.loss_sum * batch.scales[0]


def test_repeated_depths_share_parameters_and_separate_ones_do_not():
    shared = cases.tiny_model("M/*E/*E", mtp_use_repeated_layer=True)
    apart = cases.tiny_model("M/*E/*E")
    names = {name for name, _ in apart.named_parameters()}
    once = {name for name, _ in shared.named_parameters()}
    assert names - once == {
        name for name in names if name.startswith(("mtp.1.", "layers.3.", "layers.4."))
    }
    assert shared.layers[4].mixer.experts.fc1 is shared.layers[2].mixer.experts.fc1


def test_expert_bias_of_a_repeated_depth_learns_from_the_counts_of_all_depths():
    pattern, changes = CASES["two repeated depths"]
    model = cases.tiny_model(pattern, **changes)
    biases = [layer.mixer.router.expert_bias for layer in model.moe_layers]
    assert biases[1] is biases[2]
    before = biases[1].clone()
    counts = torch.tensor([[2.0] * 5, [9, 1, 1, 1, 3], [0, 5, 2, 8, 5]])
    model.update_expert_bias(counts)  # sums: 9, 6, 3, 9, 8 with a mean of 7
    rate = model.config.moe_router_bias_update_rate
    moved = torch.tensor([-1.0, 1, 1, -1, -1]) * rate
    torch.testing.assert_close(biases[1], before + moved)


def test_a_shift_across_a_document_would_be_seen(monkeypatch):
    """The oracle test detects a depth that reads tokens of the next document."""
    import megatron_packed.models.multi_token_prediction as module

    model = cases.tiny_model("M/*")
    documents = documents_of()
    want, _ = plain_model.run_plain_depths(model, documents, cases.VOCAB)
    monkeypatch.setattr(
        module, "later", lambda x_T, depth, reaches_T: later(x_T, depth, reaches_T | True)
    )
    losses, _ = run(model, pack_of(documents))
    assert losses != pytest.approx(want, rel=1e-3)
