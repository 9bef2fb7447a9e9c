"""Layers whose last projection adds the residual, with a stand-in for quack (`quack_stand_in`)."""

import sys
from importlib import import_module

import pytest
import torch

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.explain import capabilities
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.layers import joined as joined_layers
from megatron_packed.layers.linear import JoinedResidual
from megatron_packed.memory import apply
from megatron_packed.memory.recompute import RerunArguments
from megatron_packed.memory.saved_tensors import SavedByAutograd
from megatron_packed.models.estimate.step_memory import Work
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops import quack_tiles
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.residual_projection import api
from megatron_packed.ops.varlen_attention import api as varlen_attention
from megatron_packed.packed.micro_batch import MicroBatch
from support.hybrid_cases import VOCAB, tiny_config
from support.kernel_calls import bf16_run
from support.quack_stand_in import accept, asked, listed
from support.traced_units import of_first_layer

NAME = "megatron_packed.ops.residual_projection.quack"
BF16 = torch.bfloat16
PATTERN = "GM*-E"


@pytest.fixture
def quack(package):
    """Module of the backend, with the stand-in."""
    return import_module(NAME)


@pytest.fixture
def on_cpu(quack, monkeypatch):
    """The same module, which takes the tensors of a CPU, of any dtype, as bf16 on a GPU."""
    for module in (joined_layers, api):
        monkeypatch.setattr(module, "WITH_CHOICE", {"cpu"})
    accept(monkeypatch, quack, dtype=BF16)
    return quack


def model_of(
    backend="auto",
    dtype=torch.float64,
    memory=None,
    pattern=PATTERN,
    device="cpu",
    **changes,
):
    changes = {"position_embedding_type": "none", **changes}
    if "E" in pattern:
        changes = {"moe_shared_expert_intermediate_size": 24, **changes}
    return HybridModel(
        tiny_config(pattern, **changes),
        vocab_size=VOCAB,
        max_positions=64,
        device=device,
        dtype=dtype,
        seed=3,
        backends={"residual_projection": backend},
        memory=memory,
    )


def pack():
    documents = [(torch.arange(length).numpy() % VOCAB, None) for length in (20, 1, 11)]
    return MicroBatch.build(documents, 32)


def run(model, accumulate=False):
    """Return the loss and the gradients of all parameters."""
    for parameter in model.parameters():
        parameter.grad = None
        if accumulate:
            parameter.main_grad = torch.zeros_like(
                parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)
            )
    loss = model(pack()).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad
        if accumulate and parameter.grad is None:
            found[name] = parameter.main_grad
    return found


@pytest.mark.parametrize("accumulate", [False, True])
def test_loss_and_gradients_are_those_of_separate_operations(on_cpu, package, accumulate):
    got, want = run(model_of(), accumulate), run(model_of("torch"), accumulate)
    assert len(package.tiles) == 5  # four layers and a shared expert
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)
        assert value.any(), name


def test_the_sum_is_rounded_once(on_cpu, package):
    generator = torch.Generator().manual_seed(0)
    residual, x = torch.randn(2, 40, 16, generator=generator).to(BF16)
    weight = torch.randn(16, 16, generator=generator).to(BF16)
    exact = residual.float() + x.float() @ weight.float().t()
    assert torch.equal(on_cpu.added_product(residual, x, weight), exact.bfloat16())
    assert not torch.equal(residual + x @ weight.t(), exact.bfloat16())
    strided = torch.empty(16, 40, dtype=BF16).t().copy_(x)
    shifted = torch.empty(40 * 16 + 1, dtype=BF16)[1:].view(40, 16).copy_(residual)
    assert torch.equal(on_cpu.added_product(shifted, strided, weight), exact.bfloat16())
    assert on_cpu.added_product(residual[:0], x[:0], weight).shape == (0, 16)
    assert len(package.tiles) == 2


def test_frozen_weights_get_no_gradient_and_pass_on_those_of_rows(on_cpu, package):
    joined, apart = model_of(pattern="M*-"), model_of("torch", pattern="M*-")
    for model in (joined, apart):
        for each in model.layers:
            each.mixer.output_projection.weight.requires_grad_(False)
    got, want = run(joined), run(apart)
    assert package.tiles
    for name, value in want.items():
        if value is None:
            assert got[name] is None
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


def hooked(one):
    one.mixer.output_projection.register_forward_hook(lambda module, inputs, output: None)


def replaced(one):
    forward = one.mixer.forward
    one.mixer.forward = lambda x, packed: forward(x, packed)


def replaced_and_wrapped(one):
    replaced(one)
    one.mixer.forward = apply.RecomputedCall(one.mixer.forward)


def subclassed(one):
    class Mixer(type(one.mixer)):
        def forward(self, x, packed):
            return super().forward(x, packed)

    one.mixer.__class__ = Mixer


def with_dropout(one):
    one.dropout.p = 1e-9


def adapted(one):
    projection = one.mixer.output_projection

    class Adapter(type(projection)):
        pass

    projection.__class__ = Adapter


@pytest.mark.parametrize(
    "change", [hooked, replaced, replaced_and_wrapped, subclassed, adapted, with_dropout]
)
def test_mixers_that_are_observed_or_replaced_add_nothing(on_cpu, package, change):
    models = [model_of(backend, pattern="M*-") for backend in ("auto", "torch")]
    for model in models:
        for each in model.layers:
            change(each)
    got, want = map(run, models)
    assert not package.tiles
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize(
    "modules", [("mamba", "gdn", "mlp", "layernorm"), ("layernorm", "core_attn"), ()]
)
def test_recomputed_mixers_and_projections_add_the_residual_too(on_cpu, package, modules):
    want = run(model_of(pattern="GM*-"))
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=modules)
    model = model_of(pattern="GM*-", memory=memory if modules else None)
    if not modules:
        for each in model.layers:
            projection = each.mixer.output_projection
            projection.forward = apply.RecomputedCall(projection.forward)
    before = len(package.tiles)
    got = run(model)
    # A second run does not repeat the product, and so needs no residual.
    assert len(package.tiles) == before + 4
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_recomputed_call_does_not_hold_the_residual(on_cpu):
    x, residual = torch.randn(2, 8, 16)
    joined = JoinedResidual(residual, on_cpu.added_product)
    again, substitute = RerunArguments((x, joined), SavedByAutograd).take()
    assert torch.equal(again, x) and substitute.residual_TO is None
    assert substitute.add_product(x, torch.randn(24, 16)).shape == (8, 24)


@pytest.mark.parametrize(
    "pattern, changes, reason",
    [
        ("M", {}, ""),
        ("*", {}, ""),
        ("G", {}, ""),
        ("-", {}, ""),
        ("-", {"add_bias_linear": True}, "have a bias"),
        ("M", {"add_bias_linear": True}, ""),
        ("M", {"hidden_dropout": 0.1}, "dropout"),
        ("*", {"residual_multiplier": 0.5}, "multiplied"),
        ("*-", {"attention_norm_placement": "output"}, "normalised"),
        ("E", {"moe_shared_expert_intermediate_size": 32}, ""),
        (
            "E",
            {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True},
            "its gate",
        ),
    ],
)
def test_a_run_lists_what_layers_do(on_cpu, package, monkeypatch, pattern, changes, reason):
    config = bf16_run(pattern, model=changes)
    monkeypatch.setattr(varlen_attention, "_capability", lambda device: (9, 0))
    listed = list(op_requests(config, torch.device("cuda")))
    for inputs in (inputs for op, _, inputs in listed if op is api.OP):
        assert reason in inputs.apart and bool(reason) == bool(inputs.apart)
        assert api.OP.select(inputs).name == ("torch" if reason else "quack")
    run(model_of(pattern=pattern, **changes))
    assert bool(package.tiles) == (not reason)


def test_explain_has_one_row_for_layers_with_the_same_kernel_and_reason(quack, monkeypatch):
    monkeypatch.setattr(capabilities, "_machine", lambda config, device: iter(()))
    monkeypatch.setattr(varlen_attention, "_capability", lambda device: (9, 0))
    config = bf16_run("M*-M", model={"attention_norm_placement": "output"})
    rows = capabilities.capabilities(config, torch.device("cuda"))
    found = [row for row in rows if row.name == "kernel residual_projection"]
    assert len(found) == 2 == len(set(found))
    assert any("is normalised before the addition" in row.detail for row in found)


def test_layers_ask_for_what_a_run_lists(on_cpu, monkeypatch):
    config = bf16_run("GM*-E", "cpu", model={"moe_shared_expert_intermediate_size": 40})
    found = asked(on_cpu, config, monkeypatch)
    told = set(listed(config, api.OP, "cpu"))
    assert found == told and len(told) == 4, told


def hidden_states_at_the_end(**changes):
    """Return how many hidden states the estimate counts at the end of each layer's forward pass."""
    found = []
    for symbol in PATTERN:
        # An activation that backward computes again is freed at the end, too, but is smaller.
        sizes = {"ffn_hidden_size": 16, **changes}
        model = model_of(dtype=BF16, device="meta", pattern=symbol, **sizes)
        counter = of_first_layer(model, Work(tokens=64, documents=2))
        hidden = 64 * model.config.hidden_size * 2
        # The last allocation is that of the sum, which remains.
        found.append(1 + counter.freed_at_end // hidden)
    return found


def test_the_estimate_counts_no_result_apart_from_the_sum(quack):
    if "torch._dynamo" in sys.modules:
        # While torch.compile evaluates frames, a caller holds the arguments of its calls until they
        # return, and the result before dropout with them. A test before may have left that on.
        sys.modules["torch._dynamo"].eval_frame.set_eval_frame(None)
    assert hidden_states_at_the_end() == [1, 1, 1, 1, 2]
    assert hidden_states_at_the_end(backend="torch") == [2] * 5
    # An expert layer also holds the result before dropout.
    assert hidden_states_at_the_end(hidden_dropout=0.1) == [2, 2, 2, 2, 3]


@pytest.mark.parametrize(
    "columns, tile", [(2688, (128, 192)), (384, (128, 192)), (2048, (128, 128)), (4096, (128, 128))]
)
def test_the_tile_depends_on_widths_only(on_cpu, package, columns, tile):
    for rows in (8, 200):
        x, weight = torch.ones(rows, 16).to(BF16), torch.ones(columns, 16).to(BF16)
        on_cpu.added_product(torch.ones(rows, columns).to(BF16), x, weight)
    assert package.tiles == [tile, tile]


def test_plans_of_other_row_counts_do_not_pile_up(on_cpu, package, monkeypatch):
    monkeypatch.setattr(quack_tiles, "_PLANS_KEPT", 3)
    for rows in range(1, 9):
        ones = torch.ones(rows, 16).to(BF16)
        on_cpu.added_product(ones, ones, torch.ones(16, 16).to(BF16))
        assert 0 < len(package.gemm_module._gemm_plan_cache) <= 3


def test_what_cannot_be_is_refused_with_its_reason(quack, monkeypatch):
    inputs = api.ResidualProjectionInputs(
        inner=12, channels=16, dtype=torch.float32, device_type="cuda"
    )
    dtype, size = quack.not_supported_reasons(inputs)
    assert "must be bfloat16, not torch.float32" in dtype
    assert size == "input width (12) is not divisible by 8"
    with pytest.raises(NoBackendError, match="not divisible by 8"):
        api.OP.select(inputs, "quack")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(quack._quack, "gemm", lambda A, B, D: None)
    version, tiles, *_ = quack.not_supported_reasons(inputs)
    assert "has no ['cluster_M', 'cluster_N', 'pingpong', 'tile_M', 'tile_N']" in version
    assert tiles == "the tiles are those of compute capability 9.x, found (10, 0)"
