"""Kernels of the Mamba layer on a GPU: fp32 references, isolation, determinism, graphs, offsets."""

import os

from support.op_packs import assert_repeats, assert_replays, norm_error

# The libraries read these at import or first use. They fix the order of sums and the tuned kernels.
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
os.environ.setdefault("CAUSAL_CONV1D_DETERMINISTIC", "1")
os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")

import pytest
import torch

from megatron_packed.ops.causal_conv1d.api import OP as CONV
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.column_slices import GradientBuffer, split_columns
from megatron_packed.ops.gated_rms_norm.api import OP as GATED_NORM
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.ssd import int32_offsets
from megatron_packed.ops.ssd.api import OP as SSD
from megatron_packed.ops.ssd.api import ssd
from support.op_packs import boundaries, leaks, no_sync, relative_error

pytestmark = pytest.mark.gpu

N, P, G, S, W, CHUNK = 16, 64, 2, 128, 4, 128
INNER, CONV_CHANNELS = N * P, N * P + 2 * G * S
PACKS = {
    "awkward": [1, 2, 3, 127, 128, 129, 5, 300, 1, 2, 100, 226],
    "over 100 documents": [1, 2, 3, 10] * 64,
    "one document": [1024],
    "ragged end": [500, 301, 200],
}
BF16 = 8e-3
"""Largest norm of the error of bf16 kernels, divided by the norm of the fp32 result. A single
rounding causes 1.7e-3.
"""
FACTOR = 2.5
"""Largest error of a kernel, as a multiple of the error of plain PyTorch on the same bf16 inputs
(sums may cancel).
"""


def make(tokens, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).cuda()

    return {
        "zxbcdt": normal(tokens, INNER + CONV_CHANNELS + N).to(dtype),
        "conv_weight": normal(CONV_CHANNELS, W, scale=0.5).to(dtype),
        "conv_bias": normal(CONV_CHANNELS, scale=0.1).to(dtype),
        "A_log": torch.linspace(0, 2.7, N).cuda(),
        "D": normal(N),
        "dt_bias": normal(N) - 3,
        "norm_weight": normal(INNER).to(dtype),
        "dy": normal(tokens, INNER).to(dtype),
    }


LEAVES = ("zxbcdt", "conv_weight", "conv_bias", "A_log", "D", "dt_bias", "norm_weight")


def layer(leaf, seq_idx, cu_seqlens, reference=False):
    """Run all operations of a Mamba layer between its projections, on slices without copies."""
    conv_backend, ssd_backend, norm_backend = (
        ["reference"] * 3 if reference else ["triton", "mamba_ssm", "triton"]
    )
    z, xBC, dt = split_columns(leaf["zxbcdt"], (INNER,), (CONV_CHANNELS,), (N,))
    xBC = causal_conv1d(xBC, leaf["conv_weight"], leaf["conv_bias"], seq_idx, backend=conv_backend)
    x, B, C = split_columns(xBC, (N, P), (G, S), (G, S))
    A_log, D, dt_bias = leaf["A_log"], leaf["D"], leaf["dt_bias"]
    y = ssd(
        x, dt, A_log, B, C, D, dt_bias, seq_idx, cu_seqlens, chunk_size=CHUNK, backend=ssd_backend
    )
    return gated_rms_norm(
        y.flatten(1), z, leaf["norm_weight"], 1e-5, group_size=INNER // G, backend=norm_backend
    )


def mixer(values, seq_idx, cu_seqlens, reference=False):
    """Run the layer forward and backward."""
    leaf = {name: values[name].detach().requires_grad_() for name in LEAVES}
    y = layer(leaf, seq_idx, cu_seqlens, reference)
    gradients = torch.autograd.grad(y, leaf.values(), values["dy"])
    return {"y": y.detach(), **dict(zip((f"d_{name}" for name in leaf), gradients))}


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_the_layer_equals_its_references(lengths):
    values = make(sum(lengths))
    boundary = boundaries(lengths, "cuda")
    got, plain = mixer(values, *boundary), mixer(values, *boundary, reference=True)
    want = mixer({name: value.float() for name, value in values.items()}, *boundary, reference=True)
    assert_near(got, want, plain)


def assert_near(got, want, plain, limit=BF16):
    errors = {name: norm_error(got[name], want[name]) for name in want}
    allowed = {name: max(limit, FACTOR * norm_error(plain[name], want[name])) for name in want}
    assert {
        name: (errors[name], allowed[name]) for name in want if not errors[name] <= allowed[name]
    } == {}


def test_parameter_gradients_add_up_in_main_grad():
    """Each pass adds fp32 gradients to ``main_grad``; autograd gets none to accumulate."""
    lengths = PACKS["awkward"]
    values, boundary = make(sum(lengths)), boundaries(lengths, "cuda")
    want = mixer({name: value.float() for name, value in values.items()}, *boundary, reference=True)
    leaf = {name: torch.nn.Parameter(values[name]) for name in LEAVES}
    for name in LEAVES[1:]:
        leaf[name].main_grad = torch.full_like(leaf[name], 3.0, dtype=torch.float32)
    for _ in range(2):
        layer(leaf, *boundary).backward(values["dy"])
    assert all(leaf[name].grad is None for name in LEAVES[1:])
    plain = mixer(values, *boundary, reference=True)
    got = {f"d_{name}": (leaf[name].main_grad - 3) / 2 for name in LEAVES[1:]}
    assert_near(got, {name: want[name] for name in got}, plain)


def ssd_inputs(tokens, dtype):
    values = make(tokens, dtype)
    x, B, C = split_columns(
        values["zxbcdt"][:, INNER : INNER + CONV_CHANNELS], (N, P), (G, S), (G, S)
    )
    return {"x": x, "dt": values["zxbcdt"][:, -N:], "B": B, "C": C}, values


def ssd_results(inputs, values, seq_idx, cu_seqlens, backend="mamba_ssm"):
    leaf = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    parameters = [
        value.detach().requires_grad_()
        for value in (values["A_log"], values["D"], values["dt_bias"])
    ]
    A_log, D, dt_bias = parameters
    y = ssd(
        leaf["x"],
        leaf["dt"],
        A_log,
        leaf["B"],
        leaf["C"],
        D,
        dt_bias,
        seq_idx,
        cu_seqlens,
        chunk_size=CHUNK,
        backend=backend,
    )
    everything = {**leaf, "A_log": A_log, "D": D, "dt_bias": dt_bias}
    gradients = torch.autograd.grad(y, everything.values(), values["dy"].view(y.shape).to(y.dtype))
    return {"y": y.detach(), **dict(zip((f"d_{name}" for name in everything), gradients))}


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ssd_equals_its_reference(lengths, dtype):
    """Kernels of mamba-ssm compute fp32 inputs in TF32, with 10 bits of mantissa in each
    product.
    """
    inputs, values = ssd_inputs(sum(lengths), dtype)
    boundary = boundaries(lengths, "cuda")
    got, plain = (
        ssd_results(inputs, values, *boundary, backend=backend)
        for backend in ("mamba_ssm", "reference")
    )
    wide = {name: value.float() for name, value in inputs.items()}
    want = ssd_results(wide, values, *boundary, backend="reference")
    assert_near(got, want, plain, limit=BF16 if dtype == torch.bfloat16 else 2e-3)


def test_ssd_errs_no_more_than_the_combined_function():
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    lengths = PACKS["awkward"]
    seq_idx, cu_seqlens = boundaries(lengths, "cuda")
    inputs, values = ssd_inputs(sum(lengths), torch.bfloat16)
    want = ssd_results(
        {name: v.float() for name, v in inputs.items()}, values, seq_idx, cu_seqlens, "reference"
    )
    leaf = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    theirs = mamba_chunk_scan_combined(
        *(leaf[name][None] for name in ("x", "dt")),
        -values["A_log"].exp(),
        leaf["B"][None],
        leaf["C"][None],
        CHUNK,
        D=values["D"],
        dt_bias=values["dt_bias"],
        seq_idx=seq_idx,
        dt_softplus=True,
    )[0]
    gradients = torch.autograd.grad(theirs, leaf.values(), values["dy"].view(theirs.shape))
    ours = ssd_results(inputs, values, seq_idx, cu_seqlens)
    for name, value in {
        "y": theirs,
        **dict(zip((f"d_{name}" for name in leaf), gradients)),
    }.items():
        assert norm_error(ours[name], want[name]) < 1.1 * norm_error(value, want[name]) + 1e-4, name


def test_very_strong_decay_stays_finite():
    lengths = PACKS["awkward"]
    inputs, values = ssd_inputs(sum(lengths), torch.bfloat16)
    values["A_log"] = values["A_log"] + 5
    values["dt_bias"] = values["dt_bias"] + 6
    got = ssd_results(inputs, values, *boundaries(lengths, "cuda"))
    assert all(torch.isfinite(value).all() for value in got.values())


def test_documents_do_not_touch_each_other_by_a_bit():
    """Convolution, scan and norm together isolate documents that share chunks."""
    lengths = PACKS["awkward"]
    values = make(sum(lengths))

    def run(inputs):
        results = mixer({**values, **inputs}, *boundaries(lengths, "cuda"))
        return {name: results[name] for name in ("y", "d_zxbcdt")}

    assert leaks(run, {"zxbcdt": values["zxbcdt"]}, lengths) == set()


def test_the_isolation_test_sees_a_sum_that_does_not_restart(monkeypatch):
    from megatron_packed.ops.ssd import mamba_ssm

    lengths = PACKS["awkward"]
    inputs, values = ssd_inputs(sum(lengths), torch.bfloat16)
    true = mamba_ssm.chunk_sum_forward
    monkeypatch.setattr(
        mamba_ssm,
        "chunk_sum_forward",
        lambda dt, A, bias, seq_idx, size: true(dt, A, bias, seq_idx * 0, size),
    )

    def run(inputs):
        results = ssd_results(inputs, values, *boundaries(lengths, "cuda"))
        return {name: results[name] for name in ("y", "d_x", "d_dt", "d_B", "d_C")}

    assert leaks(run, inputs, lengths) != set()


def test_every_run_gives_the_same_bits():
    lengths = PACKS["awkward"]
    values, boundary = make(sum(lengths)), boundaries(lengths, "cuda")
    assert_repeats(lambda: mixer(values, *boundary))


def test_replay_over_other_packings_equals_eager():
    lengths = PACKS["awkward"]
    static = make(sum(lengths))
    static["seq_idx"], _ = boundaries(lengths, "cuda")
    cu_seqlens = torch.zeros(
        1, dtype=torch.int32, device="cuda"
    )  # unused: the kernels read seq_idx
    others = [[1024], [1, 2, 3, 10] * 64, [3, 500, 128, 129, 264]]
    changes = [
        {"seq_idx": boundaries(other, "cuda")[0], "zxbcdt": make(1024, seed=i + 1)["zxbcdt"]}
        for i, other in enumerate(others)
    ]
    results = assert_replays(
        lambda tensors: mixer(tensors, tensors["seq_idx"], cu_seqlens), static, changes
    )
    assert not torch.equal(results[0]["y"], results[1]["y"])


def test_no_host_sync():
    lengths = PACKS["awkward"]
    values, boundary = make(sum(lengths)), boundaries(lengths, "cuda")
    mixer(values, *boundary)
    torch.cuda.synchronize()
    no_sync(mixer, values, *boundary)


def test_gradients_of_the_slices_share_their_buffers(monkeypatch):
    """Gradients of slices are views of one buffer, so no concatenation is needed."""
    in_place, true = [], GradientBuffer.collect

    def collect(self, gradients):
        whole = self._whole
        result = true(self, gradients)
        in_place.append(result is whole)
        return result

    monkeypatch.setattr(GradientBuffer, "collect", collect)
    mixer(make(1024), *boundaries([1024], "cuda"))
    assert in_place == [True, True]


@pytest.mark.parametrize("lengths", [*PACKS.values(), [1], [2, 1]])
@pytest.mark.parametrize("dtype, activation", [(torch.bfloat16, "silu"), (torch.float32, None)])
@pytest.mark.parametrize("backend", ["triton", "causal_conv1d"])
def test_convolution_equals_its_reference(lengths, dtype, activation, backend):
    values = make(sum(lengths), dtype)
    seq_idx, _ = boundaries(lengths, "cuda")
    x = values["zxbcdt"][:, INNER : INNER + CONV_CHANNELS]  # a slice that is not contiguous
    odd = values["zxbcdt"][:, 3 : 3 + CONV_CHANNELS]  # not aligned

    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).cuda().to(dtype)

    def run(x, dtype, backend):
        leaves = [
            v.to(dtype).detach().requires_grad_()
            for v in (x, values["conv_weight"], values["conv_bias"])
        ]
        y = causal_conv1d(*leaves, seq_idx, activation=activation, backend=backend)
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    for slice_ in (x, odd):
        for got, want in zip(run(slice_, dtype, backend), run(slice_, torch.float32, "reference")):
            assert norm_error(got, want) < (BF16 if dtype == torch.bfloat16 else 1e-5)


def test_a_document_has_the_same_convolution_at_every_place_of_a_pack():
    """The kernels treat steps inside a document differently from steps at a border."""
    values, rows = make(1024), slice(100, 700)
    x = values["zxbcdt"][:, :CONV_CHANNELS]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    found = []
    for place in range(5):
        before, after = slice(0, place), slice(place, 424)
        packed, gradient = (torch.cat([v[before], v[rows], v[after]]) for v in (x, dy))
        packed.requires_grad_()
        seq_idx, _ = boundaries([place, 600, 424 - place][place == 0 :], "cuda")
        y = causal_conv1d(
            packed, values["conv_weight"], values["conv_bias"], seq_idx, backend="triton"
        )
        (dx,) = torch.autograd.grad(y, packed, gradient)
        found.append([v[place : place + 600] for v in (y, dx)])
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0]))


@pytest.mark.parametrize("halo", [3, 200])
def test_a_convolution_continues_after_its_halo(halo):
    """The rows after the halo have the bits that they have in the complete pack."""
    values = make(1024)
    x, rest = values["zxbcdt"][:, :CONV_CHANNELS], (values["conv_weight"], values["conv_bias"])
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    for first in range(halo - 3, halo + 3):
        seq_idx, _ = boundaries([first, 1024 - first], "cuda")
        whole, parts = x.detach().requires_grad_(), [x[:halo], x[halo:]]
        parts = [part.detach().requires_grad_() for part in parts]
        want = causal_conv1d(whole, *rest, seq_idx, backend="triton")[halo:]
        got = causal_conv1d(parts[1], *rest, seq_idx, backend="triton", halo_HC=parts[0])
        (dx,) = torch.autograd.grad(want, whole, dy[halo:])
        parts = torch.autograd.grad(got, parts, dy[halo:])
        assert torch.equal(got, want) and torch.equal(torch.cat(parts), dx)


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, BF16), (torch.float32, 1e-5)])
@pytest.mark.parametrize("group_size", [64, 512, 96, 1024])
def test_gated_norm_equals_its_reference(dtype, limit, group_size):
    channels = group_size * 2
    wide = torch.randn(777, channels * 2, device="cuda").to(dtype)
    weight, dy = (
        torch.randn(channels, device="cuda").to(dtype),
        torch.randn(777, channels, device="cuda").to(dtype),
    )

    def run(dtype, backend):
        leaves = [
            v.to(dtype).detach().requires_grad_()
            for v in (wide[:, :channels].contiguous(), wide[:, channels:])
        ]
        leaves.append(weight.to(dtype).detach().requires_grad_())
        y = gated_rms_norm(*leaves, 1e-5, group_size=group_size, backend=backend)
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    for got, want in zip(run(dtype, "triton"), run(torch.float32, "reference")):
        assert norm_error(got, want) < limit


def test_offsets_beyond_32_bits_are_right():
    """With rows of 32,768 elements, the last rows of x begin beyond 2^31 elements.

    32-bit offsets in the kernels would overflow there.
    """
    tokens, lengths = 67_072, [60_000, 5_000, 2_072]
    seq_idx, cu_seqlens = boundaries(lengths, "cuda")
    wide = torch.empty(tokens, 32_768, dtype=torch.bfloat16, device="cuda")
    heads, groups, state = 2, 1, 16
    x, B, C = split_columns(
        wide[:, : heads * P + 2 * state].normal_(), (heads, P), (groups, state), (groups, state)
    )
    dt, A_log = (
        torch.randn(tokens, heads, device="cuda").bfloat16(),
        torch.zeros(heads, device="cuda"),
    )
    D, dt_bias = torch.zeros(heads, device="cuda"), -torch.ones(heads, device="cuda")
    assert tokens * x.stride(0) > int32_offsets.OFFSET_LIMIT
    rest = (seq_idx, cu_seqlens)
    y = ssd(x, dt, A_log, B, C, D, dt_bias, *rest, chunk_size=CHUNK, backend="mamba_ssm")
    copies = (x.contiguous(), dt, A_log, B.contiguous(), C.contiguous(), D, dt_bias)
    want = ssd(*copies, *rest, chunk_size=CHUNK, backend="mamba_ssm")
    assert torch.equal(y, want) and relative_error(y[-100:], torch.zeros_like(y[-100:]) + 1e-30) > 0
    x = wide[:, :128]
    reasons = CONV.explain(_conv_inputs(x))["causal_conv1d"]
    assert any("32-bit offsets" in reason for reason in reasons)


def _conv_inputs(x):
    from megatron_packed.ops.causal_conv1d.api import CausalConvInputs

    return CausalConvInputs(
        tokens=x.shape[0],
        channels=x.shape[1],
        width=4,
        row_stride=x.stride(0),
        dtype=x.dtype,
        weight_dtype=x.dtype,
        bias_dtype=None,
        device_type="cuda",
    )


def test_the_fast_backends_are_chosen():
    values = make(256)
    seq_idx, cu_seqlens = boundaries([256], "cuda")
    chosen = set()
    for op in (SSD, CONV, GATED_NORM):
        op.chosen.clear()
    z, xBC, dt = split_columns(values["zxbcdt"], (INNER,), (CONV_CHANNELS,), (N,))
    x, B, C = split_columns(
        causal_conv1d(xBC, values["conv_weight"], values["conv_bias"], seq_idx),
        (N, P),
        (G, S),
        (G, S),
    )
    y = ssd(
        x,
        dt,
        values["A_log"],
        B,
        C,
        values["D"],
        values["dt_bias"],
        seq_idx,
        cu_seqlens,
        chunk_size=CHUNK,
    )
    gated_rms_norm(y.flatten(1), z, values["norm_weight"], 1e-5, group_size=INNER // G)
    for op in (SSD, CONV, GATED_NORM):
        chosen |= {backend.name for backend in op.chosen.values()}
    assert chosen == {"triton"}
