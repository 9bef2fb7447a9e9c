"""Tests of TransformerEngine layers with a stand-in that computes in PyTorch and records calls."""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.sections.memory import OFFLOADED_IN, MemoryConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers import transformer_impl as implementation_module
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_packed.layers.norm import Norm
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.models.decoder import Decoder
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.resume.held_state import held_state
from support import hybrid_cases as cases
from support.hybrid_cases import CPU_BUILD

ADAPTERS = "megatron_packed.layers.transformer_engine"
TRANSFORMER_ENGINE = {"transformer_impl": "transformer_engine", "varlen_attention": "reference"}
"""Options of the models; TransformerEngine's attention is an op backend with separate tests."""


class FakeLinear(nn.Module):
    """Stand-in for ``transformer_engine.pytorch.Linear``.

    The stand-in computes results for one rank only. With several ranks, tests can only inspect its
    arguments.
    """

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        if tp_size > 1:
            warnings.warn(
                "To guarantee overlapping TP and SP collectives with the backwardGEMMs",
                stacklevel=2,
            )
        assert (
            out_features % tp_size == 0 and in_features % tp_size == 0
            if parallel_mode
            else tp_size == 1
        )
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.use_bias, self.fuse_wgrad_accumulation = bias, fuse_wgrad_accumulation
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.weight = nn.Parameter(
            torch.empty(self.out_features, self.in_features, device=device, dtype=params_dtype)
        )
        self.bias = torch.empty(0)
        if bias:
            del self.bias
            self.bias = nn.Parameter(
                torch.empty(self.out_features, device=device, dtype=params_dtype)
            )
        self.calls = []

    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self.calls.append(self.fuse_wgrad_accumulation)
        assert self.weight.shape == (self.out_features, self.in_features) and self.tp_size == 1
        bias = self.bias if self.use_bias else None
        return _FakeProduct.apply(inp.contiguous(), self.weight, bias, self.fuse_wgrad_accumulation)


class _FakeProduct(torch.autograd.Function):
    """Linear function that adds the weight gradient to ``main_grad`` if ``fuse`` is True.

    The gradient of the bias is always returned.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, fuse):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fuse, ctx.bias = weight, fuse, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = grad.t() @ x
        if ctx.fuse:
            ctx.weight.main_grad.add_(grad_weight)
            grad_weight = None
        return grad @ weight, grad_weight, grad.sum(0) if ctx.bias else None, None


class FakeNorm(nn.Module):
    """Common base of the stand-ins for ``transformer_engine.pytorch.RMSNorm`` and ``LayerNorm``."""

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        assert set(kwargs) <= {"device", "dtype", "sm_margin"}
        self.eps = eps
        self.added = float(zero_centered_gamma)
        self.weight = nn.Parameter(torch.ones(normalized_shape, **kwargs))

    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass


class FakeRMSNorm(FakeNorm):
    def forward(self, x):
        scale = self.weight + self.added
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * scale


class FakeLayerNorm(FakeNorm):
    def __init__(self, normalized_shape=None, eps=1e-5, *, zero_centered_gamma=False, **kwargs):
        super().__init__(normalized_shape, eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        self.bias = nn.Parameter(torch.zeros(normalized_shape, **kwargs))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight + self.added, self.bias, self.eps)


@pytest.fixture
def engine(monkeypatch):
    """Return the TransformerEngine implementation over the stand-in, which also runs on a CPU."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.pytorch = pytorch
    pytorch.Linear, pytorch.RMSNorm, pytorch.LayerNorm = FakeLinear, FakeRMSNorm, FakeLayerNorm
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.delitem(sys.modules, ADAPTERS, raising=False)
    monkeypatch.setattr(
        implementation_module, "transformer_engine_refusal", lambda device, dtype: None
    )
    yield implementation("transformer_engine", "cpu", torch.float32)
    sys.modules.pop(ADAPTERS, None)


def both(pattern: str, **changes):
    return [
        cases.tiny_model(pattern, dtype=torch.float64, backends=backends, **changes).train()
        for backends in ({"varlen_attention": "reference"}, TRANSFORMER_ENGINE)
    ]


CASES = {
    "rms norm, squared relu": {},
    "layer norm, biases, gelu": {
        "normalization": "LayerNorm",
        "squared_relu": False,
        "add_bias_linear": True,
    },
    "gate, norms of queries and keys, weights minus one": {
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
    },
    "swiglu, qkv bias": {"squared_relu": False, "swiglu": True, "add_qkv_bias": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("flat", [False, True])
def test_the_same_numbers_names_and_marks(engine, name: str, flat: bool) -> None:
    """Compare a hybrid model with TransformerEngine layers and with local layers over two
    micro-batches. Gradients are accumulated by autograd or in flat buffers."""
    found = []
    for model in both("M*-", **CASES[name]):
        buffers = FlatBuffers(model) if flat else None
        losses = []
        for seed in (0, 1):
            output = model(cases.awkward_pack(seed, tail=3))
            output.loss.backward()
            losses.append(output.loss.detach())
        grads = cases.gradients(model)
        if buffers is not None:
            assert all(parameter.grad is None for parameter in model.parameters())
            grads = {parameter: value.main_grad for parameter, value in buffers.parameters.items()}
            buffers.check_addresses()
        found.append((model, losses, grads))
    (local, wanted, wanted_grads), (model, losses, grads) = found
    for loss, other in zip(losses, wanted, strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-12, atol=0)
    assert list(grads) == list(wanted_grads)
    for parameter, grad in wanted_grads.items():
        torch.testing.assert_close(grads[parameter], grad, rtol=1e-9, atol=1e-11, msg=parameter)

    assert list(model.state_dict()) == list(local.state_dict())
    pairs = zip(model.named_parameters(), local.named_parameters(), strict=True)
    for (_, mine), (_, other) in pairs:
        assert torch.equal(mine, other) and mine.dtype == other.dtype
        assert {key for key in vars(mine) if key != "main_grad"} == {
            key for key in vars(other) if key != "main_grad"
        }
    assert [held.shard.name for held in held_state(model)] == [
        held.shard.name for held in held_state(local)
    ]


@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            offload_layer_inputs=True,
            min_offloaded_tensor_size=1,
        ),
        MemoryConfig(
            recompute_granularity="selective",
            recompute_modules=("core_attn", "layernorm"),
            fine_grained_activation_offloading=True,
            min_offloaded_tensor_size=1,
            offload_modules=(
                "attn_proj",
                "mamba_scan",
                "mamba_out_proj",
                "mlp_act",
                "mlp_fc2",
                "expert_fc1",
            ),
        ),
        MemoryConfig(
            fine_grained_activation_offloading=True,
            min_offloaded_tensor_size=1,
            offload_modules=tuple(OFFLOADED_IN),
        ),
    ],
    ids=["inputs", "beside recomputation", "all parts"],
)
def test_recomputed_and_offloaded_they_give_the_same_bits(engine, memory: MemoryConfig) -> None:
    found = []
    for chosen in (MemoryConfig(), memory):
        config = cases.tiny_config("M*-E", moe_shared_expert_intermediate_size=24)
        model = HybridModel(
            config,
            vocab_size=cases.VOCAB,
            max_positions=256,
            backends=TRANSFORMER_ENGINE,
            memory=chosen,
        ).train()
        buffers = FlatBuffers(model)
        for seed in (0, 1):
            model(cases.awkward_pack(seed, tail=3)).loss.backward()
        found.append(buffers.grads.clone())
    assert torch.equal(*found) and found[0].any()
    assert model.offload is not None and model.offload.pool.pinned > 0


def test_every_linear_and_norm_between_the_layers_is_its_own(engine) -> None:
    """Check that all linear layers and norms use TransformerEngine, except routers and experts.

    In an MoE layer only the norm and the shared expert use TransformerEngine.
    """
    local, model = both("M*-E", moe_shared_expert_intermediate_size=24)
    kinds = (ColumnParallelLinear, RowParallelLinear, Norm)
    parts = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    assert len(parts) == 5 + 2 + 2 + 2 + 2 and all(
        type(module) in engine for module in parts.values()
    )
    assert not any(hasattr(module, "te_module") for module in local.modules())
    output = model(cases.awkward_pack())
    output.loss.backward()
    linears = [module for module in parts.values() if not isinstance(module, Norm)]
    assert all(module.te_module.calls == [False] for module in linears), (
        "without main_grad there is nothing to fuse into"
    )
    assert all(module.te_module.weight is module.weight for module in parts.values())


def parallel(**changes) -> TensorParallel:
    return TensorParallel(
        **{"group": object(), "size": 2, "rank": 1, "sequence_parallel": True} | changes
    )


def linears(engine, tp: TensorParallel, *, bias: bool):
    build = Build(backends=Backends(), tp=tp, device="cpu", dtype=torch.float32)
    options = {"bias": bias, "build": build}
    rows = SplitSegment(noun="rows", count=6)
    shared = SplitSegment(noun="groups", count=1, width=3, shareable=True)
    return (
        engine.column_parallel(8, tp.shard(rows, shared), **options),
        engine.row_parallel(tp.shard(rows, dim=1), 8, **options),
    )


def test_groups_modes_and_sizes_are_passed_on(engine) -> None:
    """Check the arguments for two ranks that share a group of 3 rows.

    Each rank has 3 + 3 of 9 rows, so TransformerEngine gets 12 as the width: twice 6.
    """
    tp = parallel()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        column, row = linears(engine, tp, bias=True)
    assert column.weight.shape == (6, 8) and row.weight.shape == (8, 3)
    for layer, mode in ((column, "column"), (row, "row")):
        its = layer.te_module
        assert (its.parallel_mode, its.tp_size, its.sequence_parallel) == (mode, 2, True)
        assert its.tp_group is tp.group and its.use_bias
        assert (its.out_features, its.in_features) == layer.weight.shape
        assert its.weight is layer.weight and its.bias is layer.bias
    assert not linears(engine, parallel(sequence_parallel=False), bias=False)[
        0
    ].te_module.sequence_parallel


@pytest.mark.parametrize("tp", [SINGLE, parallel().inside()])
def test_one_rank_and_modules_inside_the_parallel_region_communicate_nothing(
    engine, tp: TensorParallel
) -> None:
    for layer in linears(engine, tp, bias=False):
        its = layer.te_module
        assert (its.parallel_mode, its.tp_group, its.tp_size, its.sequence_parallel) == (
            None,
            None,
            1,
            False,
        )
        x = torch.randn(5, layer.weight.shape[1])
        with torch.no_grad():
            layer.weight.normal_()
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


def test_gradients_go_into_buffers_that_came_after_the_layer(engine) -> None:
    layer, _ = linears(engine, SINGLE, bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x, grad = torch.randn(5, 8), torch.randn(5, layer.weight.shape[0])
    layer(x).backward(grad)
    wanted = [parameter.grad.clone() for parameter in layer.parameters()]
    buffers = FlatBuffers(layer)
    assert layer.te_module.weight is layer.weight
    for _ in range(2):
        layer(x).backward(grad)
    assert layer.te_module.calls == [False, True, True]
    for parameter, once in zip(buffers.parameters.values(), wanted, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, 2 * once)


def real_signature(source: Path, kind: str) -> dict[str, ast.expr | None]:
    """Return parameter -> default of a class's constructor, read from its source file."""
    tree = ast.parse(source.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    (made,) = (
        node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    names = [argument.arg for argument in made.args.args[1:]]
    defaults = [None] * (len(names) - len(made.args.defaults)) + list(made.args.defaults)
    return dict(zip(names, defaults, strict=True))


@pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="TransformerEngine is not unpacked here"
)
@pytest.mark.parametrize(
    "file, kind, fake",
    [
        ("linear", "Linear", FakeLinear),
        ("rmsnorm", "RMSNorm", FakeNorm),
        ("layernorm", "LayerNorm", FakeNorm),
    ],
)
def test_the_stand_in_is_made_as_the_original(file: str, kind: str, fake: type) -> None:
    """Check that the stand-in's parameters equal the original's: names, order and defaults."""
    (root,) = find_spec("transformer_engine").submodule_search_locations
    real = real_signature(Path(root) / "pytorch" / "module" / f"{file}.py", kind)
    ours = [p for p in inspect.signature(fake).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert [parameter.name for parameter in ours] == list(real)[: len(ours)]
    for parameter in ours:
        default = real[parameter.name]
        has_none = parameter.default is parameter.empty
        assert has_none if default is None else parameter.default == ast.literal_eval(default), (
            parameter.name
        )


# -- # -- refusals ---------------------------------------------------------------------------------
# ----------------------------------------------------------------------------------------


def test_attention_comes_along_unless_another_is_named() -> None:
    chosen = Backends(transformer_impl="transformer_engine")
    assert (
        chosen.varlen_attention == chosen.context_parallel_attention == "transformer_engine"
        and chosen.rms_norm == "auto"
    )
    named = Backends.from_mapping(
        {"transformer_impl": "transformer_engine", "varlen_attention": "flash_attn_4"}
    )
    assert named.varlen_attention == "flash_attn_4"
    assert (
        Backends().varlen_attention == "auto" and Backends.reference().transformer_impl == "local"
    )


def test_what_it_cannot_take_is_refused_with_a_cure(monkeypatch) -> None:
    with pytest.raises(
        ValueError,
        match=r"^--transformer-impl transformer_engine: .* GPUs only; give local, which ",
    ):
        cases.tiny_model("M*-", backends={"transformer_impl": "transformer_engine"})
    with pytest.raises(
        ValueError, match=r"float32 matrix products in TF32, .*; add --bf16, or give local\.$"
    ):
        implementation("transformer_engine", "cuda", torch.float32)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, ADAPTERS, raising=False)
    with pytest.raises(
        ValueError, match=r"does not import \(\w+: .*\); install the extra 'gpu', or give local\.$"
    ):
        implementation("transformer_engine", "cuda", torch.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"transformer_impl 'apex' is unknown; choose local or transformer_engine\.",
    ):
        cases.tiny_model("-", backends={"transformer_impl": "apex"})


def test_local_layers_import_nothing_of_it(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, ADAPTERS, raising=False)
    assert implementation("local", "cpu", torch.float32).norm is Norm
    assert ADAPTERS not in sys.modules


def test_its_layers_are_made_and_called_as_the_local_ones(engine) -> None:
    for theirs, ours in zip(engine, implementation("local", "cpu", torch.float32)):
        for method in ("__init__", "forward"):
            expected = inspect.signature(getattr(ours, method))
            assert inspect.signature(getattr(theirs, method)) == expected, (ours, method)


def test_the_norms_residual_is_the_input_itself(engine) -> None:
    norm = engine.norm(8, kind="RMSNorm", eps=1e-3, build=CPU_BUILD)
    assert norm.te_module.eps == 1e-3
    with torch.no_grad():
        norm.weight.normal_()
    x: Tensor = torch.randn(5, 8)
    normed, residual = norm.with_residual(x)
    assert residual is x
    torch.testing.assert_close(normed, Norm.forward(norm, x))


def test_generation_computes_the_same_with_local_layers(engine) -> None:
    """A model of TransformerEngine's layers generates with local layers of the same parameters."""
    model = cases.tiny_model("M*-E", backends=TRANSFORMER_ENGINE).eval()
    local = cases.tiny_model("M*-E").eval()
    prompts = [[5, 9, 2], [7]]
    expected, found = Decoder(local), Decoder(model)
    assert torch.equal(found.prefill(prompts), expected.prefill(prompts))
    assert torch.equal(found.step([1, 2]), expected.step([1, 2]))
    parameters = dict(model.named_parameters())
    assert all(p is parameters[name] for name, p in found.modules.named_parameters())
