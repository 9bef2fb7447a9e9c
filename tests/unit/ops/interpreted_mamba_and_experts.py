"""Kernels of the Mamba and expert ops in Triton's interpreter; test_triton_interpreter.py runs them."""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad, softplus

from megatron_packed.memory.recompute_outputs import recomputed_output
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.grouped_mlp import grouped_mm
from megatron_packed.ops.grouped_mlp.api import grouped_mlp
from megatron_packed.ops.grouped_mlp.unwritten_rows import zero_rows_after_, zero_unused_experts_
from megatron_packed.ops.permute import triton_kernels as permute_kernels
from megatron_packed.ops.permute.api import permute, unpermute
from megatron_packed.ops.permute.gathers import sum_rows
from megatron_packed.ops.ssd.chunk_sum import PartialSums, chunk_sum_backward, chunk_sum_forward
from megatron_packed.ops.ssd.reference import document_sum
from support.op_packs import PACKS, boundaries, leaks, relative_error
from support.random_tensors import normal

HEADS, CHUNK = 11, 16  # 11 heads need two programs, and the second is not full.


def exact_sums(dt, A_log, bias, seq_idx):
    """Compute step sizes and restarting sums in float64, (N, Q, L)."""
    padded = -dt.shape[0] % CHUNK
    step_QLN = pad(softplus(dt + bias), (0, 0, 0, padded)).view(-1, CHUNK, HEADS)
    seq_idx_QL = torch.cat([seq_idx, seq_idx[:, -1:].expand(1, padded)], 1).view(-1, CHUNK)
    return step_QLN.permute(2, 0, 1), document_sum(step_QLN * -A_log.exp(), seq_idx_QL).permute(
        2, 0, 1
    )


def partial_sums(step, count, seed=0):
    """Return random gradients that the kernel of the step sizes reads, as ``count`` partial sums."""
    heads, chunks, _ = step.shape
    return {
        "d_sum_XNQL": normal(count, *step.shape, seed=seed),
        "d_last_sum_NQX": normal(heads, chunks, count + 2, seed=seed + 1)[..., :count],
        "d_log_XNQL": normal(count, *step.shape, seed=seed + 2),
        "d_reach_XNQL": normal(count, *step.shape, seed=seed + 3),
        "d_step_XNQL": normal(count, *step.shape, seed=seed + 4),
        "d_D_XXQN": normal(2, count + 2, chunks, heads, seed=seed + 5)[:, :count],
    }


SOME_MAIN_GRADS = (False, True, False)
SUMS = [
    *((name, SOME_MAIN_GRADS) for name in PACKS),
    *(("tail", has) for has in ((False,) * 3, (True,) * 3)),
]


@pytest.mark.parametrize(("name", "has_main_grads"), SUMS)
def test_chunk_sum_and_its_adjoint(name, has_main_grads):
    lengths = PACKS[name][:30]  # Some packs have over 100 documents; use 30 of them.
    tokens, (seq_idx, _) = sum(lengths), boundaries(lengths)
    # dt is a strided slice, with step sizes from 1e-6 to 12.
    dt = 4 * normal(tokens, HEADS + 5)[:, 3 : 3 + HEADS]
    A_log, bias, D = 2 * torch.rand(HEADS), normal(HEADS, seed=1) - 3, normal(HEADS, seed=2)
    wide = [value.double().requires_grad_() for value in (dt, A_log, bias, D)]
    want_step, want_sum = exact_sums(*wide[:3], seq_idx)
    step, total = chunk_sum_forward(dt, A_log, bias, seq_idx, CHUNK)
    # With atol 0, the relative precision of small step sizes is checked too.
    torch.testing.assert_close(step.double(), want_step, rtol=2e-6, atol=0)
    assert relative_error(total, want_sum) < 1e-6

    out = torch.full((tokens, HEADS + 2), 7.0)
    parts = partial_sums(step, 1 + has_main_grads.count(True))
    main_grads = tuple(torch.full((HEADS,), 5.0) if has else None for has in has_main_grads)
    got = chunk_sum_backward(
        step,
        dt,
        A_log,
        D,
        bias,
        seq_idx,
        PartialSums(**parts),
        out_TN=out[:, 1 : 1 + HEADS],
        main_grads=main_grads,
    )
    d_sum, d_log, d_reach, d_step = (
        parts[f"d_{name}_XNQL"].sum(0, dtype=torch.float64)
        for name in ("sum", "log", "reach", "step")
    )
    d_reach[..., 0] = 0
    logs = want_step * -wide[1].exp()[:, None, None]
    loss = (want_sum * d_sum).sum() + (
        want_sum[..., -1] * parts["d_last_sum_NQX"].sum(-1, dtype=torch.float64)
    ).sum()
    loss = loss + (logs * (d_log + d_reach.cumsum(-1))).sum() + (want_step * d_step).sum()
    loss = loss + (wide[3] * parts["d_D_XXQN"].double()).sum()
    want = torch.autograd.grad(loss, wide)
    assert relative_error(got.dt_TN, want[0]) < 1e-6
    for gradient, main_grad, expected in zip(got[1:], main_grads, (want[1], want[3], want[2])):
        assert (gradient is None) == (main_grad is not None)
        assert relative_error(gradient if main_grad is None else main_grad - 5, expected) < 1e-6
    assert (out[:, 0] == 7).all() and (out[:, -1] == 7).all()  # Other columns are not written.


@pytest.mark.parametrize("restarts", [True, False])
def test_chunk_sum_isolates_by_the_bit_only_because_it_restarts(restarts):
    lengths = [5, 21, 7, 12]  # Document boundaries are inside chunks.
    tokens, (seq_idx, _) = sum(lengths), boundaries(lengths)
    seq_idx = seq_idx if restarts else torch.zeros_like(seq_idx)
    A_log, bias = torch.rand(HEADS) - 1, normal(HEADS)

    def run(inputs):
        step, total = chunk_sum_forward(inputs["dt"], A_log, bias, seq_idx, CHUNK)
        parts = {name: torch.zeros_like(value) for name, value in partial_sums(step, 1).items()}
        parts["d_sum_XNQL"] = total[None]
        d_dt = chunk_sum_backward(
            step,
            inputs["dt"],
            A_log,
            A_log,
            bias,
            seq_idx,
            PartialSums(**parts),
            out_TN=torch.empty_like(inputs["dt"]),
            main_grads=(None, None, None),
        ).dt_TN
        return {"sum": total.flatten(1).t()[:tokens].clone(), "d_dt": d_dt}

    assert leaks(run, {"dt": normal(tokens, HEADS)}, lengths, victims=[0, 2]) == (
        set() if restarts else {"sum", "d_dt"}
    )


@pytest.mark.parametrize(
    "tokens, channels, group_size, options",
    [
        (7, 24, 6, {}),
        (33, 40, 40, {}),
        (1, 64, 16, {}),
        (7, 24, 6, {"norm_before_gate": True, "shared_weight": True}),
        (33, 40, 40, {"norm_before_gate": True}),
        (1, 64, 16, {"norm_before_gate": True, "shared_weight": True}),
        (33, 24, 8, {"shared_weight": True}),
    ],
)
def test_gated_norm_kernel(monkeypatch, tokens, channels, group_size, options):
    # With 4 programs, each program has several tiles.
    monkeypatch.setattr("megatron_packed.ops.gated_rms_norm.api._BACKWARD_PROGRAMS", 4)
    norm_before_gate = options.get("norm_before_gate", False)
    wide = normal(tokens, channels + 8).requires_grad_()
    weight = normal(group_size if "shared_weight" in options else channels).requires_grad_()
    x = normal(tokens, channels, seed=1).requires_grad_()

    def run(backend):
        z, _ = split_columns(wide, (channels,), (8,))
        y = gated_rms_norm(
            *(x, z, weight, 1e-5),
            group_size=group_size,
            norm_before_gate=norm_before_gate,
            backend=backend,
        )
        return [
            y,
            *torch.autograd.grad((y * normal(tokens, channels, seed=2)).sum(), (x, wide, weight)),
        ]

    for got, want in zip(run("triton"), run("reference")):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [24, 6])
def test_gated_norm_adds_the_weight_gradient_into_main_grad(dtype, channels):
    """Check that two backward passes add unrounded gradients to ``main_grad``, for any dtype.

    A weight of 6 channels is shared by the four groups.
    """
    x, z, dy = (normal(9, 24, seed=seed).to(dtype) for seed in (1, 2, 3))
    weight = torch.nn.Parameter(normal(channels).to(dtype))
    wide = weight.detach().float().requires_grad_()
    run = partial(gated_rms_norm, eps=1e-5, group_size=6, norm_before_gate=channels == 6)
    y = run(x.float(), z.float(), wide, backend="reference")
    (want,) = torch.autograd.grad(y, wide, dy.float())
    weight.main_grad = torch.full((channels,), 7.0)
    for _ in range(2):
        run(x, z, weight, backend="triton").backward(dy)
    assert weight.grad is None
    assert relative_error((weight.main_grad - 7) / 2, want) < 1e-6


@pytest.mark.parametrize(("tail", "rows"), [(0, None), (3, None), (3, 7), (3, 50), (13, 50)])
def test_permute_kernels(monkeypatch, tail, rows):
    # 40 channels then take two full steps and a partial one.
    monkeypatch.setattr(permute_kernels, "_CHANNELS_PER_STEP", 16)
    tokens, channels, routes, experts = 13, 40, 3, 5
    x, weights = (
        normal(tokens, channels).requires_grad_(),
        torch.rand(tokens, routes, requires_grad=True),
    )
    ids = normal(tokens, experts + 2).topk(routes)[1] - 1  # -1 and 5 are no experts.
    valid = torch.arange(tokens) < tokens - tail

    def run(backend):
        permuted = permute(x, ids, experts, valid, rows=rows, backend=backend)
        behind = torch.arange(permuted.token_R.shape[0])[:, None] >= permuted.offsets_E[-1]
        y_RD = permuted.x_RD.sin().masked_fill(behind, torch.nan)
        y = unpermute(y_RD, permuted, weights, backend=backend)
        copied = permuted.x_RD.detach().requires_grad_()
        summed = sum_rows(copied, permuted, backend=backend)
        return [
            permuted.x_RD,
            y,
            summed,
            *torch.autograd.grad((y * normal(tokens, channels, seed=2)).sum(), (x, weights)),
            *torch.autograd.grad(summed, copied, normal(tokens, channels, seed=3)),
        ]

    for got, want in zip(run("triton"), run("reference")):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row_bytes", [16, 13])
@pytest.mark.parametrize("used", [0, 7, 40, 99])
def test_bytes_of_used_rows_are_copied_and_no_others(monkeypatch, row_bytes, used):
    monkeypatch.setattr(permute_kernels, "_COPYING_PROGRAMS", 2)
    monkeypatch.setattr(permute_kernels, "_WORDS_PER_STEP", 16)
    start, nbytes = 5 * 8, 40 * row_bytes - 5 * 8
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    target = torch.full_like(source, 255)
    counts = torch.tensor([3, used, 5])
    permute_kernels.copy_used(target, source, counts, 1, row_bytes, start)
    copied = min(max(used * row_bytes - start, 0), nbytes)
    assert torch.equal(target[:copied], source[:copied]) and (target[copied:] == 255).all()


@pytest.mark.parametrize(
    "ends", [[0, 7, 7, 20, 33, 33], [0, 0, 0, 0, 0, 0], [40, 40, 40, 40, 40, 40]]
)
def test_edges_are_cleared_and_nothing_else(ends):
    offsets = torch.tensor(ends, dtype=torch.int32)
    rows = zero_rows_after_(torch.full((40, 3), torch.nan), offsets)
    assert rows[: ends[-1]].isnan().all() and (rows[ends[-1] :] == 0).all()
    weights = zero_unused_experts_(torch.full((6, 5, 3), torch.nan), offsets)
    for expert, (start, end) in enumerate(zip([0, *ends], ends)):
        assert (weights[expert] == 0).all() if start == end else weights[expert].isnan().all()


@pytest.mark.parametrize("kind", ["swiglu", "squared_relu"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_products_with_cleared_edges(kind, accumulate):
    """Check grouped products against the reference on a CPU, and that unused rows are zero.

    The CPU version of PyTorch's grouped product also leaves rows after the last offset unwritten.
    """
    offsets = torch.tensor([0, 7, 7, 20, 33, 33], dtype=torch.int32)
    x, w2 = normal(40, 24), normal(6, 24, 16, seed=1)
    w1 = normal(6, 32 if kind == "swiglu" else 16, 24, seed=2)

    def run(function, accumulate):
        leaves = [value.clone().requires_grad_() for value in (x, w1, w2)]
        if accumulate:
            for leaf in leaves[1:]:
                leaf.main_grad = torch.ones_like(leaf)
        y = function(*leaves, offsets, activation=kind)
        (y * normal(40, 24, seed=3)).sum().backward()
        assert not accumulate or all(leaf.grad is None for leaf in leaves[1:])
        return [
            y,
            leaves[0].grad,
            *(leaf.main_grad - 1 if accumulate else leaf.grad for leaf in leaves[1:]),
        ]

    def kept(x, w1, w2, offsets, *, activation):
        hidden = grouped_mm.activate(grouped_mm.fc1(x, w1, offsets), activation)
        return grouped_mm.fc2(hidden, w2, offsets)

    def recomputed(x, w1, w2, offsets, *, activation):
        fc1 = grouped_mm.fc1(x, w1, offsets)
        act = grouped_mm.activate(fc1, activation)
        with recomputed_output(act, grouped_mm.activate, fc1, activation):
            return grouped_mm.fc2(act, w2, offsets)

    got, want = run(kept, accumulate), run(grouped_mlp, False)
    again = run(recomputed, accumulate)
    assert all(map(torch.equal, got, again))
    for value, expected in zip(got, want):
        assert relative_error(value, expected) < 1e-6
    assert not got[0][33:].any() and not got[1][33:].any()
