"""Kernels of the convolution in Triton's interpreter; test_triton_interpreter.py runs them."""

import pytest
import torch

from megatron_packed.ops.causal_conv1d import api, triton_kernels
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.column_slices import split_columns
from support.op_packs import PACKS, boundaries, leaks, relative_error
from support.random_tensors import normal

C = 5


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Use two blocks of channels, the second not full, and several runs of tokens."""
    for module in (api, triton_kernels):
        monkeypatch.setattr(module, "BLOCK_CHANNELS", 4)
    monkeypatch.setattr(api, "_SHORTEST_RUN", 12)


def results(backend, x, weight, bias, seq_idx, dy, activation):
    leaves = [None if v is None else v.detach().requires_grad_() for v in (x, weight, bias)]
    y = causal_conv1d(*leaves, seq_idx, activation=activation, backend=backend)
    return [y, *torch.autograd.grad(y, [v for v in leaves if v is not None], dy.to(y.dtype))]


OPTIONS = [
    (4, "silu", True),
    (4, None, False),
    (3, "silu", False),
    (2, None, True),
    (1, "silu", True),
]
CASES = [
    *((lengths, OPTIONS[0]) for lengths in ([1], [2, 1], [1, 2, 1, 3] * 5, [28], [11, 1, 12, 7])),
    *(([7, 1, 6], options) for options in OPTIONS[1:]),
]


@pytest.mark.parametrize(("lengths", "options"), CASES)
def test_outputs_and_gradients_equal_the_reference(lengths, options):
    width, activation, has_bias = options
    tokens = sum(lengths)
    x = normal(tokens, C + 5)[:, 3 : 3 + C]
    weight, bias = normal(C, width, seed=1), normal(C, seed=2) if has_bias else None
    dy, (seq_idx, _) = normal(tokens, C, seed=3), boundaries(lengths)
    got = results("triton", x, weight, bias, seq_idx, dy, activation)
    wide = [None if v is None else v.double() for v in (x, weight, bias)]
    want = results("reference", *wide, seq_idx, dy, activation)
    for one, other in zip(got, want):
        assert relative_error(one, other) < 2e-6


@pytest.mark.parametrize(("width", "tokens"), [(4, 30), (3, 5), (2, 12), (4, 1)])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_part_of_a_pack_with_its_halo_is_a_slice_of_the_pack(width, tokens, backend, monkeypatch):
    """Check documents that end in the halo, at its border and after it, and the halo's gradient.

    A program has three steps, so documents also end in its later steps and around its last one.
    """
    monkeypatch.setattr(api, "_SHORTEST_RUN", 12)
    rows = width - 1
    x, weight = (
        normal(rows + tokens, C + 5)[:, 3 : 3 + C].double(),
        normal(C, width, seed=1).double(),
    )
    late = [first for first in (9, 11, 12, 13) if first < tokens]
    for first in (*range(rows + 2), *(rows + first for first in late)):
        seq_idx = (torch.arange(rows + tokens) >= first).int()[None]
        dy = normal(tokens, C, seed=3).double()
        whole, leaf = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = causal_conv1d(whole, leaf, None, seq_idx, backend="reference")[rows:]
        want = [y, *torch.autograd.grad(y, [whole, leaf], dy)]
        parts = [v.float().detach().requires_grad_() for v in (x[:rows], x[rows:], weight)]
        part = causal_conv1d(parts[1], parts[2], None, seq_idx, backend=backend, halo_HC=parts[0])
        dhalo, dx, dweight = torch.autograd.grad(part, parts, dy.float())
        for got, wanted in zip((part, torch.cat([dhalo, dx]), dweight), want):
            assert relative_error(got, wanted) < 2e-6


def test_long_packs_have_longer_runs(monkeypatch):
    monkeypatch.setattr(api, "_PROGRAMS", 4)
    lengths = [5, 13, 9, 7]
    inputs = normal(sum(lengths), C), normal(C, 4, seed=1), normal(C, seed=2)
    (length, _), sizes = triton_kernels._launch(*inputs[:2])
    assert (length, sizes["length"]) == (2, 20)
    rest = boundaries(lengths)[0], normal(sum(lengths), C, seed=3), "silu"
    for got, want in zip(results("triton", *inputs, *rest), results("reference", *inputs, *rest)):
        assert relative_error(got, want) < 2e-6


def per_token(lengths, seq_idx):
    def run(inputs):
        x = inputs["x"].clone().requires_grad_()
        y = causal_conv1d(x, normal(4, 4, seed=1), normal(4, seed=2), seq_idx, backend="triton")
        return {"y": y.detach(), "dx": torch.autograd.grad(y.square().sum(), x)[0]}

    return run, {"x": normal(sum(lengths), 4)}


def test_documents_do_not_touch_each_other_by_a_bit():
    lengths = PACKS["shorter than the convolution"]
    seq_idx, _ = boundaries(lengths)
    assert leaks(*per_token(lengths, seq_idx), lengths) == set()
    one_document = per_token(lengths, torch.zeros_like(seq_idx))
    assert {"y"} <= leaks(*one_document, lengths, victims=[1])


def test_a_broken_document_stays_alone():
    x, weight, bias = normal(10, C), normal(C, 4, seed=1), normal(C, seed=2)
    x[:4] = torch.tensor([torch.inf, torch.nan, -torch.inf, torch.nan])[:, None]
    x.requires_grad_()
    y = causal_conv1d(x, weight, bias, boundaries([4, 6])[0], backend="triton")
    y.sum().backward()
    assert torch.isfinite(y[4:]).all() and not torch.isfinite(y[:4]).any()
    assert torch.isfinite(x.grad[4:]).all()


def test_nothing_uninitialised_is_read(nothing_uninitialised):
    seq_idx, _ = boundaries([5, 9])
    inputs = normal(14, C), normal(C, 4, seed=1), normal(C, seed=2), seq_idx, normal(14, C, seed=3)
    for got, want in zip(results("triton", *inputs, "silu"), results("reference", *inputs, "silu")):
        assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("in_flat_buffers", [("weight",), ("bias",)])
def test_gradients_go_where_they_belong(in_flat_buffers):
    """Check the gradients of bf16 parameters and the columns of x in the common buffer."""
    wide, lengths = normal(20, C + 4).bfloat16().requires_grad_(), [5, 15]
    seq_idx, dy = boundaries(lengths)[0], normal(20, C, seed=3).bfloat16()
    parameters = {
        "weight": torch.nn.Parameter(normal(C, 4, seed=1).bfloat16()),
        "bias": torch.nn.Parameter(normal(C, seed=2).bfloat16()),
    }
    exact = [value.detach().float() for value in (wide[:, 4:], *parameters.values())]
    want = results("reference", *exact, seq_idx, dy, "silu")
    for name in in_flat_buffers:
        parameters[name].main_grad = torch.full_like(parameters[name], 3.0, dtype=torch.float32)
    for _ in range(2):
        first, x = split_columns(wide, (4,), (C,))
        y = causal_conv1d(x, *parameters.values(), seq_idx, backend="triton")
        torch.autograd.backward((first, y), (torch.zeros_like(first), dy))
    assert relative_error(wide.grad[:, 4:], 2 * want[1]) < 2**-6
    for (name, parameter), gradient in zip(parameters.items(), want[2:]):
        if name in in_flat_buffers:
            assert parameter.grad is None
            assert relative_error(parameter.main_grad - 3, 2 * gradient) < 1e-5
        else:
            assert parameter.grad.dtype == torch.bfloat16
            assert relative_error(parameter.grad, 2 * gradient) < 2**-6
