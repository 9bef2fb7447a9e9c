"""The reference against PyTorch's convolution of each document, and the isolation of documents."""

import sys
from functools import partial
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.causal_conv1d import reference
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from support.op_packs import PACKS, boundaries, leaks, relative_error, run_without_values

C = 8


def make(tokens, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((tokens, C), (C, width), (C,))
    ]


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize(
    "width, activation, has_bias",
    [(4, "silu", True), (4, None, False), (3, "silu", False), (2, "silu", True)],
)
def test_packed_equals_documents_one_by_one(lengths, width, activation, has_bias):
    x, weight, bias = (value.requires_grad_() for value in make(sum(lengths), width))
    bias = bias if has_bias else None
    parameters = [x, weight, *([bias] if has_bias else [])]
    y = causal_conv1d(
        x, weight, bias, boundaries(lengths)[0], activation=activation, backend="reference"
    )
    alone = [
        conv1d(pad(own.t()[None], (width - 1, 0)), weight[:, None], bias, groups=C)[0].t()
        for own in x.split(lengths)
    ]
    want = torch.cat(alone) if activation is None else silu(torch.cat(alone))
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    for got, expected in zip(
        torch.autograd.grad(y, parameters, dy), torch.autograd.grad(want, parameters, dy)
    ):
        assert relative_error(got, expected) < 1e-12


def per_token_results(lengths):
    x, weight, bias = make(sum(lengths), dtype=torch.float32)

    def run(inputs):
        x = inputs["x"].clone().requires_grad_()
        y = causal_conv1d(x, weight, bias, boundaries(lengths)[0], backend="reference")
        return {"y": y.detach(), "dx": torch.autograd.grad(y.square().sum(), x)[0]}

    return run, {"x": x}


@pytest.mark.parametrize("name", ["shorter than the convolution", "starts and ends inside chunks"])
def test_documents_do_not_touch_each_other_by_a_bit(monkeypatch, name):
    assert leaks(*per_token_results(PACKS[name]), PACKS[name]) == set()
    monkeypatch.setattr(
        reference,
        "reaches",
        lambda seq_idx, back: torch.ones(seq_idx.shape[1], 1, dtype=torch.bool),
    )
    # The test changes each document in its middle. Only in short documents is the middle within
    # reach of the next document's filter.
    assert "y" in leaks(
        *per_token_results(PACKS["shorter than the convolution"]),
        PACKS["shorter than the convolution"],
    )


def test_a_broken_document_stays_alone():
    """Check that infinities and NaN stay in their document: the mask replaces values by zeros."""
    x, weight, bias = make(10, dtype=torch.float32)
    x[:4] = torch.tensor([torch.inf, torch.nan, -torch.inf, torch.nan])[:, None]
    y = causal_conv1d(x, weight, bias, boundaries([4, 6])[0], backend="reference")
    assert torch.isfinite(y[4:]).all() and not torch.isfinite(y[:4]).any()


def test_strided_slices_and_low_precision():
    wide = torch.randn(30, C + 5)
    x, weight, bias = wide[:, 3 : 3 + C], *make(30, dtype=torch.float32)[1:]
    seq_idx, _ = boundaries([10, 20])
    want = causal_conv1d(x.contiguous(), weight, bias, seq_idx, backend="reference")
    assert torch.equal(causal_conv1d(x, weight, bias, seq_idx, backend="reference"), want)
    low = causal_conv1d(x.bfloat16(), weight, bias, seq_idx, backend="reference")
    assert low.dtype == torch.bfloat16
    exact = causal_conv1d(x.bfloat16().float(), weight, bias, seq_idx, backend="reference")
    # The arithmetic is fp32, with one rounding at the end.
    assert torch.equal(low, exact.bfloat16())


def test_no_host_sync_and_static_shapes():
    run_without_values(
        partial(causal_conv1d, backend="reference"), *make(20), boundaries([5, 15])[0]
    )


def test_what_cannot_be_is_refused_with_its_numbers():
    x, weight, bias = make(6)
    seq_idx, _ = boundaries([6])
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        causal_conv1d(x, weight, bias, seq_idx, activation="gelu")
    with pytest.raises(ValueError, match=r"weight \[4, 8\]"):
        causal_conv1d(x, weight.t(), bias, seq_idx)
    with pytest.raises(ValueError, match=r"seq_idx has shape \[6\]"):
        causal_conv1d(x, weight, bias, seq_idx[0])
    with pytest.raises(NoBackendError, match="causal_conv1d"):
        causal_conv1d(x, weight, bias, seq_idx, backend="causal_conv1d")


@pytest.fixture
def library(monkeypatch):
    """Provide the backend with a stand-in for the package causal-conv1d.

    Like the package's kernels, the stand-in adds to ``dweight`` and ``dbias``.
    """

    def forward(x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation):
        return reference.run(
            x[0].t(), weight, bias, seq_idx, activation="silu" if silu_activation else None
        ).t()[None]

    def backward(*, x, weight, bias, dout, seq_idx, dx, dweight, dbias, silu_activation, **absent):
        assert set(absent) == {"initial_states", "dfinal_states", "dinitial_states"} and not any(
            absent.values()
        )
        leaves = [
            None if value is None else value.detach().float().requires_grad_()
            for value in (x, weight, bias)
        ]
        with torch.enable_grad():
            y = forward(*leaves, seq_idx, None, None, silu_activation)
        present = [leaf for leaf in leaves if leaf is not None]
        gradients = torch.autograd.grad(y, present, dout.float())
        dx.copy_(gradients[0])
        for total, gradient in zip((dweight, dbias), gradients[1:]):
            assert total.dtype == torch.float32
            total += gradient

    functions = ModuleType("causal_conv1d.cpp_functions")
    functions.causal_conv1d_fwd_function, functions._causal_conv1d_bwd_cpp = forward, backward
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    monkeypatch.setitem(sys.modules, "causal_conv1d.cpp_functions", functions)
    name = "megatron_packed.ops.causal_conv1d.library"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_flat_buffers", [(), ("weight",), ("weight", "bias")])
def test_parameter_gradients_go_where_they_belong(library, dtype, in_flat_buffers):
    """Check that gradients are added unrounded to ``main_grad`` in each backward pass.

    Parameters without ``main_grad`` get a gradient from autograd in their own dtype.
    """
    x, weight, bias = (value.to(dtype) for value in make(20))
    seq_idx, _ = boundaries([5, 15])
    dy = torch.linspace(-1, 1, 20 * C).view(20, C).to(dtype)
    wide = [value.float().requires_grad_() for value in (x, weight, bias)]
    want = torch.autograd.grad(reference.run(*wide, seq_idx, activation="silu"), wide, dy.float())

    x.requires_grad_()
    parameters = {"weight": torch.nn.Parameter(weight), "bias": torch.nn.Parameter(bias)}
    for name in in_flat_buffers:
        parameters[name].main_grad = torch.full_like(parameters[name], 3.0, dtype=torch.float32)
    for _ in range(2):
        library.run(x, *parameters.values(), seq_idx, activation="silu").backward(dy)
    assert relative_error(x.grad, 2 * want[0]) < (1e-6 if dtype == torch.float32 else 2**-7)
    for (name, parameter), gradient in zip(parameters.items(), want[1:]):
        if name in in_flat_buffers:
            assert parameter.grad is None
            assert relative_error(parameter.main_grad - 3, 2 * gradient) < 1e-6
        else:
            assert parameter.grad.dtype == dtype
            assert relative_error(parameter.grad, 2 * gradient) < (
                1e-6 if dtype == torch.float32 else 2**-7
            )


@pytest.mark.parametrize("width, activation", [(4, None), (4, "silu"), (3, "silu"), (2, "silu")])
def test_a_convolution_without_bias(library, width, activation):
    x, weight, _ = (value.float().requires_grad_() for value in make(12, width))
    seq_idx, _ = boundaries([5, 7])
    results = [
        torch.autograd.grad(
            function(x, weight, None, seq_idx, activation=activation).square().sum(), (x, weight)
        )
        for function in (library.run, reference.run)
    ]
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)
    weight.main_grad = torch.full_like(weight, 3.0)
    library.run(x, weight, None, seq_idx, activation=activation).square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 3, results[1][1], rtol=1e-5, atol=1e-5)
