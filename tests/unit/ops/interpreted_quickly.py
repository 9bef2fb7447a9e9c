"""Functions of the quick interpreter; test_triton_interpreter.py runs these tests."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from support import quick_interpreter
from support.random_tensors import normal


@triton.jit
def _line(a, b, c, d):
    """Compose the functions ``a x + b`` and ``c x + d``; the order matters."""
    return a * c, b * c + d


@triton.jit
def _kernel(x_ptr, out_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    a, b = tl.load(x_ptr + at), tl.load(x_ptr + 32 + at)
    first, second = tl.associative_scan((a, b), AXIS, _line, reverse=REVERSE)
    tl.store(out_ptr + at, first)
    tl.store(out_ptr + 32 + at, second)
    first, second = tl.reduce((a, b), AXIS, _line, keep_dims=KEEP)
    if KEEP:
        tl.store(out_ptr + 64 + at, first + tl.zeros_like(a))
        tl.store(out_ptr + 96 + at, second + tl.zeros_like(a))
    else:
        to = tl.arange(0, 4 if AXIS == 1 else 8)
        tl.store(out_ptr + 64 + to, first)
        tl.store(out_ptr + 96 + to, second)


@pytest.mark.parametrize(("axis", "keep", "reverse"), [(0, False, True), (1, True, False)])
def test_reductions_and_scans_have_the_bits_of_the_interpreter(axis, keep, reverse, monkeypatch):
    x = normal(64)
    found = []
    for kind in ("quick", "slow"):
        if kind == "slow":
            monkeypatch.setattr(
                interpreter.ReduceOps, "generic_reduce", quick_interpreter.slow_reduce
            )
            monkeypatch.setattr(interpreter.ScanOps, "generic_scan", quick_interpreter.slow_scan)
        else:
            assert interpreter.ReduceOps.generic_reduce is quick_interpreter.reduce
        out = torch.zeros(128)
        _kernel[(1,)](x, out, axis, keep, reverse)
        found.append(out)
    assert torch.equal(*found) and found[0].count_nonzero() > 70


@triton.jit
def _calculations(a_ptr, b_ptr, out_ptr, WIDE: tl.constexpr):
    at = tl.arange(0, 4)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    if WIDE:
        a = a[:, None] * tl.full((1, 4), 1, a.dtype)
        tl.store(out_ptr + at[:, None] * 4 + at[None, :], (a + b) * a - b)
    else:
        tl.store(out_ptr + at, a + b)
        tl.store(out_ptr + 4 + at, a - b)
        tl.store(out_ptr + 8 + at, a * b)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.int8]
)
@pytest.mark.parametrize("other", [torch.float32, torch.int32])
@pytest.mark.parametrize("wide", [False, True])
def test_types_and_shapes_of_results_are_those_of_pytorch(dtype, other, wide):
    large = {torch.int32: 2**24 + 1, torch.int64: 2**40 + 1}.get(dtype, 7 / 3)  # rounded by others
    a = torch.tensor([large, 1, -2, 5], dtype=torch.float64).to(dtype)
    b = torch.tensor([-7, 4, 2, 1]).to(other)
    out = torch.zeros(16, dtype=torch.float64)
    _calculations[(1,)](a, b, out, wide)
    if wide:
        assert torch.equal(out.view(4, 4), ((a[:, None] + b) * a[:, None] - b).double())
    else:
        assert torch.equal(out[:12], torch.cat([a + b, a - b, a * b]).double())


@triton.jit
def _with_numbers(a_ptr, out_ptr):
    at = tl.arange(0, 4)
    a = tl.load(a_ptr + at)
    tl.store(out_ptr + at, a + 3)
    tl.store(out_ptr + 4 + at, a * 0.3)
    tl.store(out_ptr + 8 + at, a - 2147483647)
    tl.store(out_ptr + 12 + at, (a > 1).to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64])
def test_operations_with_numbers_have_the_bits_of_the_interpreter(dtype, monkeypatch):
    a = torch.tensor([7 / 3, 1, -2, 5]).to(dtype)
    found = []
    for kind in ("quick", "slow"):
        if kind == "slow":
            monkeypatch.setattr(
                TritonSemantic, "binary_op_type_checking_impl", quick_interpreter.slow_operands
            )
        else:
            assert TritonSemantic.binary_op_type_checking_impl is quick_interpreter.operands
        found.append(torch.zeros(16, dtype=torch.float64))
        _with_numbers[(1,)](a, found[-1])
    assert torch.equal(*found) and found[0].count_nonzero() > 10


@triton.jit
def _of_unequal_shapes(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4), tl.zeros((4,), tl.float32) + tl.zeros((8,), tl.float32))


def test_tiles_of_unequal_shapes_are_an_error():
    with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
        _of_unequal_shapes[(1,)](torch.zeros(4))
