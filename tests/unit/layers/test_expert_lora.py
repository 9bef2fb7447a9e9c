"""Adapters of routed experts, against float64 autograd of ``W_e + s B_e A_e`` for each expert."""

from functools import wraps
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import gelu, silu

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.tensor_parallel_shards import is_expert
from megatron_packed.explain.op_requests import useless_recomputation
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.joined import ADAPTED
from megatron_packed.layers.lora import LoraScale
from megatron_packed.layers.moe.layer import GroupedExperts, MoE
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.models.convert.row_maps import interleaved
from megatron_packed.models.lora import Matrix, expert_adapters
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.grouped_mlp import api
from megatron_packed.packed.params import PackedSeqParams
from support.hybrid_cases import make_documents, make_pack, tiny_config, tiny_model
from support.kernel_calls import bf16_run
from support.memory_modes import DOCUMENTS, TAIL, model_of
from support.quack_stand_in import accept, assert_a_row_is_alone, clear_by_torch, listed
from support.random_tensors import filled, normal
from support.rank_models import asks, observe, recorded_calls, two_packs, with_other_token
from support.row_products import experts_row_by_row

E, R, D, F, RANK = 4, 45, 16, 24, 4
SHARED = LoraScale(RANK, scale=0.75)
BF16 = torch.bfloat16
ENDS = [[10, 10, 31, 42], [0, 0, 0, 0], [0, 45, 45, 45], [12, 20, 30, 45]]
"""Row after the last one of each expert: unused experts and rows, no row, all rows of one, a full pack."""
KINDS = {
    "squared_relu": lambda h: torch.relu(h).square(),
    "gelu": gelu,
    "swiglu": lambda h: silu(h[:, :F]) * h[:, F:],
}
FACTORS = ("fc1_lora.A", "fc1_lora.B", "fc2_lora.A", "fc2_lora.B")
MEMORY = {
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "moe_act": {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
    "layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "offload": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ("expert_fc1", "moe_act", "expert_fc2"),
        "offload_buffers": 2,
        "min_offloaded_tensor_size": 1,
    },
}


def build(backend="auto", dtype=torch.float64):
    return Build(backends=Backends(grouped_mlp=backend), device="cpu", dtype=dtype)


def adapt(experts, matrices, adapted, rank=RANK, given=None):
    """Add adapters to both weights; ``fc1`` holds equally many rows of each of the matrices."""
    given = given or build(dtype=experts.fc1.dtype)
    for name, parts, chosen in (("fc1", matrices, adapted), ("fc2", 1, [True])):
        weight = getattr(experts, name)
        rows = interleaved(1, [weight.shape[1] // parts] * parts)
        held = [Matrix(str(number), part) for number, part in enumerate(rows)]
        scale = LoraScale(rank, SHARED.scale)
        setattr(experts, f"{name}_lora", expert_adapters(weight, held, chosen, scale, given))
    return experts


def adapted(kind, matrices=1, adapted=None, backend="auto", dtype=torch.float64, rank=RANK):
    given = build(backend, dtype)
    experts = GroupedExperts(E, D, F, kind=kind, ep=ExpertParallel(), build=given)
    experts.requires_grad_(False)
    adapt(experts, matrices, adapted or [True] * matrices, rank, given)
    return filled(experts, 1, scale=0.3, precision=BF16)


def pairs(lora, rows, rank=RANK):
    """Yield rows of a weight, and the range of A's rows that is their adapter's."""
    parts = lora.A.shape[1] // rank
    for part in range(parts):
        size = rows // parts
        yield slice(part * size, (part + 1) * size), slice(part * rank, (part + 1) * rank)


def merged(experts, values, which, rank=RANK):
    """Return ``W_e + s B_e A_e``, computed for each matrix and each expert."""
    weight, A, B = values[which], values[f"{which}_lora.A"], values[f"{which}_lora.B"]
    update = torch.zeros_like(weight)
    for rows, own in pairs(getattr(experts, f"{which}_lora"), weight.shape[1], rank):
        update[:, rows] = torch.einsum("eor,eri->eoi", B[:, rows], A[:, own])
    return weight + SHARED.scale * update


def oracle(experts, x, dy, ends, rank=RANK):
    """Return output and gradients in float64, expert by expert."""
    values = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
    x = x.double().requires_grad_()
    w1, w2 = (merged(experts, values, which, rank) for which in ("fc1", "fc2"))
    y, start = [], 0
    for e, end in enumerate(ends):
        hidden = KINDS[experts.kind](x[start:end] @ w1[e].T)
        y.append(hidden @ w2[e].T)
        start = end
    y = torch.cat([*y, x.new_zeros(len(x) - start, D)])
    wanted = [x, *(values[name] for name in FACTORS)]
    grads = torch.autograd.grad(y, wanted, dy.double(), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(("x", *FACTORS), grads))}


def run(experts, x, dy, ends, *, main_grad=None):
    """Return output and gradients of the module; ``main_grad`` is a dtype to accumulate in."""
    x = x.detach().to(experts.fc1.dtype).requires_grad_()
    factors = {name: experts.get_parameter(name) for name in FACTORS}
    for factor in factors.values():
        factor.grad = None
        if main_grad is not None:
            factor.main_grad = torch.zeros_like(factor, dtype=main_grad)
    y = experts(x, torch.tensor(ends, dtype=torch.int32))
    y.backward(dy.to(y.dtype))
    assert experts.fc1.grad is None is experts.fc2.grad
    found = {"y": y.detach(), "x": x.grad}
    for name, factor in factors.items():
        in_main = main_grad is not None and factor.grad is None
        found[name] = factor.main_grad if in_main else factor.grad
    return found


def inputs(rows=R):
    return [0.5 * value for value in normal(2, rows, D).bfloat16()]


CASES = [
    ("squared_relu", 1, [True]),
    ("gelu", 1, [True]),
    ("swiglu", 1, [True]),
    ("swiglu", 2, [True, True]),
]


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("kind", "matrices", "chosen"), CASES)
def test_outputs_and_gradients_are_those_of_merged_weights(kind, matrices, chosen, ends):
    experts = adapted(kind, matrices, chosen)
    x, dy = inputs()
    got, want = run(experts, x, dy, ends), oracle(experts, x, dy, ends)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)
    assert not got["y"][ends[-1] :].any() and not got["x"][ends[-1] :].any()
    for e, (start, end) in enumerate(zip([0, *ends], ends)):
        for name in FACTORS:
            assert bool(got[name][e].any()) == (end > start), f"{name} of expert {e}"


@pytest.mark.parametrize("chosen", [[True, False], [False, True]])
def test_rows_of_a_matrix_without_an_adapter_keep_their_values(chosen):
    experts = adapted("swiglu", 2, chosen)
    lora = experts.fc1_lora
    assert lora.A.shape == (E, RANK, D)
    changed = lora.update(torch.float64).chunk(2, dim=1)
    assert [bool(half.any()) for half in changed] == chosen
    x, dy = inputs()
    gradient = run(experts, x, dy, ENDS[3])["fc1_lora.B"].chunk(2, dim=1)
    assert [bool(half.any()) for half in gradient] == chosen


def test_the_update_for_a_merge_is_that_of_the_products():
    experts, x = adapted("swiglu", 2), inputs()[0].double()
    offsets = torch.tensor(ENDS[0], dtype=torch.int32)
    y = experts(x, offsets)
    with torch.no_grad():
        for name in ("fc1", "fc2"):
            weight = getattr(experts, name)
            weight += getattr(experts, f"{name}_lora").update(torch.float64)
            setattr(experts, f"{name}_lora", None)
    torch.testing.assert_close(experts(x, offsets), y, rtol=1e-10, atol=1e-12)


def test_gradients_are_added_to_main_grad():
    experts = adapted("swiglu", 2)
    x, dy = inputs()
    buffers = FlatBuffers(experts)
    assert set(buffers.parameters) == set(FACTORS), "the base has no slot"
    for _ in range(2):
        experts(x.double(), torch.tensor(ENDS[0], dtype=torch.int32)).backward(dy.double())
    want = oracle(experts, x, dy, ENDS[0])
    for name in FACTORS:
        factor = experts.get_parameter(name)
        assert factor.grad is None and is_expert(factor)
        torch.testing.assert_close(factor.main_grad, 2 * want[name], rtol=1e-10, atol=1e-12)


# -- products that leave rows unwritten ------------------------------------------------------------


def add_by_torch(y, low, factor, offsets):
    for (start, end), matrix in zip(pairwise([0, *offsets.tolist()]), factor, strict=True):
        y[start:end] += (low[start:end].float() @ matrix.float()).to(y.dtype)
    return y


@pytest.fixture
def quack(package, monkeypatch):
    """Products of quack, by a stand-in; rows and gradients that it leaves unwritten are NaN."""
    adapted_linear = import_module("megatron_packed.ops.grouped_mlp.adapted_linear")
    clear_by_torch(monkeypatch, adapted_linear)
    monkeypatch.setattr(adapted_linear, "add_low_rank_", add_by_torch)
    accept(monkeypatch, import_module("megatron_packed.ops.grouped_mlp.quack"))
    monkeypatch.setattr(api, "WITH_JOINED", {("squared_relu", "cpu")})
    product = package.gemm_module.gemm

    @wraps(product)
    def checked(A, B, D, *others, **options):
        for tensor in (A, B, D):
            steps = [step * tensor.element_size() for step in tensor.stride() if step != 1]
            assert all(step % 16 == 0 for step in steps), "the kernel cannot read these rows"
        product(A, B, D, *others, **options)

    def unwritten(like, *shape, **options):
        sizes = shape[0] if len(shape) == 1 else shape
        return like.new_full(sizes, torch.nan, **options)

    package.gemm_module.gemm = checked
    monkeypatch.setattr(torch.Tensor, "new_empty", unwritten)
    return package


@pytest.mark.parametrize("main_grad", [None, torch.float32, BF16])
@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize(("kind", "matrices"), [("squared_relu", 1), ("swiglu", 2)])
def test_products_in_bf16_that_leave_rows_unwritten(quack, kind, matrices, rank, main_grad):
    experts = adapted(kind, matrices, dtype=BF16, rank=rank)
    for ends in ENDS[:3]:
        x, dy = inputs()
        want = oracle(experts, x, dy, ends, rank)
        x[ends[-1] :] = dy[ends[-1] :] = torch.nan
        before = quack.launched
        got = run(experts, x, dy, ends, main_grad=main_grad)
        # Forward has 4 products, and backward 4 for rows and 4 for factors: the base is frozen.
        assert quack.launched == before + 12
        for name, value in want.items():
            assert torch.isfinite(got[name]).all(), name
            error = (got[name].double() - value).norm() / value.norm().clamp(min=1e-6)
            assert error < 2e-2, f"{name}: {error:.1e}"


def test_products_with_the_activation_are_not_used(quack):
    experts = adapted("squared_relu", backend="quack_joined", dtype=BF16, rank=8)
    with pytest.raises(NoBackendError, match=ADAPTED):
        run(experts, *inputs(), ENDS[0])


def test_a_run_lists_the_reason(package):
    (inputs,) = listed(bf16_run("E", model={"lora_rank": 8}), api.OP, "cuda")
    assert inputs.apart == ADAPTED and api.OP.select(inputs).name == "quack"


@pytest.mark.parametrize(("adapters", "useless"), [({}, True), ({"lora_rank": 8}, False)])
def test_recomputed_activations_of_adapted_experts_save_memory(package, adapters, useless):
    config = bf16_run("E", model=adapters, memory=MEMORY["moe_act"])
    assert bool(useless_recomputation(config, torch.device("cuda"))) == useless


# -- layers ----------------------------------------------------------------------------------------

PACKED = PackedSeqParams.from_lengths([7, 5], 15)
MOST = 7
"""Most rows of an expert. 15 slots have 2 of 5 experts each, so a factor of 1 is a capacity of 6."""
CHOICES = {
    "capacity full": {"moe_expert_capacity_factor": MOST / 6},
    "capacity exceeded": {"moe_expert_capacity_factor": (MOST - 1) / 6},
    "latent": {"moe_latent_size": 20},
    "shared expert": {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    "swiglu": {"squared_relu": False, "swiglu": True},
}


def moe(changes):
    layer = MoE(tiny_config("E", **changes), build())
    layer.requires_grad_(False)
    adapt(layer.experts, 1, [True])
    return filled(layer, scale=0.3).eval()


@pytest.mark.parametrize("changes", CHOICES.values(), ids=CHOICES)
def test_a_layer_is_that_with_merged_experts(changes):
    layer = moe(changes)
    x = normal(15, 32, seed=3).double().requires_grad_()
    output = layer(x, PACKED)
    assert output.tokens_per_expert_E.max() == MOST
    dropped = changes.get("moe_expert_capacity_factor") == (MOST - 1) / 6
    assert bool(output.dropped) == dropped
    dy = normal(15, 32, seed=4).double()
    output.hidden_TD.backward(dy)
    factors = {name: p for name, p in layer.experts.named_parameters() if p.requires_grad}
    got = {name: p.grad for name, p in factors.items()} | {"x": x.grad}
    # The oracle: plain weights that are functions of the factors.
    leaves = {name: p.detach().clone().requires_grad_() for name, p in factors.items()}
    weights = {}
    for name in ("fc1", "fc2"):
        update = leaves[f"{name}_lora.B"] @ leaves[f"{name}_lora.A"]
        weights[f"experts.{name}"] = getattr(layer.experts, name) + SHARED.scale * update
        setattr(layer.experts, f"{name}_lora", None)
    other = x.detach().requires_grad_()
    plain = torch.func.functional_call(layer, weights, (other, PACKED))
    plain.hidden_TD.backward(dy)
    torch.testing.assert_close(output.hidden_TD, plain.hidden_TD, rtol=1e-9, atol=1e-11)
    for name, value in ({name: p.grad for name, p in leaves.items()} | {"x": other.grad}).items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_a_row_depends_on_itself_only():
    experts = adapted("swiglu", 2, dtype=torch.float32)
    assert_a_row_is_alone(
        lambda x, dy: run(experts, x, dy, ENDS[3]), *(value.float() for value in inputs())
    )


# -- models ----------------------------------------------------------------------------------------


def fill_factors(model):
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("lora.B"):
                parameter.copy_(0.1 * normal(*parameter.shape, seed=number))
    return model


def step(memory=None):
    """Return loss and gradients of a model whose adapters are not zero."""
    model = fill_factors(model_of(memory, lora_rank=4, squared_relu=False, swiglu=True))
    buffers = FlatBuffers(model)
    model(make_pack(DOCUMENTS, tail=TAIL)).loss.backward()
    return {name: p.main_grad.clone() for name, p in buffers.parameters.items()}


@pytest.fixture(scope="module")
def plain_step():
    return step()


@pytest.mark.parametrize("options", MEMORY.values(), ids=MEMORY)
def test_recomputation_and_offload_change_no_bit(plain_step, options):
    got = step(MemoryConfig(**options))
    assert any("fc1_lora" in name for name in got)
    for name, gradient in plain_step.items():
        assert torch.equal(got[name], gradient) and gradient.any(), name


def test_documents_keep_their_bits_if_another_one_changes():
    model = fill_factors(tiny_model("E*E", lora_rank=4, squared_relu=False, swiglu=True))
    model.embedding.weight.requires_grad_()
    pack = make_pack(make_documents([9, 6, 11]), tail=TAIL)
    slots = torch.arange(len(pack.tokens))
    changed = (slots >= 9) & (slots < 15)
    with experts_row_by_row():
        before, after = observe(model, pack), observe(model, with_other_token(pack, 12))
    for name, value in before.items():
        assert torch.equal(value[~changed], after[name][~changed]), name
        assert not torch.equal(value[changed], after[name][changed]), name


def test_operations_are_the_same_for_other_documents_and_read_no_device_value():
    model = fill_factors(tiny_model("EE", lora_rank=4, squared_relu=False, swiglu=True))
    one, other = recorded_calls(model, two_packs())
    assert one == other and not asks(one, alone=True)


def test_depths_with_one_weight_share_its_adapters():
    model = tiny_model("M/*E/*E", mtp_use_repeated_layer=True, lora_rank=4)
    first, second = (layer.mixer.experts for layer in model.moe_layers)
    assert first.fc1_lora is second.fc1_lora and first.fc2_lora is second.fc2_lora
    assert first.fc1_lora is not first.fc2_lora
