"""Experts with squared ReLU in their products, with a stand-in for quack (`quack_stand_in`)."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.explain import run_description
from megatron_packed.explain.kernel_reasons import chosen_kernels
from megatron_packed.explain.op_requests import useless_recomputation
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.moe.layer import GroupedExperts
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.ops.activation import api as activation
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.grouped_mlp import api
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
    clear_by_torch,
    listed,
    other_machine,
    saved_shapes,
)
from support.random_tensors import filled, normal
from support.traced_units import first_unit, saved_bytes

PACKAGE = "megatron_packed.ops.grouped_mlp."
E, R, D, F = 4, 90, 16, 24
BF16 = torch.bfloat16
ENDS = [[20, 20, 61, 84], [0, 0, 0, 0], [1, 90, 90, 90], [0, 0, 1, 1], [30, 60, 75, 90]]
"""Row after the last one of each expert: unused experts, unused rows, one row, a full pack."""


@pytest.fixture
def joined(package):
    """Module of the backend, with the stand-in."""
    return import_module(PACKAGE + "quack_joined")


@pytest.fixture
def on_cpu(joined, monkeypatch):
    """The same module, which takes the tensors of a CPU as those of a GPU."""
    clear_by_torch(monkeypatch, joined)
    monkeypatch.setattr(api, "WITH_JOINED", {("squared_relu", "cpu")})
    for module in (joined, import_module(PACKAGE + "quack")):
        accept(monkeypatch, module)
    return joined


def experts(backend="auto", kind="squared_relu", dtype=BF16):
    layer = GroupedExperts(
        E,
        D,
        F,
        kind=kind,
        ep=ExpertParallel(),
        build=Build(backends=Backends(grouped_mlp=backend), device="cpu", dtype=dtype),
    )
    return filled(layer, seed=1, precision=BF16)


def values(offsets=None, rows=R):
    """Return x and dy; rows after the last offset are NaN."""
    x, dy = normal(2, rows, D).bfloat16()
    if offsets is not None:
        x[int(offsets[-1]) :] = dy[int(offsets[-1]) :] = torch.nan
    return x, dy


def run(layer, offsets, given=None, *, accumulate=False, frozen=()):
    """Return output, dx and gradients of both weights; None where nothing is computed."""
    x, dy = values(offsets) if given is None else given
    x = x.detach().to(layer.fc1.dtype).requires_grad_("x" not in frozen)
    for name, weight in (("fc1", layer.fc1), ("fc2", layer.fc2)):
        weight.requires_grad_(name not in frozen)
        weight.grad = None
        if accumulate:
            weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    y = layer(x, offsets)
    y.backward(dy.to(y.dtype))
    found = [w.main_grad - 1 if accumulate else w.grad for w in (layer.fc1, layer.fc2)]
    assert not accumulate or layer.fc1.grad is None is layer.fc2.grad
    return dict(zip(("y", "x", "fc1", "fc2"), (y.detach(), x.grad, *found)))


def offsets_of(ends):
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("ends", ENDS)
def test_outputs_and_gradients_are_those_of_separate_products(on_cpu, package, ends, accumulate):
    offsets = offsets_of(ends)
    got = run(experts(), offsets, accumulate=accumulate)
    # Hidden and activation, dhidden and activation, and one launch of each of the other products.
    assert package.launched == 6
    apart = run(experts("quack"), offsets, accumulate=accumulate)
    assert package.launched == 12
    exact = run(
        experts("reference", dtype=torch.float64),
        offsets,
        [v.nan_to_num() for v in values(offsets)],
    )
    for name, want in exact.items():
        assert torch.equal(got[name], apart[name]), name
        assert torch.isfinite(got[name]).all(), name
        assert (got[name].double() - want).norm() <= 1e-2 * want.norm(), name


@pytest.mark.parametrize(
    "frozen", [("x",), ("fc1",), ("fc2",), ("x", "fc1"), ("fc1", "fc2"), ("x", "fc2")]
)
def test_what_needs_no_gradient_gets_none(on_cpu, frozen):
    offsets = offsets_of(ENDS[0])
    whole, got = run(experts(), offsets), run(experts(), offsets, frozen=frozen)
    for name, value in got.items():
        assert value is None if name in frozen else torch.equal(value, whole[name]), name


def test_micro_batches_are_added(on_cpu):
    layer, offsets = experts(), offsets_of(ENDS[0])
    once = run(layer, offsets, accumulate=True)
    x, dy = values(offsets)
    layer(x, offsets).backward(dy)
    for name, weight in (("fc1", layer.fc1), ("fc2", layer.fc2)):
        torch.testing.assert_close(weight.main_grad - 1, 2 * once[name])


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_pack_without_rows_launches_nothing(on_cpu, package, accumulate):
    found = run(experts(), offsets_of([0] * E), values(rows=0), accumulate=accumulate)
    assert not any(each.any() for each in found.values()) and not package.launched


def test_a_row_depends_on_itself_only(on_cpu):
    offsets = offsets_of(ENDS[4])
    assert_a_row_is_alone(lambda *given: run(experts(), offsets, given), *values())


def test_nan_is_seen_in_the_output(on_cpu):
    x, dy = values()
    x[3] = torch.nan
    y = run(experts(), offsets_of(ENDS[4]), (x, dy))["y"]
    assert y[3].isnan().all() and y[4:].isfinite().all()


def test_tensors_that_the_kernel_cannot_read_are_copied(on_cpu):
    offsets = offsets_of(ENDS[4])
    x, dy = values()
    want = run(experts(), offsets, (x, dy))
    for strided in (
        lambda each: torch.empty(D, R, dtype=BF16).t().copy_(each),
        lambda each: torch.empty(R * D + 1, dtype=BF16)[1:].view(R, D).copy_(each),
    ):
        got = run(experts(), offsets, (strided(x), strided(dy)))
        assert_equal(got, want)


def test_the_activation_is_not_saved(on_cpu):
    def saved(backend):
        return saved_shapes(lambda: run(experts(backend), offsets_of(ENDS[0]))).count((R, F))

    assert saved("auto") == 1 < saved("quack")


def test_plans_of_other_row_counts_do_not_pile_up(on_cpu, monkeypatch):
    assert_few_plans(
        monkeypatch,
        lambda rows: run(experts(), offsets_of(ENDS[0]), values(rows=rows)),
        range(84, 94),
    )


def hooked(layer):
    layer.expert_fc2.register_forward_hook(lambda module, inputs, output: None)


def replaced(layer):
    layer.moe_act.forward = layer.moe_act.forward


@pytest.mark.parametrize("change", [hooked, replaced])
def test_steps_that_are_observed_or_replaced_are_called(on_cpu, change):
    offsets = offsets_of(ENDS[0])
    layer = experts()
    change(layer)
    got, want = run(layer, offsets), run(experts("quack"), offsets)
    assert_equal(got, want)
    named = experts("quack_joined")
    change(named)
    with pytest.raises(NoBackendError, match="are replaced or observed"):
        run(named, offsets)


def test_what_cannot_be_is_refused_with_its_reason(joined, monkeypatch):
    inputs = api.GroupedMLPInputs(
        channels=D,
        experts=E,
        hidden_in=2 * F,
        hidden_out=F,
        activation="swiglu",
        dtype=BF16,
        weight_dtype=BF16,
        device_type="cuda",
    )
    assert joined.not_supported_reasons(inputs) == ["the products compute squared_relu, not swiglu"]
    other_machine(monkeypatch)
    version, tiles = joined.not_supported_reasons(replace(inputs, activation="squared_relu"))
    assert OLDER in version and tiles == OTHER_GPU


OFFLOADED = {"fine_grained_activation_offloading": True, "offload_modules": ("expert_fc1",)}


def recomputed(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": modules}


@pytest.mark.parametrize(
    "memory, reason",
    [
        ({}, None),
        (OFFLOADED, "--offload-modules names expert_fc1"),
        (OFFLOADED | {"offload_modules": ("mlp_norm",)}, None),
        (recomputed("moe_act"), "--recompute-modules names moe_act"),
        (recomputed("moe", "moe_act"), None),
        (recomputed("layernorm"), None),
    ],
)
def test_a_run_lists_the_choice_with_its_reason(joined, memory, reason):
    (inputs,) = listed(bf16_run("E", memory=memory), api.OP, "cuda")
    reasons = joined.not_supported_reasons(inputs)
    assert (len(reasons) == 1 and reason in reasons[0]) if reason else not reasons
    assert api.OP.select(inputs).name == ("quack" if reason else "quack_joined")


@pytest.mark.parametrize(
    "device, memory, useless",
    [
        ("cuda", recomputed("moe_act"), True),
        ("cuda", recomputed("core_attn", "moe_act"), True),
        ("cuda", recomputed("moe", "moe_act"), False),
        ("cuda", recomputed("core_attn"), False),
        ("cpu", recomputed("moe_act"), False),
        # Without moe_act the products would be separate calls, which save the activation.
        ("cuda", recomputed("moe_act") | OFFLOADED, False),
    ],
)
def test_a_useless_recomputation_is_reported(joined, device, memory, useless):
    config = bf16_run("*E", memory=memory)
    device, warnings = torch.device(device), []
    groups = SimpleNamespace(device=device, world_size=1)
    run_description.name_kernels(config, groups, 2, detail=lambda text: None, warn=warnings.append)
    row = next(run_description.warned_capabilities(config, device, 1))
    said = [text for text in warnings if "saves no memory: without it the experts run" in text]
    assert said == [f"recomputation: {row.detail}; {row.fix}"] * useless
    assert (row.state, bool(row.fix)) == (("partial", True) if useless else ("on", False))
    assert ("moe_act saves no memory" in row.detail) == useless


@pytest.mark.parametrize(
    "pattern, changes", [("E", {"squared_relu": False, "swiglu": True}), ("M", {})]
)
def test_other_recomputations_are_not_reported(joined, pattern, changes):
    memory = recomputed("moe_act" if pattern == "E" else "mamba")
    config = bf16_run(pattern, model=changes, memory=memory)
    assert useless_recomputation(config, torch.device("cuda")) == ""


def test_both_are_listed_if_parts_of_some_layers_are_offloaded(joined):
    """A layer that is recomputed whole is not offloaded."""
    whole = {"recompute_granularity": "full", "recompute_method": "block"}
    config = bf16_run("EE", memory={"recompute_num_layers": 1, **whole, **OFFLOADED})
    kernels = chosen_kernels(config, torch.device("cuda"))
    listed = [kernel.name for kernel in kernels if kernel.op.name == "grouped_mlp"]
    assert listed == ["quack_joined", "quack"]


@pytest.mark.parametrize(
    "pattern, shared, memory, called",
    [
        ("E", None, {}, False),
        ("E", None, OFFLOADED, True),
        ("E", 32, {}, False),
        ("E", 32, OFFLOADED, True),
        ("E-", None, {}, False),
        ("E-", None, OFFLOADED | {"offload_modules": ("mlp_act",)}, True),
        ("-", None, {}, False),
    ],
)
def test_the_activation_is_listed_if_it_is_called(joined, pattern, shared, memory, called):
    model = {"moe_shared_expert_intermediate_size": shared}
    config = bf16_run(pattern, model=model, memory=memory)
    listed = {kernel.op.name for kernel in chosen_kernels(config, torch.device("cuda"))}
    assert (activation.OP.name in listed) == called


@pytest.mark.parametrize("memory", [{}, OFFLOADED, recomputed("moe_act"), recomputed("moe")])
def test_layers_ask_for_what_a_run_lists(on_cpu, monkeypatch, memory):
    """The inputs of both are equal, but for the words of the reason."""
    config = bf16_run("E", "cpu", memory=memory)
    found = asked(on_cpu, config, monkeypatch)
    (told,) = listed(config, api.OP, "cpu")
    (found,) = found - {told} or {told}
    assert replace(found, apart="") == replace(told, apart="")
    assert bool(found.apart) == bool(told.apart)


def unit(backend="auto", memory=None):
    return first_unit(tiny_config("E"), {"grouped_mlp": backend}, memory)


def test_the_estimate_counts_no_saved_activation(joined):
    found, apart = unit(), unit("quack")
    size = 2 * 4096 * tiny_config("E").moe_ffn_hidden_size * 2
    assert saved_bytes(found) == saved_bytes(apart) - size
    # The activation is made in forward, and again in backward, so both passes need it for a moment.
    for more, less in ((found.forward, apart.forward), (found.backward, apart.backward)):
        assert sum(more.values()) >= sum(less.values()) - size
    assert sum(found.forward.values()) > saved_bytes(found) + size


@pytest.mark.parametrize("memory", [OFFLOADED, recomputed("moe_act")])
def test_the_estimate_counts_separate_steps_if_they_are_called(joined, memory):
    memory = MemoryConfig(**memory)
    found, apart = unit(memory=memory), unit("quack", memory)
    assert found.saved == apart.saved and found.backward == apart.backward
