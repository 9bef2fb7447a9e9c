"""Dense MLP with joined products, with a stand-in for the package quack (`quack_stand_in`)."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as functional

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import JoinedResidual
from megatron_packed.layers.mlp import MLP
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.memory.recompute import checkpoint
from megatron_packed.models.estimate.step_memory import Work
from megatron_packed.models.trace import Imagined
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.dense_mlp import api
from support.hybrid_cases import tiny_config
from support.kernel_calls import bf16_run
from support.quack_stand_in import (
    OLDER,
    OTHER_GPU,
    accept,
    asked,
    assert_a_row_is_alone,
    assert_equal,
    assert_few_plans,
    listed,
    other_machine,
    saved_shapes,
)
from support.random_tensors import filled, normal
from support.traced_units import first_unit, saved_bytes, units_of

NAME = "megatron_packed.ops.dense_mlp.quack"
T, D, F = 40, 16, 24
BF16 = torch.bfloat16


@pytest.fixture
def quack(package):
    """Module of the backend, with the stand-in."""
    return import_module(NAME)


@pytest.fixture
def on_cpu(quack, monkeypatch):
    """The same module, which takes the tensors of a CPU as those of a GPU."""
    monkeypatch.setattr(api, "WITH_CHOICE", {("squared_relu", "cpu"), ("gelu", "cpu")})
    accept(monkeypatch, quack)
    return quack


def mlp(backend="auto", kind="squared_relu", dtype=BF16, **options):
    bias = options.pop("bias", False)
    build = Build(backends=Backends(dense_mlp=backend), device="cpu", dtype=dtype, **options)
    return filled(MLP(D, F, kind=kind, bias=bias, build=build), seed=1, precision=BF16)


def values(rows=T):
    return normal(2, rows, D).bfloat16()


def run(layer, x, dy, *, accumulate=False, frozen=()):
    """Return output, dx and gradients of both weights; None where nothing is computed."""
    x = x.clone().requires_grad_("x" not in frozen)
    for name, weight in (("fc1", layer.fc1.weight), ("fc2", layer.fc2.weight)):
        weight.requires_grad_(name not in frozen)
        if accumulate:
            weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    y = layer(x)
    y.backward(dy)
    weights = (layer.fc1.weight, layer.fc2.weight)
    found = [weight.main_grad - 1 if accumulate else weight.grad for weight in weights]
    assert not accumulate or all(weight.grad is None for weight in weights)
    return dict(zip(("y", "x", "fc1", "fc2"), (y.detach(), x.grad, *found)))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("frozen", [(), ("x",), ("fc1",), ("fc2",), ("x", "fc1"), ("fc1", "fc2")])
def test_outputs_and_gradients_are_those_of_separate_layers(on_cpu, package, frozen, accumulate):
    x, dy = values()
    options = {"accumulate": accumulate, "frozen": frozen}
    got = run(mlp(), x, dy, **options)
    assert package.tiles == [(128, 128), (192, 128)]
    apart = run(mlp("torch"), x, dy, **options)
    exact = run(mlp(dtype=torch.float64), x.double(), dy.double(), frozen=frozen)
    assert len(package.tiles) == 2
    for name in ("y", "x", "fc1", "fc2"):
        if name in frozen:
            assert got[name] is None or not got[name].any()
            continue
        errors = [(found[name].double() - exact[name]).norm() for found in (got, apart)]
        assert errors[0] <= 1.02 * errors[1] and errors[0] < 1e-2 * exact[name].norm(), name


def test_both_activations_are_those_of_the_rounded_values(on_cpu):
    layer, (x, dy) = mlp(), values()
    hidden, activated = on_cpu.hidden_and_activation(x, layer.fc1.weight)
    _, again = on_cpu.gradient(dy, layer.fc2.weight, hidden)
    assert torch.equal(activated, again)
    assert torch.equal(activated, layer.mlp_act(hidden))
    # The hidden values stay until backward, so the activation must not lie in their memory.
    assert activated.untyped_storage().data_ptr() != hidden.untyped_storage().data_ptr()


def test_the_gradient_has_the_bits_of_a_product_and_the_derivative(on_cpu):
    layer, (x, dy) = mlp(), values()
    hidden, _ = on_cpu.hidden_and_activation(x, layer.fc1.weight)
    got, _ = on_cpu.gradient(dy, layer.fc2.weight, hidden)
    product = (dy.float() @ layer.fc2.weight.float()).bfloat16()
    (want,) = torch.autograd.grad(layer.mlp_act(hidden.requires_grad_()), hidden, product)
    assert torch.equal(got, want)


def test_the_last_product_adds_a_residual(on_cpu):
    x, dy = values()
    residual = torch.randn(T, D).bfloat16().requires_grad_()
    joined = JoinedResidual(residual, lambda rows, *operands: rows + functional.linear(*operands))
    x.requires_grad_()
    y = mlp()(x, None, joined)
    y.backward(dy)
    want = run(mlp(), x.detach(), dy)
    assert torch.equal(y, residual + want["y"]) and torch.equal(x.grad, want["x"])
    assert torch.equal(residual.grad, dy)


def test_micro_batches_are_added(on_cpu):
    layer = mlp()
    x, dy = values()
    once = run(layer, x, dy, accumulate=True)
    layer(x).backward(dy)
    torch.testing.assert_close(layer.fc1.weight.main_grad - 1, 2 * once["fc1"])
    torch.testing.assert_close(layer.fc2.weight.main_grad - 1, 2 * once["fc2"])


def test_a_pack_without_rows_launches_nothing(on_cpu, package):
    found = run(mlp(), *values(0), accumulate=True)
    assert not any(each.any() for each in found.values())
    assert not package.tiles


def test_a_row_depends_on_itself_only(on_cpu):
    assert_a_row_is_alone(partial(run, mlp()), *values())


def test_tensors_that_the_kernel_cannot_read_are_copied(on_cpu):
    x, dy = values()
    want = run(mlp(), x, dy)
    for strided in (
        torch.empty(D, T, dtype=BF16).t().copy_(dy),
        torch.empty(T * D + 1, dtype=BF16)[1:].view(T, D).copy_(dy),
    ):
        got = run(mlp(), x, strided)
        assert_equal(got, want)
    strided = torch.empty(T * D + 1, dtype=BF16)[1:].view(T, D).copy_(x)
    got = run(mlp(), strided, dy)
    assert_equal(got, want)


def test_the_activation_is_not_saved(on_cpu):
    def saved(backend):
        x, dy = values()
        layer = mlp(backend)
        return saved_shapes(lambda: layer(x.requires_grad_()).backward(dy)).count((T, F))

    assert saved("auto") == 1 < saved("torch")


def hooked(layer):
    layer.fc2.register_forward_hook(lambda module, inputs, output: None)


def replaced(layer):
    layer.mlp_act.forward = layer.mlp_act.forward


def adapted(layer):
    class Adapter(type(layer.fc1)):
        pass

    layer.fc1.__class__ = Adapter


@pytest.mark.parametrize("change", [hooked, replaced, adapted])
def test_modules_that_are_observed_or_replaced_are_called(on_cpu, package, change):
    layer = mlp()
    change(layer)
    x, dy = values()
    got, want = run(layer, x, dy), run(mlp("torch"), x, dy)
    assert_equal(got, want)
    assert not package.tiles


def test_hooks_of_a_warm_up_change_no_saved_tensor(on_cpu, package):
    """TransformerEngine's capture registers them for the first run of a recomputed layer only."""

    def hook(module, inputs, output):
        seen.append(module)

    hook.__module__ = "transformer_engine.pytorch.graph"
    seen, layer = [], mlp()
    x, dy = values()
    want = run(mlp(), x, dy)
    x = x.requires_grad_()
    handles = [module.register_forward_hook(hook) for module in layer.modules()]
    y = checkpoint(layer, x)
    for handle in handles:
        handle.remove()
    y.backward(dy)
    assert seen == [layer]
    assert package.tiles
    assert torch.equal(y, want["y"])
    assert torch.equal(x.grad, want["x"])


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"bias": True}, None),
        ({"tp": TensorParallel(size=2)}, None),
        ({"kind": "gelu"}, "not of gelu"),
        ({"dtype": torch.float32}, "bfloat16, not torch.float32"),
    ],
)
def test_other_layers_are_separate(on_cpu, options, reason):
    layer = mlp(**options)
    assert layer.joined_products("cpu", options.get("dtype", BF16)) is None
    if reason is not None:
        with pytest.raises(NoBackendError, match=reason):
            mlp("quack", **options).joined_products("cpu", options.get("dtype", BF16))


def offloading(*parts):
    return {"memory": {"fine_grained_activation_offloading": True, "offload_modules": parts}}


@pytest.mark.parametrize(
    "pattern, changes, reason",
    [
        ("-", {}, None),
        ("-", offloading("mlp_norm"), None),
        ("-", offloading("mlp_norm", "mlp_act"), "--offload-modules names mlp_act"),
        ("-", {"parallel": {"tensor_model_parallel_size": 2}}, "tensor-parallel ranks exchange"),
        ("-", {"training": {"transformer_impl": "transformer_engine"}}, "not those of this"),
        ("-", {"model": {"add_bias_linear": True}}, "have a bias"),
        ("E", {"model": {"moe_shared_expert_intermediate_size": 32}}, None),
    ],
)
def test_a_run_lists_the_choice_with_its_reason(quack, pattern, changes, reason):
    (inputs,) = listed(bf16_run(pattern, **changes), api.OP, "cuda")
    reasons = quack.not_supported_reasons(inputs)
    assert (len(reasons) == 1 and reason in reasons[0]) if reason else not reasons
    assert api.OP.select(inputs).name == ("torch" if reason else "quack")


def test_a_run_lists_both_kernels_if_only_some_layers_are_apart(quack):
    whole = {"recompute_granularity": "full", "recompute_method": "block"}
    memory = {**whole, "recompute_num_layers": 1, **offloading("mlp_fc1")["memory"]}
    requests = listed(bf16_run("--", memory=memory), api.OP, "cuda")
    assert [api.OP.select(inputs).name for inputs in requests] == ["quack", "torch"]


@pytest.mark.parametrize("pattern", ["-", "E"])
def test_layers_ask_for_what_a_run_lists(on_cpu, monkeypatch, pattern):
    """The inputs of both are equal, but for the device."""
    shared = {"moe_shared_expert_intermediate_size": 40 if pattern == "E" else None}
    config = bf16_run(pattern, "cpu", model=shared)
    found = asked(on_cpu, config, monkeypatch)
    (told,) = listed(config, api.OP, "cpu")
    assert found == {told}


def test_what_cannot_be_is_refused_with_its_reason(quack, monkeypatch):
    inputs = api.DenseMLPInputs(
        channels=12, inner=F, kind="squared_relu", dtype=BF16, device_type="cuda"
    )
    assert quack.not_supported_reasons(inputs) == ["hidden size (12) is not divisible by 8"]
    other_machine(monkeypatch)
    version, tiles, _ = quack.not_supported_reasons(inputs)
    assert OLDER in version and tiles == OTHER_GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quack.not_supported_reasons(inputs)[1] == "this machine has no GPU that CUDA can use"
    on_cpu = replace(inputs, device_type="cpu")
    assert "run on CUDA devices, not on cpu" in quack.not_supported_reasons(on_cpu)[1]


def test_plans_of_other_row_counts_do_not_pile_up(on_cpu, monkeypatch):
    assert_few_plans(monkeypatch, lambda rows: run(mlp(), *values(rows)), range(1, 9))


def unit(pattern, backend, memory=None):
    config = tiny_config(pattern, moe_shared_expert_intermediate_size=24)
    return first_unit(config, {"dense_mlp": backend}, memory)


@pytest.mark.parametrize("pattern, inner", [("-", 48), ("E", 24)])
def test_the_estimate_counts_no_saved_activation(quack, pattern, inner):
    joined, apart = unit(pattern, "auto"), unit(pattern, "torch")
    activation = 4096 * inner * 2
    assert saved_bytes(joined) == saved_bytes(apart) - activation
    # The activation exists for a moment of the forward pass.
    assert sum(joined.forward.values()) > saved_bytes(joined) + activation


def test_the_estimate_counts_what_layers_of_transformer_engine_save(quack):
    """It builds local layers in their place, whose products would include the activation."""
    found = {}
    for name in ("local", "transformer_engine"):
        shared = {"moe_shared_expert_intermediate_size": 40}
        config = bf16_run("-E", model=shared, training={"transformer_impl": name})
        model, _ = Imagined.from_config(config, 1, 256)
        found[name] = [
            saved_bytes(layer) for layer in units_of(model, Work(tokens=128, documents=2))
        ]
        dense = model.layers[0].mixer.fc2.weight.shape[1]
    more = [apart - joined for joined, apart in zip(found["local"], found["transformer_engine"])]
    # These layers also have another norm, which saves other statistics.
    assert more == pytest.approx([128 * dense * 2, 128 * 40 * 2], abs=128 * 4)


def test_the_estimate_counts_separate_layers_if_their_parts_are_offloaded(quack):
    memory = MemoryConfig(**offloading("mlp_act")["memory"])
    joined, apart = unit("-", "auto", memory), unit("-", "torch", memory)
    assert joined.saved == apart.saved and joined.backward == apart.backward
