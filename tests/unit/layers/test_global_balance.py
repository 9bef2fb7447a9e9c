"""Tests of ``global_aux_loss``: the loss of one process against plain loops, and its state."""

import pytest
import torch

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.layers.moe.global_balance import Balance, GlobalBalance
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases
from support import rank_models

GLOBAL = {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"}
OPTIONS = {
    "softmax": {},
    "softmax, groups": {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
    "sigmoid, biased groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk": 3,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}


def plain_losses(logits_of_packs, valid_of_packs, config):
    """Return the loss of each micro-batch of one layer, by loops over tokens and experts."""
    total, losses, tokens_so_far = [0] * config.num_experts, [], 0
    for logits, valid in zip(logits_of_packs, valid_of_packs):
        scores = torch.softmax(logits, dim=-1)
        if config.moe_router_score_function == "sigmoid":
            scores = torch.sigmoid(logits) / torch.sigmoid(logits).sum(-1, keepdim=True)
        tokens = [token for token in range(len(logits)) if valid[token]]
        tokens_so_far += len(tokens)
        for token in tokens:
            for expert in scores[token].topk(config.moe_router_topk).indices.tolist():
                total[expert] += 1
        loss = torch.zeros((), dtype=logits.dtype)
        for expert in range(config.num_experts):
            probability = sum(scores[token, expert] for token in tokens)
            loss = loss + probability / max(len(tokens), 1) * (total[expert] / tokens_so_far)
        losses.append(
            loss * config.moe_aux_loss_coeff * config.num_experts / config.moe_router_topk
        )
    return losses


def packs():
    """Return three packs with different numbers of tokens, the second without any."""
    found = []
    for number, lengths in enumerate(([5, 1, 9], [], [3, 8])):
        documents = cases.make_documents(lengths, seed=number)
        found.append(cases.make_pack(documents, 20 - sum(lengths), 2, 1.0, 1))
    return found


def logits_of_routers(model):
    """Return a list for each E layer, to which every pass adds the layer's logits."""
    found = [[] for _ in model.moe_layers]
    for layer, logits in zip(model.moe_layers, found):
        layer.mixer.router.register_forward_hook(
            lambda _module, _inputs, routing, logits=logits: logits.append(routing.logits_TE)
        )
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients_are_those_of_loops(name):
    changes = {"num_experts": 8, **GLOBAL, **OPTIONS[name]}
    model = rank_models.build("E-E", changes, None, dtype=torch.float64)
    for layer in model.moe_layers:
        if layer.mixer.router.expert_bias is not None:
            layer.mixer.router.expert_bias.copy_(torch.linspace(-1, 1, 8))
    logits = logits_of_routers(model)
    for _ in range(2):  # the second step forgets the first
        model.global_balance.begin_step()
        losses = [model(pack).aux_loss for pack in packs()]
    valid = [pack.packed.valid for pack in packs()]
    plain = [plain_losses(rows[3:], valid, model.config) for rows in logits]
    expected = [sum(of_layers) for of_layers in zip(*plain)]
    assert losses[1] == 0 and losses[0] > 0
    # The loads of previous micro-batches matter.
    alone = plain_losses(logits[0][5:], valid[2:], model.config)[0]
    assert abs(alone / plain[0][2] - 1) > 1e-3
    for found, wanted in zip(losses, expected):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0, check_dtype=False)
    weights = [layer.mixer.router.weight for layer in model.moe_layers]
    found = torch.autograd.grad(sum(losses), weights, retain_graph=True)
    for gradient, wanted in zip(found, torch.autograd.grad(sum(expected), weights)):
        assert gradient.abs().max() > 0
        assert cases.relative_error(gradient, wanted) < 1e-6


def test_recomputed_layers_and_evaluation_count_nothing_twice():
    """Gradients with recomputed layers are bitwise those without; counts are those of two passes."""
    found = []
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    for memory in (None, MemoryConfig(**full, recompute_num_layers=1)):
        config = cases.tiny_config("ME", **GLOBAL)
        model = HybridModel(
            config, vocab_size=cases.VOCAB, max_positions=64, seed=7, memory=memory
        ).train()
        for pack in packs():
            model(pack).loss.backward()
            with torch.no_grad():
                model.eval()(pack)
            model.train()
        assert model.global_balance.count_LE.sum() == 26 * config.moe_router_topk
        assert not any("global_balance" in name for name in model.state_dict())
        found.append(cases.gradients(model))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_without_a_coefficient_there_is_no_state():
    model = cases.tiny_model("E", **{**GLOBAL, "moe_aux_loss_coeff": 0.0}).train()
    assert model.global_balance is None and model(packs()[0]).aux_loss == 0


def loads(probabilities_TE, topk):
    """Return the load of a micro-batch whose tokens choose the experts of highest probability."""
    ids_TK = probabilities_TE.detach().topk(topk, dim=-1).indices
    count_E = torch.bincount(ids_TK.flatten(), minlength=probabilities_TE.shape[1]).float()
    return [Balance(probabilities_TE.sum(0), count_E)]


def test_micro_batches_with_few_tokens_do_not_count_more():
    """Micro-batches of 128, 128, 2 and 0 tokens: losses and gradients are those of float64 means.

    The loss of each is E * sum over experts of (share of assignments so far) * (mean probability).
    """
    config = cases.tiny_config("E", **GLOBAL)
    experts, topk = config.num_experts, config.moe_router_topk
    balance, generator = GlobalBalance(config, 1, None, "cpu"), torch.Generator().manual_seed(4)
    so_far, tokens_so_far = torch.zeros(experts, dtype=torch.float64), 0
    for tokens in (128, 128, 2, 0, 1):
        logits_TE = torch.randn(tokens, experts, generator=generator).double().requires_grad_()
        load = loads(torch.softmax(logits_TE, -1), topk)
        loss = balance(load)
        so_far += load[0].count_E
        tokens_so_far += tokens
        mean_E = torch.softmax(logits_TE, -1).sum(0) / max(tokens, 1)
        share_E = so_far / (topk * tokens_so_far)
        expected = config.moe_aux_loss_coeff * experts * (share_E * mean_E).sum()
        torch.testing.assert_close(loss, expected)
        found, wanted = (torch.autograd.grad(value, logits_TE)[0] for value in (loss, expected))
        torch.testing.assert_close(found, wanted)
        assert tokens == 0 or loss < 2 * config.moe_aux_loss_coeff


def test_a_balanced_load_gives_the_coefficient_in_micro_batches_of_any_size():
    config = cases.tiny_config("E", **GLOBAL)
    balance = GlobalBalance(config, 1, None, "cpu")
    for tokens in (128, 4, 4096, 8):
        even_E = torch.full((config.num_experts,), tokens / config.num_experts)
        loss = balance([Balance(even_E, even_E * config.moe_router_topk)])
        torch.testing.assert_close(loss, torch.tensor(config.moe_aux_loss_coeff))


def test_against_megatron_core():
    """With equal micro-batches, the loss agrees with megatron.core's function on averaged counts."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils", exc_type=ImportError)
    config = cases.tiny_config("E", **GLOBAL)
    balance = GlobalBalance(config, 1, None, "cpu")
    generator = torch.Generator().manual_seed(4)
    total = torch.zeros(config.num_experts)
    for number in range(1, 4):
        logits = torch.randn(40, config.num_experts, generator=generator)
        routing_map, scores = theirs.compute_routing_scores_for_aux_loss(
            logits, config.moe_router_topk, "softmax"
        )
        total += routing_map.sum(0)
        expected = theirs.switch_load_balancing_loss_func(
            scores, total / number, 40, config.moe_router_topk, config.num_experts, 0.3
        )
        found = balance([Balance(scores.sum(0), routing_map.sum(0).float())])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_repeated_depths_share_one_loss(kind):
    """As in Megatron, the load-balance losses of depths with the same experts are averaged."""
    changes = {**GLOBAL, "moe_router_load_balancing_type": kind, "mtp_use_repeated_layer": True}
    model = rank_models.build("E/E/E", changes, None, dtype=torch.float64)
    assert [layer.mixer.balance_share for layer in model.moe_layers] == [1.0, 0.5, 0.5]
    losses = []
    for share in (0.5, 1.0, 0.0):
        for layer in model.moe_layers[1:]:
            layer.mixer.balance_share = share
        if model.global_balance is not None:
            model.global_balance.begin_step()
        losses.append(model(packs()[0]).aux_loss)
    found, sums, main = losses
    assert 0 < main < found < sums
    torch.testing.assert_close(found - main, (sums - main) / 2, rtol=1e-6, atol=0)
    separate = rank_models.build("E/E/E", GLOBAL, None, dtype=torch.float64)
    assert all(layer.mixer.balance_share == 1.0 for layer in separate.moe_layers)
