"""Adapters against float64 autograd of the plain formula ``W + s B A`` for each matrix."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import Linear
from megatron_packed.layers.lora import Lora, LoraScale
from megatron_packed.layers.moe.aux_loss import has_auxiliary_loss
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lora import family_of, matrices_of
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases

RANK, ALPHA = 3, 5.0
F64 = torch.float64
MODELS = {
    "every kind": ("M*-GE", {"moe_shared_expert_intermediate_size": 24, "moe_latent_size": 12}),
    "gates, biases": (
        "M*-",
        {
            "swiglu": True,
            "squared_relu": False,
            "attention_output_gate": True,
            "add_qkv_bias": True,
        },
    ),
    "a family, part of its matrices": (
        "*-*-",
        {
            "swiglu": True,
            "squared_relu": False,
            "position_embedding_type": "rope",
            "lora_target_modules": ("q_proj", "v_proj", "gate_proj", "down_proj"),
        },
    ),
    "depths": ("*-/*/*", {"mtp_use_repeated_layer": True}),
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def adapted_model(name: str, **changes) -> HybridModel:
    """Return a model in float64 whose adapters change its outputs."""
    pattern, options = MODELS[name]
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA}
    model = cases.tiny_model(pattern, dtype=F64, **{**lora, **options, **changes})
    with torch.no_grad():
        for number, (parameter, value) in enumerate(model.named_parameters()):
            if parameter.endswith("lora.B"):
                value.copy_(drawn(number, *value.shape) * 0.1)
    return model


def plain_weights(model: HybridModel, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return every weight with the update of its adapters, matrix by matrix."""
    config = model.config
    scale, family = ALPHA / RANK, family_of(config)
    weights = {name: p.detach() for name, p in model.named_parameters() if "lora." not in name}
    for name, A in factors.items():
        if not name.endswith("lora.A"):
            continue
        stacked = "_lora" in name
        weight = name.replace("_lora.A", "") if stacked else name.replace("lora.A", "weight")
        matrices = matrices_of(weight, tuple(weights[weight].shape), config, family)
        words = config.lora_target_modules
        chosen = [m for m in matrices if "all-linear" in words or m.name.endswith(words)]
        rows = torch.arange(weights[weight].shape[-2]).view(-1, 1)
        B = factors[name.replace("lora.A", "lora.B")]
        update = torch.zeros_like(weights[weight])
        for number, matrix in enumerate(chosen):
            own = torch.cat([move.ours.view(rows).reshape(-1) for move in matrix.part.moves])
            its_A = A[..., number * RANK : (number + 1) * RANK, :]
            update = update.index_add(-2, own, scale * (B[..., own, :] @ its_A))
        weights[weight] = weights[weight] + update
    return weights


def packs() -> MicroBatch:
    return MicroBatch.build(cases.make_documents(cases.AWKWARD, 3), sum(cases.AWKWARD) + 4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("flat", [False, True], ids=["autograd", "main_grad"])
def test_losses_and_gradients_are_those_of_the_plain_formula(name: str, flat: bool) -> None:
    model = adapted_model(name)
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert factors and all("lora." in n for n in factors)
    plain = HybridModel(
        dataclasses.replace(model.config, lora_rank=None),
        vocab_size=cases.VOCAB,
        max_positions=256,
        dtype=F64,
    )
    leaves = {n: p.detach().clone().requires_grad_() for n, p in factors.items()}
    expected = functional_call(plain, plain_weights(model, leaves), (packs(),))
    expected.loss.backward()
    buffers = FlatBuffers(model) if flat else None
    output = model(packs())
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-12, atol=1e-12)
    for n, parameter in factors.items():
        gradient = parameter.grad if buffers is None else buffers.parameters[n].main_grad
        wanted = leaves[n].grad
        torch.testing.assert_close(gradient.to(F64), wanted, rtol=1e-6, atol=1e-9, msg=n)
        assert wanted.abs().max() > 0, n
    frozen = [p for n, p in model.named_parameters() if n not in factors]
    assert all(p.grad is None and not hasattr(p, "main_grad") for p in frozen)


@pytest.mark.parametrize("name", MODELS)
def test_new_adapters_change_nothing(name: str) -> None:
    pattern, options = MODELS[name]
    base = cases.tiny_model(pattern, **{n: v for n, v in options.items() if n[:4] != "lora"})
    model = cases.tiny_model(pattern, lora_rank=RANK, **options)
    weights = dict(base.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if "lora." not in n)
    assert torch.equal(model(packs()).loss, base(packs()).loss)


def test_a_saved_bias_of_an_adapted_projection_is_trained() -> None:
    model = adapted_model("gates, biases", lora_modules_to_save=("*.qkv.bias",))
    model(packs()).loss.backward()
    assert model.layers[1].mixer.qkv.bias.grad.abs().max() > 0


SHARED = LoraScale(RANK, 0.5, dropout=0.25)


def dropping(inputs: int, outputs: int) -> Linear:
    build = Build(backends=cases.CPU_BUILD.backends, device="cpu", dtype=F64)
    linear = Linear(inputs, outputs, bias=False, build=build)
    linear.lora = Lora(torch.zeros(outputs, dtype=torch.int64), 1, inputs, SHARED, build)
    with torch.no_grad():
        for number, parameter in enumerate(linear.parameters()):
            parameter.copy_(drawn(number, *parameter.shape))
    linear.weight.requires_grad_(False)
    return linear


def test_dropout_is_on_the_input_of_the_adapter_alone() -> None:
    linear = dropping(8, 6)
    x = drawn(9, 50, 8).requires_grad_()
    torch.manual_seed(3)
    y = linear(x)
    y.square().sum().backward()
    torch.manual_seed(3)
    again = x.detach().clone().requires_grad_()
    A, B = (p.detach().clone().requires_grad_() for p in (linear.lora.A, linear.lora.B))
    dropped = torch.nn.functional.dropout(again, 0.25)
    expected = again @ linear.weight.t() + 0.5 * dropped @ A.t() @ B.t()
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    for own, wanted in ((x, again), (linear.lora.A, A), (linear.lora.B, B)):
        torch.testing.assert_close(own.grad, wanted.grad)
    assert torch.equal(linear.eval()(x), linear(x))


def test_masks_of_split_inputs_are_parts_of_one_mask() -> None:
    """Ranks of a row-parallel projection draw the mask of all columns, and take their own."""
    lora = dropping(8, 6).lora
    x = torch.ones(200, 8, dtype=F64)
    torch.manual_seed(5)
    whole = lora._dropped(x)
    columns = SplitSegment(noun="channels", count=8)
    parts = []
    for rank in range(2):
        lora.columns = Shard.from_segments([columns], rank, 2, dim=1)
        torch.manual_seed(5)
        parts.append(lora._dropped(x[:, :4]))
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert (whole == 0).double().mean().item() == pytest.approx(0.25, abs=0.04)


RECOMPUTED = {
    "cores": {"recompute_granularity": "selective"},
    "mixers": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mamba", "gdn", "mlp", "moe", "layernorm"),
    },
    "layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_recomputed_layer_has_the_same_mask(name: str) -> None:
    losses = []
    for memory in (MemoryConfig(), MemoryConfig(**RECOMPUTED[name])):
        pattern, changes = MODELS["every kind"]
        config = cases.tiny_config(
            pattern, lora_rank=RANK, lora_dropout=0.3, lora_init="gaussian", **changes
        )
        model = HybridModel(config, vocab_size=cases.VOCAB, max_positions=256, memory=memory)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora.B"):
                    parameter.fill_(0.05)
        torch.manual_seed(1)
        output = model.train()(packs())
        output.loss.backward()
        losses.append((output.loss, cases.gradients(model)))
    (plain, wanted), (again, found) = losses
    assert torch.equal(plain, again)
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


def test_balancing_is_off_unless_it_is_kept() -> None:
    options = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
    for kept in (False, True):
        config = cases.tiny_config("E", lora_rank=2, lora_keep_balancing=kept, **options)
        assert has_auxiliary_loss(config) is kept
        assert config.balances_experts is kept
    assert has_auxiliary_loss(cases.tiny_config("E", **options))
