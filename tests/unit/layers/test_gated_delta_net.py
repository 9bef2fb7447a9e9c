"""Gated delta nets against those of transformers, and documents of a pack against single ones."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.kinds.gated_delta_net import GatedDeltaNet
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases

pytest.importorskip("transformers")
from transformers.models.olmo_hybrid import OlmoHybridConfig, modeling_olmo_hybrid
from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5
from transformers.models.qwen3_next import Qwen3NextConfig, modeling_qwen3_next

HIDDEN = 12
SIZES = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
ONE_TO_ONE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 9,
    "linear_conv_kernel_dim": 4,
}
STACK = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
EPS = 1e-3
QWEN = {"norm_epsilon": EPS, "linear_norm_epsilon": None}
LENGTHS = [1, 2, 63, 64, 65, 5]
"""Documents of one token, shorter than the convolution, and around the length of a chunk."""
TAIL, SPARE = 3, 2
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest error of a tensor divided by its largest value."""


def by_key_head(weight, sizes, *widths):
    """Split the rows of a projection that are ordered by key head; join the parts of all heads."""
    heads = weight.view(sizes["linear_num_key_heads"], sum(widths), -1)
    return [part.flatten(0, 1) for part in heads.split(widths, dim=1)]


def qwen3_next(sizes):
    config = Qwen3NextConfig(rms_norm_eps=EPS, **STACK, **sizes)
    ratio = sizes["linear_num_value_heads"] // sizes["linear_num_key_heads"]
    key, value = sizes["linear_key_head_dim"], ratio * sizes["linear_value_head_dim"]

    def rows(p):
        q, k, v, z = by_key_head(p["in_proj_qkvz.weight"], sizes, key, key, value, value)
        b, a = by_key_head(p["in_proj_ba.weight"], sizes, ratio, ratio)
        return torch.cat([q, k, v, z, b, a])

    return modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0), rows, QWEN


def qwen3_5(sizes):
    config = Qwen3_5TextConfig(rms_norm_eps=EPS, **STACK, **sizes)
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def rows(p):
        return torch.cat([p[f"{name}.weight"] for name in names])

    return modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0), rows, QWEN


def olmo_hybrid(sizes):
    config = OlmoHybridConfig(linear_allow_neg_eigval=True, **STACK, **sizes)
    layer = modeling_olmo_hybrid.OlmoHybridGatedDeltaNet(config, 0)
    layer.o_norm.variance_epsilon = EPS

    def rows(p):
        return torch.cat([p[f"{name}_proj.weight"] for name in "qkvgba"])

    return layer, rows, {"linear_norm_epsilon": EPS, "linear_allow_neg_eigval": True}


FAMILIES = {"qwen3_next": qwen3_next, "qwen3_5": qwen3_5, "olmo_hybrid": olmo_hybrid}


def in_our_names(theirs, rows):
    """Return tensors of transformers' layer by the names and in the shapes of our parameters."""
    renamed = {"out_proj.weight": "o_proj.weight", "norm.weight": "o_norm.weight"}
    found = {name: theirs[name] for name in ("A_log", "dt_bias")}
    for ours, olmo in renamed.items():
        found[ours] = theirs.get(ours, theirs.get(olmo))
    return found | {"in_proj.weight": rows(theirs), "conv1d.weight": theirs["conv1d.weight"][:, 0]}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(sizes, dtype, **changes):
    config = cases.tiny_config("G", hidden_size=HIDDEN, **{**sizes, **changes})
    layer = GatedDeltaNet(config, Build(backends=Backends(), device="cpu", dtype=dtype))
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = draw(*parameter.shape, seed=number).to(dtype)
    return layer


@contextmanager
def wide(dtype):
    """Replace float32 by float64 in the code of transformers, which computes in float32."""
    with ExitStack() as stack:
        if dtype == torch.float64:
            stack.enter_context(mock.patch.object(torch, "float32", torch.float64))
            stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def pack_of(lengths=LENGTHS):
    total = sum(lengths) + TAIL
    return PackedSeqParams.from_lengths(lengths, total, capacity=len(lengths) + SPARE)


def gradients_of(layer, y, dy, x):
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return found[0], dict(zip(parameters, found[1:]))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", [SIZES, ONE_TO_ONE], ids=["3 and 6 heads", "2 and 2 heads"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(family, sizes, dtype):
    theirs, rows, options = FAMILIES[family](sizes)
    theirs = theirs.to(dtype)
    for number, (name, parameter) in enumerate(theirs.named_parameters()):
        offset = 1.0 if "norm" in name else 0.0
        parameter.data = (offset + 0.5 * draw(*parameter.shape, seed=number)).to(dtype)
    ours = build(sizes, dtype, **options)
    state = in_our_names({n: p.detach() for n, p in theirs.named_parameters()}, rows)
    assert state.keys() == dict(ours.named_parameters()).keys()
    ours.load_state_dict(state)

    packed, real = pack_of(), sum(LENGTHS)
    x = draw(packed.total_tokens, HIDDEN, seed=7).to(dtype).requires_grad_()
    dy = draw(packed.total_tokens, HIDDEN, seed=8).to(dtype)
    dy[real:] = 0
    with wide(dtype):
        want = torch.cat([theirs(part[None])[0] for part in x[:real].split(LENGTHS)])
        dx, d_theirs = gradients_of(theirs, want, dy[:real], x)
    y = ours(x, packed)
    got_dx, got = gradients_of(ours, y, dy, x)

    pairs = {"y": (y[:real], want), "dx": (got_dx, dx)}
    pairs |= {n: (got[n], gradient) for n, gradient in in_our_names(d_theirs, rows).items()}
    errors = {name: cases.relative_error(*pair) for name, pair in pairs.items()}
    if dtype == torch.float32:
        # These two gradients are sums over all tokens, of terms of both signs.
        errors |= {name: errors[name] / 5 for name in ("A_log", "dt_bias")}
    assert len(errors) == 8 and max(errors.values()) <= TOLERANCES[dtype], errors


def scanned(layer, qkvzba, lengths, capacity=0):
    """Return outputs and input gradients of everything between the projections."""
    packed = PackedSeqParams.from_lengths(lengths, len(qkvzba), capacity=capacity or len(lengths))
    leaf = qkvzba.clone().requires_grad_()
    y = layer._scan(leaf, packed)
    (gradient,) = torch.autograd.grad(y.square().sum(), leaf)
    return y.detach(), gradient


@pytest.mark.parametrize("lengths", [LENGTHS, [130], [1] * 9, [64, 64, 2]], ids=str)
def test_a_pack_has_the_results_of_its_documents_alone(lengths):
    """Compare float64 results of the part between the projections, which reads other tokens."""
    layer = build(SIZES, torch.float64)
    x = draw(sum(lengths), layer.in_proj.weight.shape[0], seed=3)
    y, dx = scanned(layer, x, lengths, capacity=len(lengths) + SPARE)
    alone = [scanned(layer, part, [len(part)]) for part in x.split(lengths)]
    for got, want in ((y, [pair[0] for pair in alone]), (dx, [pair[1] for pair in alone])):
        assert cases.relative_error(got, torch.cat(want)) < 1e-13


def test_a_document_moves_no_bit_of_another():
    layer = build(SIZES, torch.float32)
    lengths = [*LENGTHS, TAIL]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    x = draw(len(document), layer.in_proj.weight.shape[0], seed=3).float()
    before = scanned(layer, x, lengths)
    for changed in range(len(lengths)):
        own = document == changed
        after = scanned(layer, x + own[:, None], lengths)
        for old, new in zip(before, after):
            assert torch.equal(old[~own], new[~own]) and not torch.equal(old[own], new[own])


def test_precision_and_weight_decay_of_parameters():
    layer = build(SIZES, torch.float32)
    kept = {n for n, p in layer.named_parameters() if getattr(p, "keep_fp32", False)}
    undecayed = {n for n, p in layer.named_parameters() if getattr(p, "no_weight_decay", False)}
    assert kept == {"A_log", "dt_bias"} and undecayed == {"A_log", "dt_bias", "norm.weight"}
    assert layer.conv1d.bias is None
