"""Reductions and scans of the quick interpreter; test_triton_interpreter.py runs them."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from support import quick_interpreter


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
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
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
