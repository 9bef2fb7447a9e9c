"""Random routing for benchmarks: even loads, fixed by the seed, with the gradients of the logits."""

import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.moe.random_logits import random_logits
from megatron_packed.layers.moe.router import Router, chosen_experts, topk_routing
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.params import PackedSeqParams
from support.hybrid_cases import CPU_BUILD

DOCUMENTS = [4000, 1, 3000, 1191]
PACKED = PackedSeqParams.from_lengths(DOCUMENTS, 8192)


def logits_of(packed=PACKED, seed=5, experts=16):
    return random_logits(seed, packed.seq_idx.view(-1), packed.position_ids, experts)


def router_of(forced, width=8):
    config = ModelConfig(
        hybrid_layer_pattern="E",
        hidden_size=width,
        num_experts=16,
        add_bias_linear=False,
        moe_router_force_load_balancing=forced,
    )
    router = Router(config, CPU_BUILD).double().train()
    with torch.no_grad():  # the learned logits choose expert 3 for every token
        router.weight.zero_()[3] = 10.0
    router.routing_seed = 5
    return router


def loads(ids_TK):
    return chosen_experts(ids_TK, PACKED.valid, 16).sum(dim=0)


def test_logits_are_normal_and_independent():
    logits_TE = logits_of()
    assert torch.isfinite(logits_TE).all()
    assert abs(logits_TE.mean()) < 0.01 and abs(logits_TE.std() - 1) < 0.01
    shares = [float((logits_TE < bound).double().mean()) for bound in (-1.645, 0.0, 1.645)]
    assert all(abs(share - wanted) < 0.005 for share, wanted in zip(shares, (0.05, 0.5, 0.95)))
    columns = torch.corrcoef(logits_TE.T) - torch.eye(16)
    assert columns.abs().max() < 0.05
    rows = (logits_TE[1:] * logits_TE[:-1]).mean()
    assert abs(rows) < 0.01
    assert logits_TE.unique().numel() > 0.98 * logits_TE.numel()


def test_logits_depend_on_seed_and_place_only():
    assert torch.equal(logits_of(), logits_of())
    assert (logits_of() == logits_of(seed=6)).float().mean() < 1e-3
    assert (logits_of() == logits_of(seed=5 + (1 << 40))).float().mean() < 1e-3
    # The second document keeps its logits if the first one becomes shorter.
    moved = logits_of(PackedSeqParams.from_lengths([3000, 1, 3000, 1191], 8192))
    assert torch.equal(moved[3000:7192], logits_of()[4000:])


def test_loads_are_even_in_training_and_in_evaluation():
    x_TD = torch.ones(8192, 8, dtype=torch.float64)
    router = router_of(True)
    for training in (True, False):
        router.train(training)
        counts_E = loads(router(x_TD, PACKED).topk_expert_ids_TK)
        assert (counts_E / counts_E.mean() - 1).abs().max() < 0.1
    learned = router_of(False)(x_TD, PACKED).topk_expert_ids_TK
    assert loads(learned)[3] == 8192


def test_gradients_are_those_of_the_random_logits():
    """The learned logits get the gradient of the random logits, as in Megatron."""
    router = router_of(True)
    generator = torch.Generator().manual_seed(2)
    x_TD = torch.randn(8192, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream_TK = torch.randn(8192, 2, generator=generator, dtype=torch.float64)
    routing = router(x_TD, PACKED)
    (routing.topk_weights_TK * upstream_TK).sum().backward()

    values_TE = logits_of().double().requires_grad_()
    weights_TK, ids_TK = topk_routing(values_TE, 2, score_function="softmax")
    (weights_TK * upstream_TK).sum().backward()
    assert torch.equal(routing.logits_TE, values_TE)
    assert torch.equal(routing.topk_expert_ids_TK, ids_TK)
    assert torch.equal(routing.topk_weights_TK, weights_TK)
    torch.testing.assert_close(x_TD.grad, values_TE.grad @ router.weight)
    torch.testing.assert_close(router.weight.grad, values_TE.grad.T @ x_TD)


def test_each_layer_has_a_seed_of_its_own():
    config = ModelConfig(
        hybrid_layer_pattern="EE", hidden_size=8, num_experts=4, add_bias_linear=False
    )

    def seeds(seed):
        model = HybridModel(config, vocab_size=16, max_positions=8, seed=seed)
        return [layer.mixer.router.routing_seed for layer in model.moe_layers]

    assert seeds(1) == seeds(1) and len({*seeds(1), *seeds(2)}) == 4
