"""Isolation self-test: it passes isolating kernels, and reports kernels that leak."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import megatron_packed.layers.attention as attention
import megatron_packed.layers.kinds.gated_delta_net as gated_delta_net
import megatron_packed.layers.mlp as mlp
import megatron_packed.layers.moe.aux_loss as aux_loss
import megatron_packed.models.multi_token_prediction as multi_token_prediction
import megatron_packed.ops.ssd.reference as ssd_reference
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.kinds.registry import MIXERS
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import (
    LAST,
    IsolationResult,
    check_isolation,
    coupled_by_design,
    small_config,
)
from megatron_packed.models.trace import calls_of_pass
from support import hybrid_cases as cases
from support.leaks import leaking_convolution, leaking_delta_rule, leaking_scan, one_document

CONFIG = ModelConfig(
    hybrid_layer_pattern="M*-EG*E",
    hidden_size=2048,
    num_attention_heads=16,
    num_query_groups=4,
    kv_channels=64,
    mamba_num_groups=8,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_chunk_size=64,
    num_experts=64,
    moe_router_topk=3,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_aux_loss_coeff=0.1,
    add_bias_linear=False,
    position_embedding_type="rope",
    normalization="RMSNorm",
    squared_relu=True,
)


def check(pattern, dtype=torch.float32):
    return check_isolation(cases.tiny_config(pattern, position_embedding_type="rope"), "cpu", dtype)


class OperatorCounter(TorchDispatchMode):
    """Count the operators that run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_model_passes_bit_for_bit_with_little_work(dtype):
    """The work is counted, because a time would depend on the machine: here it takes 1 to 2 s."""
    with FlopCounterMode(display=False) as products, OperatorCounter() as operators:
        results = check_isolation(CONFIG, "cpu", dtype)
    assert products.get_total_flops() < 15e9  # 13.2e9
    assert operators.count < 25_000  # 20,069
    assert [(r.symbol, r.quantity) for r in results] == [
        (symbol, quantity)
        for symbol in "M*-EG"
        for quantity in ("outputs", "loss", "input gradients")
    ]
    for result in results:
        assert result.passed and result.noise == 0, str(result)
        # The rounding of an expert's row depends on its place on some CPUs.
        assert (result.allowed > 0) == (result.symbol == "E")
        assert result.difference == 0 or result.symbol == "E", str(result)
    assert all(result.leak > 1e-2 for result in results if result.symbol in "MG*")


def test_tiles_are_chosen_by_sizes_of_training_before_a_small_pack_can(monkeypatch):
    """Tiles are chosen before the first small pack runs, for the sizes of training."""
    calls = []
    run = ssd_reference.run

    def recorded(*inputs, **options):
        calls.append(None)
        return run(*inputs, **options)

    monkeypatch.setattr(
        ssd_reference, "tune", lambda inputs, device: calls.append(inputs), raising=False
    )
    monkeypatch.setattr(ssd_reference, "run", recorded)
    model = HybridModel(CONFIG, vocab_size=64, max_positions=8, device="meta", dtype=torch.bfloat16)
    pack = cases.make_pack(cases.make_documents([8]))
    requests = calls_of_pass(model, pack, torch.device("cpu"))
    check_isolation(CONFIG, "cpu", torch.bfloat16, requests=requests)
    first, *others = calls
    assert others.count(None) == len(others) > 0
    assert (first.tokens, first.heads, first.head_dim, first.groups, first.state_dim) == (
        64 * 64,
        64,
        64,
        8,
        128,
    )
    assert (first.chunk_size, first.dtype, first.device_type) == (64, torch.bfloat16, "cpu")


def test_a_loss_per_document_is_checked_too(monkeypatch):
    """A leak from document to document through the load-balance loss is found."""
    balanced = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "seq_aux_loss"}
    config = cases.tiny_config("E", **balanced, moe_aux_loss_per_document=True)
    assert not coupled_by_design(config) and coupled_by_design(CONFIG)
    assert all(result.passed for result in check_isolation(config, "cpu", torch.float32))
    true = aux_loss.counts_of_documents
    monkeypatch.setattr(
        aux_loss,
        "counts_of_documents",
        lambda *args: true(*args).sum(0, keepdim=True) + true(*args),
    )
    failed = [one for one in check_isolation(config, "cpu", torch.float32) if not one.passed]
    assert [one.quantity for one in failed] == ["input gradients"]


def test_the_small_model_keeps_what_chooses_kernels():
    for symbol in "MG*-E":
        small = small_config(symbol, CONFIG)
        for name in (
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "head_dim",
            "mamba_head_dim",
            "mamba_state_dim",
            "mamba_chunk_size",
            "activation",
            "normalization",
        ):
            assert getattr(small, name) == getattr(CONFIG, name), name
        assert small.num_attention_heads // small.num_query_groups == 4
        assert small.linear_num_value_heads // small.linear_num_key_heads == 2
        assert small.moe_router_topk == 3
    assert small_config("E", CONFIG).num_experts == 8


def test_shifts_of_multi_token_prediction_are_checked(monkeypatch):
    results = check("-/*/*")
    assert [(r.symbol, r.quantity) for r in results[-2:]] == [
        ("/", "outputs"),
        ("/", "input gradients"),
    ]
    assert all(r.passed and r.difference == 0 for r in results)
    assert all(r.leak > 1e-2 for r in results[-2:])
    monkeypatch.setattr(
        multi_token_prediction, "later", lambda x_T, depth, reaches_T: torch.roll(x_T, -depth)
    )
    assert not any(r.isolated for r in check("-/-")[-2:])


def test_attention_with_and_without_a_window_is_checked():
    config = cases.tiny_config("*-*", window_size="99,0", window_attn_skip_freq="3")
    assert config.attention_windows == (100, None)
    results = check_isolation(config, "cpu", torch.float32)
    assert [result.symbol for result in results] == ["*"] * 6 + ["-"] * 3
    assert all(result.passed for result in results)
    assert small_config("*", config, variant={"window_size": "47,0"}).window_of(0) == 48


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 4), (None, None)])
def test_the_small_model_shares_norm_groups_as_the_model_does(groups, kept):
    config = replace(CONFIG, mamba_norm_groups=groups)
    assert small_config("M", config, ranks=4).mamba_norm_groups == kept


@pytest.mark.parametrize("pattern", ["M", "G", "*", "-", "E"])
def test_sizes_of_layers_that_a_model_has_not_need_not_be_given(pattern):
    """A model without attention or Mamba layers can have a width that fits no such heads."""
    needed = {
        "M": {"mamba_num_heads": 2, "mamba_num_groups": 1},
        "G": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
        "*": {"num_attention_heads": 3},
        "-": {},
        "E": {"num_experts": 2},
    }
    config = ModelConfig(
        hybrid_layer_pattern=pattern,
        hidden_size=48,
        add_bias_linear=False,
        position_embedding_type="rope",
        **needed[pattern],
    )
    assert all(result.passed for result in check_isolation(config, "cpu", torch.float32))
    assert FlopCounter(config, 64).training([5, 9]).total > 0
    HybridModel(config, vocab_size=64, max_positions=16)


def failures(results):
    return {(result.symbol, result.quantity) for result in results if not result.passed}


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_short_chunks_are_checked(chunk, monkeypatch):
    def results():
        config = cases.tiny_config("M*", mamba_chunk_size=chunk, position_embedding_type="rope")
        return check_isolation(config, "cpu", torch.float32)

    assert failures(results()) == set()
    leaking_scan(monkeypatch)
    assert ("M", "outputs") in failures(results())


def test_a_leaking_convolution_is_found(monkeypatch):
    leaking_convolution(monkeypatch)
    results = check("M*")
    assert failures(results) == {("M", "outputs"), ("M", "loss"), ("M", "input gradients")}
    assert "Mamba-2 layers (M), outputs: changing one document changed other documents" in str(
        results[0]
    )
    assert "choose another backend" in str(results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leaking_gated_delta_rule_is_found(monkeypatch, dtype):
    leaking_delta_rule(monkeypatch)
    results = check("G*", dtype)
    assert failures(results) == {("G", "outputs"), ("G", "loss"), ("G", "input gradients")}
    # With initial values the state decays within a few tokens, and the leak is below 1e-3.
    assert min(result.difference for result in results if result.symbol == "G") > 0.1
    assert str(results[0]).startswith("gated delta net layers (G), outputs: changing one document")


def test_a_leak_by_rounding_alone_is_found(monkeypatch):
    """The running sum of mamba-ssm continues across documents, which changes only the rounding."""
    monkeypatch.setattr(ssd_reference, "document_sum", cases.sum_without_restart)
    # The kernels of a CPU decide which quantities the rounding reaches.
    failed = [result for result in check("M") if not result.passed]
    assert failed and all(0 < result.difference < 1e-4 for result in failed)


def test_attention_that_reads_later_tokens_is_found(monkeypatch):
    attend = attention.varlen_attention

    def reversed_time(q, k, v, cu_seqlens, max_seqlen, **options):
        reverse = (options["seq_idx_1T"][0] * len(q)).add(torch.arange(len(q)).flip(0)).argsort()
        return attend(q[reverse], k[reverse], v[reverse], cu_seqlens, max_seqlen, **options)[
            reverse
        ]

    monkeypatch.setattr(attention, "varlen_attention", reversed_time)
    results = check("*-")
    assert failures(results) == {("*", "outputs")}
    assert results[0].isolated and "the mixer reads later tokens" in str(results[0])


def test_a_reversed_recurrence_is_found(monkeypatch):
    run_rule = gated_delta_net.gated_delta_rule

    def reversed_time(q, k, v, a, b, *inputs, **options):
        seq_idx = inputs[-2]
        reverse = (seq_idx[0] * len(q)).add(torch.arange(len(q)).flip(0)).argsort()
        return run_rule(*(x[reverse] for x in (q, k, v, a, b)), *inputs, **options)[reverse]

    monkeypatch.setattr(gated_delta_net, "gated_delta_rule", reversed_time)
    assert failures(check("G-")) == {("G", "outputs")}


def test_an_mlp_that_reads_the_next_token_of_its_document_is_found(monkeypatch):
    forward = mlp.MLP.forward

    def mixing(self, x_TD, packed, *joined):
        next_TD = torch.where(
            packed.seq_idx[0, :, None] == packed.seq_idx[0].roll(-1)[:, None],
            x_TD.roll(-1, 0),
            0.0,
        )
        return forward(self, x_TD + next_TD, packed, *joined)

    monkeypatch.setattr(mlp.MLP, "forward", mixing)
    assert failures(check("-*")) == {("-", "outputs")}


def test_leaking_attention_is_found(monkeypatch):
    attend = attention.varlen_attention

    def without_boundaries(q, k, v, cu_seqlens, max_seqlen, **options):
        options["seq_idx_1T"] = torch.zeros_like(options["seq_idx_1T"])
        return attend(q, k, v, one_document(cu_seqlens, len(q)), len(q), **options)

    monkeypatch.setattr(attention, "varlen_attention", without_boundaries)
    assert failures(check("*-")) == {("*", "outputs"), ("*", "loss"), ("*", "input gradients")}


def test_a_leak_from_the_last_document_to_the_first_is_found(monkeypatch):
    """A ring of ranks may bring the last rows to the first rank as its earlier keys."""
    attend = attention.varlen_attention

    def closed_ring(q, k, v, cu_seqlens, max_seqlen, **options):
        document_T = options["seq_idx_1T"][0]
        out = attend(q, k, v, cu_seqlens, max_seqlen, **options)
        last_NH = v[document_T == LAST].sum(0).repeat_interleave(q.shape[1] // v.shape[1], 0)
        return out + torch.where((document_T == 0)[:, None, None], last_NH, 0)

    monkeypatch.setattr(attention, "varlen_attention", closed_ring)
    assert failures(check("*-")) == {("*", "outputs"), ("*", "loss"), ("*", "input gradients")}


def test_a_check_that_could_not_see_a_leak_does_not_pass(monkeypatch):
    """A mixer without any mixing of tokens isolates, but the check could not see a leak in it."""
    monkeypatch.setattr(attention, "varlen_attention", lambda q, k, v, *args, **options: q)
    results = check("*")
    assert all(result.isolated and not result.passed for result in results)
    assert "cannot detect a leak" in str(results[0])


def test_not_a_number_does_not_pass(monkeypatch):
    monkeypatch.setattr(
        attention, "varlen_attention", lambda q, k, v, *args, **options: q * float("nan")
    )
    assert len(failures(check("*"))) == 3


def test_a_kernel_that_is_not_deterministic_may_differ_by_its_own_noise(monkeypatch):
    """Noise of 1e-6 passes, because a leak is far larger; noise as large as a leak fails."""
    attend = attention.varlen_attention
    generator = torch.Generator().manual_seed(0)

    def noisy(level):
        def run(q, *args, **options):
            out = attend(q, *args, **options)
            return out * (1 + level * torch.rand(out.shape, generator=generator))

        return run

    monkeypatch.setattr(attention, "varlen_attention", noisy(1e-6))
    results = check("*")
    assert all(result.passed and result.noise > 0 for result in results), [str(r) for r in results]
    monkeypatch.setattr(attention, "varlen_attention", noisy(0.5))
    assert failures(check("*"))


def _allowed_ulps(symbol, quantity, device, backends):
    return MIXERS[symbol].isolation.allowed_ulps(quantity, device, backends)


def test_another_rounding_is_allowed_only_for_kernels_that_round_again():
    gpu, fast, exact = torch.device("cuda"), Backends(), Backends(deterministic=True)
    cpu = torch.device("cpu")
    assert _allowed_ulps("E", "outputs", cpu, exact) == 8
    assert _allowed_ulps("*", "input gradients", gpu, fast) == 2
    assert _allowed_ulps("E", "outputs", gpu, exact) == 4
    bitwise = [
        ("*", "outputs", gpu, fast),
        ("*", "input gradients", gpu, exact),
        ("M", "input gradients", gpu, fast),
        ("*", "input gradients", cpu, fast),
        ("-", "outputs", cpu, fast),
    ]
    assert [_allowed_ulps(*case) for case in bitwise] == [0] * len(bitwise)


def test_sentences():
    values = {
        "symbol": "E",
        "quantity": "loss",
        "difference": 1e-9,
        "allowed": 1e-8,
        "noise": 0.0,
        "leak": None,
    }
    assert str(IsolationResult(**values)) == (
        "mixture of experts layers (E), loss: other documents changed by 1.0e-09, allowed 1.0e-08."
    )
